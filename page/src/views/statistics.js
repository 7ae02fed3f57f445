// Statistics and a histogram of one value.
import { Statistic } from "../../gen/trocar_api/v1/statistics_pb.js";
import { Dtype } from "../../gen/trocar_api/v1/tensor_pb.js";
import { html, number } from "../html.js";

const NAMES = {
  [Statistic.MEAN]: "mean", [Statistic.STD]: "std", [Statistic.MIN]: "min", [Statistic.MAX]: "max",
  [Statistic.ZERO_FRACTION]: "zeros",
};

export function Statistics({ map }) {
  const histogram = map.statistics.find((one) => one.statistic === Statistic.HISTOGRAM);
  return html`
    <dl class="statistics">
      <div><dt>shape</dt><dd>${map.tensor.shape.map(Number).join("×")} ${Dtype[map.tensor.dtype].toLowerCase()}</dd></div>
      ${map.statistics.filter((one) => one.statistic in NAMES).map((one) => html`
        <div key=${one.statistic}><dt>${NAMES[one.statistic]}</dt><dd>${number(one.values[0])}</dd></div>`)}
    </dl>
    ${histogram && html`<${Histogram} counts=${histogram.values} edges=${histogram.edges} />`}`;
}

function Histogram({ counts, edges }) {
  const highest = Math.max(...counts, 1);
  const width = 100 / counts.length;
  const label = `Histogram from ${number(edges[0])} to ${number(edges.at(-1))}`;
  return html`
    <figure class="histogram">
      <svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${label}>
        ${counts.map((count, at) => html`<rect key=${at} x=${at * width} width=${width * 0.9} y=${30 - (30 * count) / highest} height=${(30 * count) / highest} />`)}
      </svg>
      <figcaption><span>${number(edges[0])}</span><span>${number(edges.at(-1))}</span></figcaption>
    </figure>`;
}
