// Code that gives the same numbers as the page. `trocar.connect()` finds the server as the command line does.

/** A text as Python writes it. */
export const python = (text) => JSON.stringify(text);
/** A word as a shell takes it. */
export const shell = (text) => (/^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** A program that extracts the named values. */
export function pythonCode({ model, input, names }) {
  const value = input.kind === "text" ? python(input.text) : `Path(${python(input.name)})`;
  const taps = names.length === 1 ? python(names[0]) : `[${names.map(python).join(", ")}]`;
  return [
    ...(input.kind === "text" ? [] : ["from pathlib import Path", ""]),
    "import trocar", "",
    "client = trocar.connect()",
    `maps = client.extract(${python(model)}, ${value}, ${taps})`,
    `print(maps[${python(names[0])}])`, "",
  ].join("\n");
}

/** A command that writes the named values to a file. */
export function shellCommand({ model, input, names }) {
  const source = input.kind === "text" ? ["--text", input.text] : [input.name];
  const taps = names.flatMap((name) => ["--tap", name]);
  return ["trocar", "extract", model, ...source, ...taps, "--out", "features.safetensors"].map(shell).join(" ");
}
