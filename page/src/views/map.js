// A map of values as a picture, alone or over the image that it belongs to.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { draw } from "../colours.js";
import { cropOf } from "../crop.js";
import { html } from "../html.js";

/** @param map `{values, height, width}`; @param limits values of the darkest and of the brightest colour */
export function Picture({ map, limits, label, palette }) {
  const canvas = useRef(null);
  useLayoutEffect(() => draw(canvas.current, map, limits, palette), [map, limits[0], limits[1], palette]);
  return html`<canvas ref=${canvas} role="img" aria-label=${label}></canvas>`;
}

const percent = (share) => `${100 * share}%`;

/**
 * A map over the part of an image that the model sees, with a slider for its opacity.
 * @param image `{url, preprocessing}`; null for the map alone
 */
export function OverImage({ image, map, limits, label, palette }) {
  const [opacity, setOpacity] = useState(0.7);
  const [[width, height], setSize] = useState([0, 0]);
  const crop = image ? cropOf(image.preprocessing, width, height) : null;
  const place = crop ? { left: percent(crop.left), top: percent(crop.top), width: percent(crop.width), height: percent(crop.height) } : {};
  return html`
    <div class="over ${map.height === 1 ? "flat" : ""}">
      ${image && html`<img src=${image.url} alt="" onLoad=${({ target }) => setSize([target.naturalWidth, target.naturalHeight])} />`}
      <div class="map ${crop ? "cropped" : ""}" style=${{ opacity: image ? opacity : 1, ...place }}><${Picture} map=${map} limits=${limits} label=${label} palette=${palette} /></div>
    </div>
    ${crop && html`<div class="hint">The model sees what the map covers: the centre of the image.</div>`}
    ${image && html`<label>Opacity <input type="range" min="0" max="1" step="0.05" value=${opacity} onInput=${(event) => setOpacity(Number(event.target.value))} /></label>`}`;
}
