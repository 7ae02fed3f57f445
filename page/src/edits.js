// Edits as the SDK's JSON has them, `{"at": "layer3", "op": "scale", "factor": 0, "channels": [1, 2]}`, and as messages.
// Operations and their options are those of the protocol: one that is added to `Edit` has its form here.
import { ScalarType } from "@bufbuild/protobuf";
import { EditSchema } from "../gen/trocar_api/v1/edit_pb.js";
import { Axis } from "../gen/trocar_api/v1/reduction_pb.js";
import { Dtype } from "../gen/trocar_api/v1/tensor_pb.js";

/** Where an operation is one operand alone: what the SDK calls it. */
const OPERANDS = { set: "value", add: "value", scale: "factor" };
/** Options that the SDK calls otherwise than the protocol. */
const RENAMED = { keeps_norm: "keep_norm", is_absolute: "absolute", is_exact: "exact", selector: "from" };
/** Not offered: arrays that a user would have to bring, and sources, which are other inputs. */
const LEFT_OUT = ["reference", "source"];
/** Of all dtypes, those that `CastEdit` takes. */
const CAST_DTYPES = ["float16", "bfloat16", "int8"];

const choicesOf = (field) => {
  const choices = field.enum.values.slice(1).map((value) => value.name.slice(field.enum.sharedPrefix.length).toLowerCase());
  return field.enum.typeName.endsWith(".Dtype") ? choices.filter((name) => CAST_DTYPES.includes(name)) : choices;
};

function kindOf(field) {
  if (field.fieldKind === "enum") return "choice";
  if (field.fieldKind === "message") return field.message.name === "Operand" ? "operand" : "vectors";
  if (field.scalar === ScalarType.BOOL) return "flag";
  if (field.scalar === ScalarType.STRING) return "text";
  return field.scalar === ScalarType.DOUBLE ? "number" : "integer";
}

function optionOf(field) {
  const kind = kindOf(field);
  return {
    name: RENAMED[field.name] ?? field.name, field, kind,
    choices: kind === "choice" ? choicesOf(field) : [],
    isOptional: field.proto.proto3Optional || kind === "operand",
  };
}

function operationOf(field) {
  const own = field.message.name === "Operand" ? [] : field.message.fields;
  const options = field.name in OPERANDS
    ? [{ name: OPERANDS[field.name], kind: "operand", choices: [], isOptional: false }]
    : own.filter(({ name }) => !LEFT_OUT.includes(name)).map(optionOf);
  return { name: field.name, field, options, takesVectors: options.some((one) => one.kind === "vectors") };
}

/** Each operation by name: `{name, options, takesVectors}`; an option has `name`, `kind`, `choices` and `isOptional`. */
export const OPERATIONS = new Map(
  EditSchema.oneofs.find((one) => one.name === "operation").fields
    .filter((field) => field.fieldKind === "message").map((field) => [field.name, operationOf(field)]));

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
  if (kind !== "vectors") return value;
  const isOne = !Array.isArray(value[0]);
  const { spec, bytes } = vectorTensor(isOne ? [value] : value, isOne);
  payloads.push(bytes);
  return spec;
}

/** One edit, as JSON has it or the name of stored ones, as a message; bytes of its arrays are added to `payloads`. */
function edited(edit, payloads) {
  if (typeof edit === "string") return { operation: { case: "stored", value: edit } };
  const { at, op, channels, ...given } = edit;
  const { field, options } = OPERATIONS.get(op);
  const takes = channels?.length ? [{ axis: Axis.CHANNELS, positions: channels.map(BigInt) }] : [];
  const set = options.filter(({ name }) => given[name] !== undefined);
  const value = op in OPERANDS
    ? constant(given[OPERANDS[op]])
    : Object.fromEntries(set.map((one) => [one.field.localName, fieldValue(one, given[one.name], payloads)]));
  return { selector: at, region: takes.length ? { takes } : undefined, operation: { case: field.localName, value } };
}

/** Edits as messages, and the bytes of their arrays: `{edits, payloads}`. */
export function wiredEdits(edits) {
  const payloads = [];
  return { edits: edits.map((edit) => edited(edit, payloads)), payloads };
}

/** Unit vectors along channels: rows of `width` numbers. */
export const unitVectors = (channels, width) =>
  channels.map((channel) => Array.from({ length: width }, (_, at) => (at === channel ? 1 : 0)));
