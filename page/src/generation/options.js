// What a run is asked for: the texts of the form, and the options of the protocol that they mean.

/** The form while nothing is chosen, by the names of `client.generate` where it has them. */
export const INITIAL = {
  max_new_tokens: "64", temperature: "0", seed: "0", stop: "", logprobs: "5", ends: "", read: "values", colour: "logprob",
};

/** Numbers of the form: the smallest and the largest that it takes; the server decides which it accepts. */
export const NUMBERS = {
  max_new_tokens: { label: "Most new tokens", low: 1, high: 2 ** 31 - 1, isWhole: true },
  temperature: { label: "Temperature", low: 0, high: 100, isWhole: false },
  seed: { label: "Seed", low: 0, high: Number.MAX_SAFE_INTEGER, isWhole: true },
  logprobs: { label: "Likely tokens", low: 0, high: 1024, isWhole: true },
};

function numberOf(name, text) {
  const { label, low, high, isWhole } = NUMBERS[name];
  const value = text.trim() === "" ? Number(INITIAL[name]) : Number(text);
  if (!(value >= low && value <= high) || (isWhole && !Number.isInteger(value))) {
    throw new RangeError(`${label} is ${text}: write a ${isWhole ? "whole number" : "number"} from ${low} to ${high}.`);
  }
  return value;
}

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** Texts that end a run: one in each line, in which `\n` is the end of a line and `\t` a tab. */
const stopsOf = (text) => text.split("\n").filter(Boolean).map((line) => line.replaceAll(/\\[nt\\]/g, (one) => ESCAPES[one]));

/**
 * The options that the texts of the form mean, by the names of `client.generate`.
 * @throws RangeError where one is no number of its range
 */
export function optionsOf(texts) {
  const numbers = Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, numberOf(name, texts[name])]));
  return { ...numbers, stop: stopsOf(texts.stop), ...(texts.ends === "ignored" ? { stop_token_ids: [] } : {}) };
}

/** Options as fields of a `GenerationOptions`. */
export const wiredOptions = ({ max_new_tokens: maxNewTokens, temperature, seed, stop, logprobs, stop_token_ids: ids }) =>
  ({ maxNewTokens, temperature, seed: BigInt(seed), stop, logprobs, stopTokenIds: ids ?? [], hasStopTokenIds: ids !== undefined });
