// Code that makes the same run as the page.
import { editPython, editWord, inputPython, python, shell } from "../code.js";
import { readoutPython } from "./readouts.js";

const argument = ([name, value]) => `${name}=${python(value)}`;

/** Options that differ from the client's own; those of the form are always written. */
const written = ({ stop, ...options }) => [...Object.entries(options), ...(stop.length ? [["stop", stop]] : [])];

/**
 * A program that makes a run and prints its text, with edits also the text without them.
 * @param asked `model`, `prompt`, `options` by the names of `client.generate`, `edits`, `readouts`
 * @param taps selectors of values; @param lens the selector that a lens reads and its `top`; null without one
 */
export function runPython({ model, prompt, options, edits, readouts }, taps, lens) {
  const all = [...taps.map(python), ...readouts.map(readoutPython), ...(lens ? [`trocar.lens(${python(lens.selector)}, top_k=${lens.top})`] : [])];
  const given = [python(model), inputPython({ kind: "text", text: prompt }), ...written(options).map(argument), ...(all.length ? [`taps=[${all.join(", ")}]`] : []), ...(edits.length ? ["edits=edits"] : [])];
  return [
    "import trocar", "", "client = trocar.connect()",
    ...(edits.length ? ["edits = [", ...edits.map((edit) => `    ${editPython(edit)},`), "]"] : []),
    `run = client.generate(${given.join(", ")})`,
    "for token in run:", '    print(token.text, end="", flush=True)', "print()",
    ...(edits.length ? ['print("without edits:", run.baseline.text)'] : []), "",
  ].join("\n");
}

function command({ model, prompt, options, edits }, taps, lens, file) {
  const { stop, stop_token_ids: ids } = options;
  const flag = (name) => [`--${name.replaceAll("_", "-")}`, String(options[name])];
  return ["trocar", "generate", model, ...["max_new_tokens", "temperature", "seed"].flatMap(flag),
    ...stop.flatMap((text) => ["--stop", text]), ...(ids ? ["--ignore-end"] : []),
    ...taps.flatMap((tap) => ["--tap", tap]), ...(lens ? ["--lens", lens.selector] : []), ...edits.flatMap((edit) => ["--edit", editWord(edit)]),
    ...(taps.length || lens ? ["--out", file] : []), "--", prompt].map(shell).join(" ");
}

/** Commands that make the same run, with edits first the run without them; see `runPython`. They read no directions. */
export const runCommand = (asked, taps, lens) => (asked.edits.length
  ? [command({ ...asked, edits: [] }, taps, lens, "before.safetensors"), command(asked, taps, lens, "after.safetensors")].join("\n")
  : command(asked, taps, lens, "run.safetensors"));
