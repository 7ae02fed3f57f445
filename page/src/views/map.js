// A map of values as a picture, alone or over the image that it belongs to.
import { useEffect, useRef, useState } from "preact/hooks";
import { draw } from "../colours.js";
import { html } from "../html.js";

/** @param map `{values, height, width}`; @param limits values of the darkest and of the brightest colour */
export function Picture({ map, limits, label, palette }) {
  const canvas = useRef(null);
  useEffect(() => draw(canvas.current, map, limits, palette), [map, limits[0], limits[1], palette]);
  return html`<canvas ref=${canvas} role="img" aria-label=${label}></canvas>`;
}

/** A map over the image at `url`, with a slider for its opacity; without `url` the map alone. */
export function OverImage({ url, map, limits, label, palette }) {
  const [opacity, setOpacity] = useState(0.7);
  return html`
    <div class="over ${map.height === 1 ? "flat" : ""}">
      ${url && html`<img src=${url} alt="" />`}
      <div class="map" style=${{ opacity: url ? opacity : 1 }}><${Picture} map=${map} limits=${limits} label=${label} palette=${palette} /></div>
    </div>
    ${url && html`<label>Opacity <input type="range" min="0" max="1" step="0.05" value=${opacity} onInput=${(event) => setOpacity(Number(event.target.value))} /></label>`}`;
}
