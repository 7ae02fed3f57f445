// Values before and after edits: statistics, and the channels that changed most.
import { useMemo } from "preact/hooks";
import { count, html, number } from "../html.js";
import { channels, range, rows } from "../tensors.js";
import { Picture } from "./map.js";
import { Table } from "./table.js";

const SHOWN = 12;
const STATISTICS = ["mean", "std", "min", "max", "zeros"];

/** The most values that are one picture where a value has no channels. */
const MOST_IN_ONE = 16_384;

/** Pictures of a value: of its channels; of a parameter, of its first dimension; otherwise one of all values in a row. */
function picturesOf({ map, tensor }) {
  const parts = map.port.startsWith("param") ? rows(tensor) : channels(tensor);
  const { values } = tensor;
  return parts.length || values.length > MOST_IN_ONE ? parts : [{ index: null, values, height: 1, width: values.length }];
}

const isOther = (a, b) => a !== b && !(Number.isNaN(a) && Number.isNaN(b));
const countChanged = (before, after) => before.reduce((sum, value, at) => sum + isOther(value, after[at]), 0);

/** Those pictures in which a value has changed; a change from or to a value that is not finite comes first. */
function compared(before, after) {
  const others = picturesOf(after);
  return picturesOf(before).map((from, at) => {
    const to = others[at];
    const values = Float64Array.from(from.values, (value, place) => (isOther(to.values[place], value) ? to.values[place] - value : 0));
    const [low, high] = range(values);
    return { index: from.index, from, to, difference: { ...from, values }, extent: Math.max(-low, high), isFinite: values.every(Number.isFinite) };
  }).filter(({ extent, isFinite }) => extent > 0 || !isFinite).sort((a, b) => a.isFinite - b.isFinite || b.extent - a.extent);
}

/** Pairs of values of one name, of those that both passes have. */
export const pairsOf = (before, after) => before
  .map((one) => ({ before: one, after: after.find(({ map }) => map.name === one.map.name) }))
  .filter((pair) => pair.after?.tensor.values.length === pair.before.tensor.values.length);

/** @param before, after `{map, tensor}` of one name */
export function Pair({ before, after }) {
  const parts = useMemo(() => compared(before, after), [before, after]);
  const changed = useMemo(() => countChanged(before.tensor.values, after.tensor.values), [before, after]);
  const common = useMemo(() => range(before.tensor.values), [before]);
  const statistics = before.map.statistics.filter((one) => one.values.length === 1).map((one, at) =>
    ({ name: STATISTICS[at], from: one.values[0], to: after.map.statistics[at].values[0] }));
  return html`
    <${Table} label="Statistics of ${before.map.name} before and after" keyOf=${(row) => row.name} rows=${statistics} columns=${[
      { title: before.map.name, cell: (row) => row.name }, { title: "before", isNumber: true, cell: (row) => number(row.from) },
      { title: "after", isNumber: true, cell: (row) => number(row.to) },
      { title: "change", isNumber: true, cell: (row) => number(row.to - row.from) }]} />
    <p class="hint">${changed ? `${count(changed)} of ${count(before.tensor.values.length)} values have changed.` : "None of its values has changed."}
      ${parts.length > 0 && ` ${parts[0].index === null ? "All values" : "The channels that changed most"}: before, after, and the difference (blue less, orange more).`}</p>
    ${parts.length > 0 && html`
      <div class="pairs">${parts.slice(0, SHOWN).map(({ index, from, to, difference, extent, isFinite }) => {
        const name = index === null ? "All values" : `Channel ${index}`;
        return html`
        <figure key=${index} class="pair ${from.height === 1 ? "row" : ""}">
          <${Picture} map=${from} limits=${common} label="${name} before" />
          <${Picture} map=${to} limits=${common} label="${name} after" />
          <${Picture} map=${difference} limits=${[-extent, extent]} palette="diverging" label="${name}, difference" />
          <figcaption>${index ?? "all"}, up to ${isFinite ? number(extent, 3) : "a value that is not finite"}</figcaption>
        </figure>`; })}</div>`}`;
}
