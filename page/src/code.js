// Code that gives the same numbers as the page. `trocar.connect()` finds the server as the command line does.
import { directionOf, OPERATIONS, vectorsOf } from "./edits.js";

/** A value as Python writes it. */
export const python = (value) => {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return JSON.stringify(value);
};
/** A word as a shell takes it. */
export const shell = (text) => (/^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** An input as Python writes it. As a plain string a text such as `setup.py` would be the name of a file. */
export const inputPython = (input) => (input.kind === "text" ? `trocar.texts(${python(input.text)})` : `Path(${python(input.name)})`);
const inputWords = (input) => (input.kind === "text" ? ["--text", input.text] : [input.name]);

/** An index such as `:, 2:8` as Python has it without NumPy. */
const indexPython = (text) => `(${text.split(",").map((part) => part.trim().split(":")).map((ends) =>
  (ends.length === 1 ? ends[0] : `slice(${ends.map((one) => one || "None").join(", ")})`)).join(", ")},)`;

const sliceOf = ([start, stop]) => `slice(${[start, stop].map((one) => one || "None").join(", ")})`;
const positionsPython = (positions) => `trocar.positions(${Object.entries(positions)
  .map(([name, part]) => `${name}=${typeof part === "string" && part.includes(":") ? sliceOf(part.split(":")) : python(part)}`).join(", ")})`;

/** Options of an edit that JSON writes otherwise than Python. */
const WRITTEN = { index: indexPython, positions: positionsPython };

/** An edit as Python writes it. */
export function editPython(edit) {
  if (typeof edit === "string") return python(edit);
  const { at, op, ...given } = edit;
  const direction = directionOf(edit);
  const arguments_ = new Map(OPERATIONS.get(op).options.map(({ name, argument }) => [name, argument]));
  const words = Object.entries(given).filter(([name]) => direction === null || name !== vectorsOf(edit).name)
    .map(([name, value]) => `${arguments_.get(name) ?? name}=${(WRITTEN[name] ?? python)(value)}`);
  return `trocar.edit(${[python(at), python(op), ...(direction === null ? [] : [python(direction)]), ...words].join(", ")})`;
}

/** An edit as a command takes it. */
export const editWord = (edit) => (typeof edit === "string" ? edit : JSON.stringify(edit));

const sourcesPython = (sources) =>
  `{${Object.entries(sources).map(([name, input]) => `${python(name)}: ${inputPython(input)}`).join(", ")}}`;

/** Lines of one pass; see `pythonCode`. */
function passPython({ result, model, input, taps, edits = [], sources = {}, of = null, at = [], numerics = "" }) {
  const given = [
    python(model), inputPython(input), ...(of === null ? [python(taps)] : [`of=trocar.logit(${of})`, `at=${python(at)}`, `taps=${python(taps)}`]),
    ...(edits.length ? ["edits=edits"] : []), ...(Object.keys(sources).length ? [`sources=${sourcesPython(sources)}`] : []),
    ...(numerics ? [`options=trocar.options(numerics=${python(numerics)})`] : []),
  ];
  const call = `${result} = client.${of === null ? "extract" : "gradients"}(${given.join(", ")})`;
  return edits.length ? ["edits = [", ...edits.map((edit) => `    ${editPython(edit)},`), "]", call] : [call];
}

/**
 * A program that runs passes and prints the shape of each value.
 * @param passes of each `result`, the name of a variable, `model`, `input`, `taps` and, if any, `edits` and `sources`,
 *   inputs by name; `of`, the class whose logit has the gradients `at`; and `numerics` other than the model's own
 */
export function pythonCode(passes) {
  const inputs = passes.flatMap(({ input, sources = {} }) => [input, ...Object.values(sources)]);
  const hasImage = inputs.some(({ kind }) => kind !== "text");
  return [
    ...(hasImage ? ["from pathlib import Path", ""] : []), "import trocar", "", "client = trocar.connect()",
    ...passes.flatMap(passPython),
    ...passes.map(({ result }) => `print({name: value.shape for name, value in ${result}.items()})`), "",
  ].join("\n");
}

const sourceWords = ([name, input]) =>
  (input.kind === "text" ? ["--edit-source-text", `${name}=${input.text}`] : ["--edit-source", `${name}=${input.name}`]);

function passCommand({ result, model, input, taps, edits = [], sources = {}, of = null, at = [], numerics = "" }) {
  const what = of === null ? ["extract", model, ...inputWords(input)]
    : ["gradients", model, ...inputWords(input), "--of", `logit:${of}`, ...at.flatMap((one) => ["--at", one])];
  const changed = [...edits.flatMap((edit) => ["--edit", editWord(edit)]), ...Object.entries(sources).flatMap(sourceWords), ...(numerics ? ["--numerics", numerics] : [])];
  return ["trocar", ...what, ...taps.flatMap((tap) => ["--tap", tap]), ...changed, "--out", `${result}.safetensors`].map(shell).join(" ");
}

/** Commands that write the values of each pass to a file called as its `result`. */
export const shellCommand = (passes) => passes.map(passCommand).join("\n");
