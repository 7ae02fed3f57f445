// The number that colours each token: its logprob, or what was read of the chosen module at its position.
import { range } from "../tensors.js";

/** A measure that is taken of each row once: rows stay while the page draws them again and again. */
function kept(measure) {
  const known = new WeakMap();
  return (row) => {
    if (!known.has(row)) known.set(row, measure(row));
    return known.get(row);
  };
}

const norm = kept((row) => Math.sqrt(row.reduce((sum, value) => sum + value * value, 0)));
const mean = kept((row) => row.reduce((sum, value) => sum + value, 0) / row.length);

const firstOf = (run) => [...run.read.values()][0];
const ofValue = (measure) => (run, position) => {
  const row = firstOf(run)?.rows.get(position);
  return row ? measure(row) : null;
};

const COMMON = {
  logprob: { label: "the token's logprob", of: (run, position) => run.tokens[position - run.promptIds.length]?.logprob ?? null, isIn: () => true },
  norm: { label: "the norm of the value", of: ofValue(norm), isIn: (run) => run.read.size > 0 },
  mean: { label: "the mean of the value", of: ofValue(mean), isIn: (run) => run.read.size > 0 },
  lens: { label: "what the layer would say, by its logprob", of: (run, position) => run.lens?.rows.get(position)?.[0].logprob ?? null, isIn: (run) => run.lens !== null },
};

/** A way for each number of what directions read. */
const ofReadouts = ({ readouts }) => [...readouts.values()].flatMap(({ name, shape: [count] }) => Array.from({ length: count }, (_, at) => [count > 1 ? `${name}[${at}]` : name, {
  label: `what ${name} reads${count > 1 ? `, number ${at}` : ""}`, of: (run, position) => run.readouts.get(name)?.rows.get(position)?.[at] ?? null,
}]));

/** Ways to colour the tokens of runs by name: `label`, and `of(run, position)`, a number, or null where there is none. */
export const colouringsOf = (runs) => Object.fromEntries([
  ...Object.entries(COMMON).filter(([, one]) => runs.some(one.isIn)), ...runs.flatMap(ofReadouts),
]);

/** The chosen way where the run has what it takes, otherwise by logprob. */
export const colouringOf = (name, run) => (Object.hasOwn(colouringsOf([run]), name) ? name : "logprob");

/** Least and greatest number of several runs. */
export function limitsOf(name, runs) {
  const { of } = colouringsOf(runs)[name];
  return range(runs.flatMap((run) => Array.from({ length: run.promptIds.length + run.tokens.length }, (_, position) => of(run, position) ?? NaN)));
}

/** Norm and mean of each value at a position: `{name, norm, mean}`. */
export const measuresAt = (run, position) => [...run.read.values()].filter(({ rows }) => rows.has(position))
  .map(({ name, rows }) => ({ name, norm: norm(rows.get(position)), mean: mean(rows.get(position)) }));

/** What directions read at a position: `{name, values}`. */
export const readingsAt = (run, position) => [...run.readouts.values()].filter(({ rows }) => rows.has(position))
  .map(({ name, rows }) => ({ name, values: [...rows.get(position)] }));
