// Code that gives the same numbers as the page. `trocar.connect()` finds the server as the command line does.

/** A value as Python writes it. */
export const python = (value) => {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return JSON.stringify(value);
};
/** A word as a shell takes it. */
export const shell = (text) => (/^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

const inputPython = (input) => (input.kind === "text" ? python(input.text) : `Path(${python(input.name)})`);
const inputWords = (input) => (input.kind === "text" ? ["--text", input.text] : [input.name]);

function editPython(edit) {
  if (typeof edit === "string") return python(edit);
  const { at, op, from, ...options } = edit;
  const named = { ...options, ...(from === undefined ? {} : { at: from }) };
  const words = Object.entries(named).map(([name, value]) => `${name}=${python(value)}`);
  return `trocar.edit(${[python(at), python(op), ...words].join(", ")})`;
}

const editWord = (edit) => (typeof edit === "string" ? edit : JSON.stringify(edit));

/**
 * A program that runs passes and prints the shape of each value.
 * @param passes of each `result`, the name of a variable, `model`, `input`, `taps` and, if any, `edits`
 */
export function pythonCode(passes) {
  const hasImage = passes.some(({ input }) => input.kind !== "text");
  const calls = passes.flatMap(({ result, model, input, taps, edits = [] }) => {
    const given = [python(model), inputPython(input), python(taps)];
    if (!edits.length) return [`${result} = client.extract(${given.join(", ")})`];
    return [
      "edits = [", ...edits.map((edit) => `    ${editPython(edit)},`), "]",
      `${result} = client.extract(${[...given, "edits=edits"].join(", ")})`,
    ];
  });
  const shown = passes.map(({ result }) => result);
  return [
    ...(hasImage ? ["from pathlib import Path", ""] : []), "import trocar", "", "client = trocar.connect()", ...calls,
    ...shown.map((name) => `print({name: value.shape for name, value in ${name}.items()})`), "",
  ].join("\n");
}

/** Commands that write the values of each pass to a file called as its `result`. */
export function shellCommand(passes) {
  return passes.map(({ result, model, input, taps, edits = [] }) => [
    "trocar", "extract", model, ...inputWords(input), ...taps.flatMap((tap) => ["--tap", tap]),
    ...edits.flatMap((edit) => ["--edit", editWord(edit)]), "--out", `${result}.safetensors`,
  ].map(shell).join(" ")).join("\n");
}
