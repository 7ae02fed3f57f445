// Gradient health as a picture: a bar for each module, on a logarithmic scale.
import { LIMITS } from "../attribution/health.js";
import { html, number } from "../html.js";
import { Table } from "./table.js";

const HEIGHT = 60;
const WIDTH = 100;

const COLUMNS = [
  { title: "module", cell: (row) => row.name },
  { title: "type", cell: (row) => row.type },
  { title: "gradient", isNumber: true, cell: (row) => shown(row.norm) },
  { title: "zeros", isNumber: true, cell: (row) => (row.zeros === null ? "" : `${number(100 * row.zeros, 3)} %`) },
  { title: "of weights", isNumber: true, cell: (row) => shown(row.parameterNorm) },
  { title: "weights", isNumber: true, cell: (row) => shown(row.weightNorm) },
  { title: "ratio", isNumber: true, cell: (row) => shown(row.ratio) },
  { title: "flags", cell: (row) => row.flags.join(", ") },
];

const shown = (value) => (value === null ? "" : number(value));

/** @param rows as `gradientHealth` returns them */
export function HealthPicture({ rows }) {
  const flagged = rows.filter((row) => row.flags.length);
  return html`
    <p>${flagged.length} of ${rows.length} flagged (norms and ratios outside ${LIMITS.vanishing.toExponential()} to ${LIMITS.exploding.toExponential()}).</p>
    <${Bars} label="Norm of the gradient at each module" rows=${rows} valueOf=${(row) => row.norm} />
    <${Bars} label="Norm of the gradient of each module's parameters, relative to them" rows=${rows} valueOf=${(row) => row.ratio} />
    <${Table} label="Gradient health" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.name} />`;
}

function Bars({ label, rows, valueOf }) {
  const logs = rows.map(valueOf).filter((value) => value > 0 && Number.isFinite(value)).map(Math.log10);
  const [low, high] = [Math.floor(Math.min(...logs, 0)), Math.ceil(Math.max(...logs, 0))];
  const width = WIDTH / rows.length;
  const heightOf = (value) => (value === Infinity ? HEIGHT : value > 0 ? (HEIGHT * (Math.log10(value) - low + 0.02)) / (high - low + 0.02) : 0);
  return html`
    <figure class="health">
      <figcaption>${label}, 1e${low} to 1e${high}</figcaption>
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${label}>
        ${rows.map((row, at) => valueOf(row) !== null && html`
          <rect key=${row.name} class=${row.flags.length ? "flagged" : ""} x=${at * width} width=${width * 0.85} y=${HEIGHT - heightOf(valueOf(row))} height=${heightOf(valueOf(row))}>
            <title>${row.name}: ${number(valueOf(row))} ${row.flags.join(", ")}</title></rect>`)}
      </svg>
    </figure>`;
}
