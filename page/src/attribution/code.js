// Attributions as code for a program or the command line.
import { inputPython, python, shell } from "../code.js";

const imports = (input) => (input.kind === "text" ? ["import trocar"] : ["from pathlib import Path", "", "import trocar"]);
const program = (input, lines) => [...imports(input), "", "client = trocar.connect()", ...lines, ""].join("\n");

/** @param asked `{model, input, method, target, at, setting}` as in `attribute`; `setting` is `[name, value]` or null */
export function attributionPython({ model, input, method, target, at, setting }) {
  const options = [
    ...(target === null ? [] : [`of=trocar.logit(${target})`]), ...(at === null ? [] : [`at=${python(at)}`]),
    ...(setting ? [`${setting[0]}=${setting[1]}`] : []),
  ];
  const given = [python(model), inputPython(input), python(method), ...options].join(", ");
  return program(input, [`found = client.attribute(${given})`, "print(found.values)"]);
}

export function attributionCommand({ model, input, method, target, at, setting }) {
  const name = method.replace("_plus_plus", "++");
  return [
    "trocar", "cam", model, input.name, "--method", name, "--out", `${method}.png`,
    ...(target === null ? [] : ["--class", String(target)]), ...(at === null ? [] : ["--at", at]),
    ...(setting ? ["--option", `${setting[0]}=${setting[1]}`] : []),
  ].map(shell).join(" ");
}

/** @param found what `attributeTokens` returned */
export function tokensPython({ model, input, found }) {
  const of = found.of === null ? `trocar.logit(${found.target})` : `trocar.value(${python(found.of)}, function="square")`;
  const at = python(found.place);
  return program(input, [
    `grads = client.gradients(${python(model)}, ${inputPython(input)}, of=${of}, at=${at}, taps=${at})`,
    `gradient, embedding = grads[${python(`${found.place}/grad_out`)}], grads[${at}]`,
    'values = (gradient.astype("float64") * embedding).sum(axis=2)[0]', "print(values)",
  ]);
}

/** A command that writes the embedding and its gradient; their products, summed by token, are the contributions. */
export function tokensCommand({ model, input, found }) {
  const of = found.of === null ? `logit:${found.target}` : `squares:${found.of}`;
  return [
    "trocar", "gradients", model, "--text", input.text, "--of", of, "--at", found.place, "--tap", found.place,
    "--out", "tokens.safetensors",
  ].map(shell).join(" ");
}

export const healthPython = ({ model, input, target }) =>
  program(input, [`health = client.health(${python(model)}, ${inputPython(input)}, trocar.logit(${target}))`, "print(health)"]);

export const healthCommand = ({ model, input, target }) =>
  ["trocar", "analyse", "health", model, input.name, "--of", `logit:${target}`].map(shell).join(" ");
