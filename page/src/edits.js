// Edits as the SDK's JSON has them, `{"at": "layer3", "op": "scale", "factor": 0, "channels": [1, 2]}`, and as messages.
// Operations, their options and defaults are those of the SDK (`gen/operations.js`), and their fields those of the
// protocol: one that is added there has its form here.
import { ScalarType } from "@bufbuild/protobuf";
import { OPTIONS } from "../gen/operations.js";
import { DirectionEditSchema, EditSchema } from "../gen/trocar_api/v1/edit_pb.js";
import { Axis } from "../gen/trocar_api/v1/reduction_pb.js";
import { Dtype } from "../gen/trocar_api/v1/tensor_pb.js";

function kindOf(field) {
  if (!field) return "operand"; // the operation itself
  if (field.fieldKind === "enum") return "choice";
  if (field.fieldKind === "message") return field.message.name === "Operand" ? "operand" : "vectors";
  if (field.scalar === ScalarType.BOOL) return "flag";
  if (field.scalar === ScalarType.STRING) return field.name === "source" ? "source" : "text";
  return field.scalar === ScalarType.DOUBLE ? "number" : "integer";
}

/** Fields of the operations that take a stored direction, by the operation's name. */
const ALONG = new Map(DirectionEditSchema.oneofs.find((one) => one.name === "kind").fields.map((field) => [field.name, field]));

const isOfDirection = ({ field }) => field?.parent === DirectionEditSchema;

const optionOf = (message) => ({ field: name, ...option }) => {
  const field = name ? [...message.fields, ...DirectionEditSchema.fields].find((one) => one.name === name) : null;
  const kind = kindOf(field);
  return { ...option, field, kind: kind === "vectors" && !option.isRequired ? "reference" : kind };
};

function operationOf(field) {
  const options = OPTIONS[field.name].map(optionOf(field.message));
  return { name: field.name, field, options, takesVectors: options.some((one) => one.kind === "vectors") };
}

/**
 * Each operation by name: `{name, options, takesVectors}`; an option has `name`, `argument` (its name in Python), `kind`,
 * `choices`, `default` (null without one) and `isRequired`.
 */
export const OPERATIONS = new Map(
  EditSchema.oneofs.find((one) => one.name === "operation").fields
    .filter((field) => field.name in OPTIONS).map((field) => [field.name, operationOf(field)]));

/** The option that has the vectors of an edit; undefined for an operation without any. */
export const vectorsOf = ({ op }) => OPERATIONS.get(op).options.find((one) => one.kind === "vectors");

/** The name of the stored direction of an edit; null where it has vectors of its own, or none. */
export function directionOf(edit) {
  const given = edit[vectorsOf(edit)?.name];
  return isText(given) ? given : null;
}

/** Whether an operation takes a stored direction. */
export const takesDirection = (op) => ALONG.has(op);

/** The options that an edit can have: some go with a stored direction alone. */
export const optionsOfEdit = (edit) =>
  OPERATIONS.get(edit.op).options.filter((one) => directionOf(edit) !== null || !isOfDirection(one));

const BEGINS = { alpha: 0.5, high: 0 };

/** What an edit with a stored direction begins with; `units` as `steer` has them. */
export function alongDirection(op, at, name, units) {
  const known = OPERATIONS.get(op).options.map((option) => option.name);
  const given = Object.entries({ ...BEGINS, units }).filter(([option]) => known.includes(option));
  return { at, op, [vectorsOf({ op }).name]: name, ...Object.fromEntries(given) };
}

const INDEX = /^(-?\d+|-?\d*:-?\d*)(, *(-?\d+|-?\d*:-?\d*))*$/;
const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;
const RANGE = /^(-?\d+)?:(-?\d+)?$/;

