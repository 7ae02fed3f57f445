// Values before and after edits: statistics, and the channels that changed most.
import { useMemo } from "preact/hooks";
import { html, number } from "../html.js";
import { channels, range, rows } from "../tensors.js";
import { Picture } from "./map.js";
import { Table } from "./table.js";

const SHOWN = 12;
const STATISTICS = ["mean", "std", "min", "max", "zeros"];

/** Pictures of a value: of a parameter, one for each index of its first dimension. */
const picturesOf = ({ map, tensor }) => (map.port.startsWith("param") ? rows(tensor) : channels(tensor));

function compared(before, after) {
  const others = picturesOf(after);
  return picturesOf(before).map((from, at) => {
    const to = others[at];
    const values = Float64Array.from(from.values, (value, place) => to.values[place] - value);
    const [low, high] = range(values);
    return { index: from.index, from, to, difference: { ...from, values }, extent: Math.max(-low, high) };
  }).filter(({ extent }) => extent > 0).sort((a, b) => b.extent - a.extent);
}

/** Pairs of values of one name, of those that both passes have. */
export const pairsOf = (before, after) => before
  .map((one) => ({ before: one, after: after.find(({ map }) => map.name === one.map.name) }))
  .filter((pair) => pair.after?.tensor.values.length === pair.before.tensor.values.length);

/** @param before, after `{map, tensor}` of one name */
export function Pair({ before, after }) {
  const parts = useMemo(() => compared(before, after), [before, after]);
  const common = useMemo(() => range(before.tensor.values), [before]);
  const statistics = before.map.statistics.filter((one) => one.values.length === 1).map((one, at) =>
    ({ name: STATISTICS[at], from: one.values[0], to: after.map.statistics[at].values[0] }));
  return html`
    <${Table} label="Statistics of ${before.map.name} before and after" keyOf=${(row) => row.name} rows=${statistics} columns=${[
      { title: before.map.name, cell: (row) => row.name }, { title: "before", isNumber: true, cell: (row) => number(row.from) },
      { title: "after", isNumber: true, cell: (row) => number(row.to) },
      { title: "change", isNumber: true, cell: (row) => number(row.to - row.from) }]} />
    ${parts.length ? html`
      <p class="hint">The channels that changed most: before, after, and the difference (blue less, orange more).</p>
      <div class="pairs">${parts.slice(0, SHOWN).map(({ index, from, to, difference, extent }) => html`
        <figure key=${index} class="pair ${from.height === 1 ? "row" : ""}">
          <${Picture} map=${from} limits=${common} label="Channel ${index} before" />
          <${Picture} map=${to} limits=${common} label="Channel ${index} after" />
          <${Picture} map=${difference} limits=${[-extent, extent]} palette="diverging" label="Channel ${index}, difference" />
          <figcaption>${index}, up to ${number(extent, 3)}</figcaption>
        </figure>`)}</div>` : html`<p class="hint">No channel of it has changed.</p>`}`;
}
