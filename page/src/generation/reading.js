// What a run reads at the chosen module: its value at each position, and what it would say there.
import { SelectorKind } from "../../gen/trocar_api/v1/tap_pb.js";

/** How many tokens a lens has at each position. */
export const LENS_TOKENS = 5;

const STEP = /\[(?:(-?\d+)|("(?:[^"\\]|\\.)*"))\]/g;

/** The way into a structured value such as `[0]["out"]` as messages. */
const picksOf = (pick) => [...pick.matchAll(STEP)].map(([, position, key]) =>
  ({ step: position === undefined ? { case: "key", value: JSON.parse(key) } : { case: "position", value: BigInt(position) } }));

/** The parts of a module's selector; of a structured output those of its value with tokens. */
function partsOf(module, port) {
  const outputs = module.calls[0]?.outputs ?? [];
  const { pick = "" } = outputs.find((one) => one.axes.includes("tokens")) ?? {};
  return { kind: SelectorKind.MODULE, path: module.path, port, isEveryCall: module.calls.length > 1, picks: port === "out" ? picksOf(pick) : [] };
}

/** What can be read at a module, as the form names it; the first is read where a link names nothing of this. */
export const READINGS = { values: "its values", lens: "its values, and what it would say", nothing: "nothing" };

export const readingOf = (name) => (Object.hasOwn(READINGS, name) ? name : "values");

/**
 * Taps of a run.
 * @param module one of the tree, or null
 * @param read one of `READINGS`
 */
export function tapsOf(module, port, read) {
  if (!module || read === "nothing") return [];
  const parts = partsOf(module, port === "in" ? "in" : "out");
  const lens = { parts, reductions: [{ kind: { case: "lens", value: { topK: LENS_TOKENS } } }] };
  return [{ parts }, ...(read === "lens" ? [lens] : [])];
}

/** The rows of a value along its tokens: arrays of `values`, without the dimension of the one text. */
export function rowsOf({ shape, axes }, values) {
  const dim = axes.indexOf("tokens");
  const inner = shape.slice(dim + 1).reduce((product, size) => product * size, 1);
  const outer = shape.slice(0, dim).reduce((product, size) => product * size, 1);
  return Array.from({ length: shape[dim] }, (_, token) => {
    const parts = Array.from({ length: outer }, (__, at) => values.subarray((at * shape[dim] + token) * inner, (at * shape[dim] + token + 1) * inner));
    if (parts.length === 1) return parts[0];
    const row = new values.constructor(outer * inner);
    parts.forEach((part, at) => row.set(part, at * inner));
    return row;
  });
}

/** The shape of a row. */
export const rowShape = ({ shape, axes }) => shape.filter((_, dim) => !["tokens", "batch"].includes(axes[dim]));