const isText = (value) => typeof value === "string";
const areWhole = (value) => Array.isArray(value) && value.every(Number.isSafeInteger);
const isNumbers = (value) => Array.isArray(value) && value.length > 0 && value.every(Number.isFinite);
const isRows = (value) => Array.isArray(value) && value.length > 0 && value.every((row) => isNumbers(row) && row.length === value[0].length);
const isPart = (value) => value === "all" || (areWhole(value) && value.length > 0) || (isText(value) && RANGE.test(value));
const arePositions = (value) => value !== null && typeof value === "object" && Object.keys(value).length > 0
  && Object.entries(value).every(([name, part]) => ["prompt", "generated"].includes(name) && isPart(part));

/** Whether a value of a link is one that the page itself gives an option, by the option's kind. */
const IS_OF_KIND = {
  operand: Number.isFinite,
  number: Number.isFinite,
  integer: Number.isInteger,
  flag: (value) => typeof value === "boolean",
  choice: (value, { choices }) => choices.includes(value),
  source: isText,
  text: isText,
  vectors: (value) => isNumbers(value) || isRows(value) || (Array.isArray(value) && value.length === 0), // none is picked
  reference: isNumbers,
};

/** The same, of keys that all operations take. */
const IS_COMMON = {
  at: isText,
  op: isText,
  channels: areWhole,
  tokens: areWhole,
  index: (value) => isText(value) && INDEX.test(value),
  channel_dim: Number.isSafeInteger,
  positions: arePositions,
};

/** Whether a text can be the name of a stored direction. */
export const isDirectionName = (value) => isText(value) && NAME.test(value);

function isOfOption(edit, option, value) {
  if (option.kind === "vectors" && isText(value)) return takesDirection(edit.op) && isDirectionName(value);
  return IS_OF_KIND[option.kind](value, option);
}

/** Whether the page can make an edit of a link: the name of stored ones, or an operation with options that it has. */
export function isKnown(edit) {
  if (isText(edit)) return true;
  if (!OPERATIONS.has(edit?.op) || !isText(edit.at)) return false;
  return Object.entries(edit).every(([key, value]) => {
    if (Object.hasOwn(IS_COMMON, key)) return IS_COMMON[key](value);
    const option = optionsOfEdit(edit).find(({ name }) => name === key);
    return option !== undefined && isOfOption(edit, option, value);
  });
}

/** Names of the inputs from which edits take values. */
export const sourcesOf = (edits) => [...new Set(edits.flatMap((edit) => edit.source || []))];

const PORT = /\/(grad_out|grad_in|param_grad|param)(\([^/]*\))?(\[.*\])?$/;
const portOf = (edit) => (typeof edit === "string" ? "" : PORT.exec(edit.at)?.[1] ?? "");

/** Whether an edit is of a gradient, so that it changes nothing in a forward pass. */
export const isOfGradient = (edit) => portOf(edit).includes("grad");

/** Whether an edit is of a parameter, a buffer, or the gradient of one. */
export const isOfParameter = (edit) => portOf(edit).startsWith("param");

const constant = (value) => ({ kind: { case: "constant", value } });

/** Vectors, as rows, and the tensor that they are sent as; a direction alone has no rows. */
function vectorTensor(rows, isOne) {
  const spec = { dtype: Dtype.FLOAT32, shape: (isOne ? [rows[0].length] : [rows.length, rows[0].length]).map(BigInt) };
  return { spec, bytes: new Uint8Array(Float32Array.from(rows.flat()).buffer) };
}

function fieldValue({ field, kind }, value, payloads) {
  if (kind === "operand") return constant(value);
  if (kind === "choice") return field.enum.values.find((one) => one.name === field.enum.sharedPrefix.toUpperCase() + value.toUpperCase()).number;
  if (kind === "integer") return field.scalar === ScalarType.INT64 ? BigInt(value) : value;
  if (!["vectors", "reference"].includes(kind)) return value;
  const isOne = !Array.isArray(value[0]);
  const { spec, bytes } = vectorTensor(isOne ? [value] : value, isOne);
  payloads.push(bytes);
  return spec;
}

