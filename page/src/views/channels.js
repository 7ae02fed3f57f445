// The channels of a module's output: thumbnails, statistics, and one channel large over the image.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Statistic } from "../../gen/trocar_api/v1/statistics_pb.js";
import { Dtype } from "../../gen/trocar_api/v1/tensor_pb.js";
import { draw } from "../colours.js";
import { html, number } from "../html.js";
import { collected, input, module, view, working } from "../state.js";
import { channels, range } from "../tensors.js";
import { Copy } from "./copy.js";

const PAGE = 64;
const NAMES = {
  [Statistic.MEAN]: "mean", [Statistic.STD]: "std", [Statistic.MIN]: "min", [Statistic.MAX]: "max",
  [Statistic.ZERO_FRACTION]: "zeros",
};

function Picture({ channel, limits, label, className }) {
  const canvas = useRef(null);
  useEffect(() => draw(canvas.current, channel, limits), [channel, limits]);
  return html`<canvas ref=${canvas} class=${className} role="img" aria-label=${label}></canvas>`;
}

function Statistics({ map }) {
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

function Large({ channel, limits }) {
  const isMap = input.value?.kind === "image" && channel.height > 1;
  const [strength, setStrength] = useState(0.7);
  return html`
    <div class="large" aria-label="Channel ${channel.index}">
      <div class="over">
        ${isMap && html`<img src=${input.value.url} alt="" />`}
        <div style=${{ opacity: isMap ? strength : 1 }}><${Picture} channel=${channel} limits=${limits} className="map" label="Channel ${channel.index}" /></div>
      </div>
      <p>Channel ${channel.index}, ${number(limits[0])} to ${number(limits[1])}, mean of absolute values ${number(channel.strength)}</p>
      ${isMap && html`<label>Opacity <input type="range" min="0" max="1" step="0.05" value=${strength} onInput=${(event) => setStrength(Number(event.target.value))} /></label>`}
      <button onClick=${() => { view.channel.value = ""; }}>Close</button>
    </div>`;
}

function Grid({ shown, limitsOf }) {
  const [count, setCount] = useState(PAGE);
  return html`
    <div class="grid">
      ${shown.slice(0, count).map((channel) => html`
        <button key=${channel.index} class="thumbnail ${channel.height === 1 ? "row" : ""}" aria-pressed=${view.channel.value === String(channel.index)}
                onClick=${() => { view.channel.value = String(channel.index); }}>
          <${Picture} channel=${channel} limits=${limitsOf(channel)} label="Channel ${channel.index}" />
          <span>${channel.index}</span>
        </button>`)}
    </div>
    ${count < shown.length && html`<button class="more" onClick=${() => setCount(count + 4 * PAGE)}>More of ${shown.length} channels</button>`}`;
}

function Values({ map, tensor }) {
  const all = useMemo(() => channels(tensor), [tensor]);
  const common = useMemo(() => range(tensor.values), [tensor]);
  const shown = useMemo(
    () => (view.order.value === "strongest" ? [...all].sort((a, b) => b.strength - a.strength) : all), [all, view.order.value]);
  const limitsOf = (channel) => (view.scale.value === "common" ? common : range(channel.values));
  const chosen = all[Number(view.channel.value)];
  return html`
    <${Statistics} map=${map} />
    ${all.length > 0 && html`
      <div class="controls">
        <label>Order <select value=${view.order.value} onChange=${(event) => { view.order.value = event.target.value; }}>
          <option value="strongest">strongest first</option><option value="index">by number</option></select></label>
        <label>Colours <select value=${view.scale.value} onChange=${(event) => { view.scale.value = event.target.value; }}>
          <option value="common">one scale</option><option value="own">each its own</option></select></label>
      </div>
      ${view.channel.value !== "" && chosen && html`<${Large} channel=${chosen} limits=${range(chosen.values)} />`}
      <${Grid} key=${map.name} shown=${shown} limitsOf=${limitsOf} />`}`;
}

export function Channels() {
  if (!input.value) return html`<p class="hint">Give the model an input, then choose a module.</p>`;
  if (!view.module.value) return html`<p class="hint">Choose a module to see what it computes.</p>`;
  if (!collected.value.length) return html`<p class="hint">${working.value || "Nothing was collected."}</p>`;
  return html`
    <section class="channels" aria-label="Output of ${view.module.value}">
      <h2>${view.module.value} <small>${module.value?.type} ${module.value?.description}</small></h2>
      <${Copy} names=${collected.value.map(({ map }) => map.name)} />
      ${collected.value.map(({ map, tensor }) => html`
        <div key=${map.name}>${collected.value.length > 1 && html`<h3>${map.name}</h3>`}<${Values} map=${map} tensor=${tensor} /></div>`)}
    </section>`;
}