const whole = (text) => (text === "" ? undefined : BigInt(text));

/** An index such as `:, 3, 2:8` as a message. */
const wiredIndex = (text) => ({
  items: text.split(",").map((part) => part.trim().split(":")).map(([start, stop]) => ({
    item: stop === undefined ? { case: "position", value: BigInt(start) } : { case: "slice", value: { start: whole(start), stop: whole(stop) } },
  })),
});

function regionOf({ channels, tokens, index }) {
  const takes = [[Axis.CHANNELS, channels], [Axis.TOKENS, tokens]].filter(([, positions]) => positions?.length)
    .map(([axis, positions]) => ({ axis, positions: positions.map(BigInt) }));
  return takes.length || index ? { takes, index: index ? wiredIndex(index) : undefined } : undefined;
}

function wiredPart(part) {
  if (part === "all") return { kind: { case: "all", value: true } };
  if (Array.isArray(part)) return { kind: { case: "list", value: { positions: part.map(BigInt) } } };
  const [start, stop] = part.split(":");
  return { kind: { case: "range", value: { start: whole(start), stop: whole(stop) } } };
}

const wiredPositions = (positions) =>
  Object.fromEntries(Object.entries(positions).map(([name, part]) => [name, wiredPart(part)]));

/** Options, `[option, value]` each, as fields of a message. */
const wiredOptions = (set, payloads) => Object.fromEntries(set.map(([one, own]) => [one.field.localName, fieldValue(one, own, payloads)]));

/** An operation with a stored direction, a part of a `DirectionEdit`. */
function wiredAlong(op, name, set) {
  const { localName, message } = ALONG.get(op);
  const own = set.filter(([{ kind, ...one }]) => kind !== "vectors" && !isOfDirection(one));
  const shared = wiredOptions(set.filter(([one]) => isOfDirection(one)), []);
  return { name, ...shared, kind: { case: localName, value: message ? wiredOptions(own, []) : true } };
}

function wiredOperation(edit, payloads) {
  const { field, options } = OPERATIONS.get(edit.op);
  const set = optionsOfEdit(edit).map((one) => [one, edit[one.name] ?? one.default]).filter(([, value]) => value !== null);
  const name = directionOf(edit);
  if (name !== null) return { case: "direction", value: wiredAlong(edit.op, name, set) };
  return { case: field.localName, value: options[0]?.field === null ? constant(set[0][1]) : wiredOptions(set, payloads) };
}

/** One edit, as JSON has it or the name of stored ones, as a message; bytes of its arrays are added to `payloads`. */
function edited(edit, payloads) {
  if (typeof edit === "string") return { operation: { case: "stored", value: edit } };
  const { at, channel_dim: channelDim, positions } = edit;
  const where = { region: regionOf(edit), channelDim, positions: positions && wiredPositions(positions) };
  return { selector: at, ...where, operation: wiredOperation(edit, payloads) };
}

/** Edits as messages, and the bytes of their arrays: `{edits, payloads}`. */
export function wiredEdits(edits) {
  const payloads = [];
  return { edits: edits.map((edit) => edited(edit, payloads)), payloads };
}

/** The selector of the value, or of the parameter, that a gradient belongs to. */
export function valueOfGradient(name) {
  const found = /^(.*)\/(grad_|param_grad)(.*?)((?:\[[^/]*\])?)$/s.exec(name);
  if (!found) return name;
  const [, before, kind, port, picks] = found;
  if (kind === "param_grad") return `${before}/param${port}${picks}`;
  return before && port === "out" ? `${before}${picks}` : `${before}/${port}${picks}`;
}

/** Unit vectors along channels: rows of `width` numbers. */
export const unitVectors = (channels, width) =>
  channels.map((channel) => Array.from({ length: width }, (_, at) => (at === channel ? 1 : 0)));
