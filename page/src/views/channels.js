// The channels of a value: statistics, thumbnails, and one channel large over the image.
import { useMemo, useState } from "preact/hooks";
import { html, number } from "../html.js";
import { channels, range } from "../tensors.js";
import { Head } from "./attention.js";
import { OverImage, Picture } from "./map.js";
import { Statistics } from "./statistics.js";
import { Tokens } from "./tokens.js";

const PAGE = 64;

function Large({ channel, image, tokens, onClose }) {
  const limits = useMemo(() => range(channel.values), [channel]);
  const isText = tokens?.length === channel.width && channel.height === 1;
  const url = image?.kind === "image" && channel.height > 1 ? image.url : "";
  return html`
    <div class="large" aria-label="Channel ${channel.index}">
      ${isText ? html`<${Tokens} tokens=${tokens} values=${channel.values} limits=${limits} />`
        : html`<${OverImage} url=${url} map=${channel} limits=${limits} label="Channel ${channel.index}" />`}
      <p>Channel ${channel.index}, ${number(limits[0])} to ${number(limits[1])}, mean of absolute values ${number(channel.strength)}</p>
      <button onClick=${onClose}>Close</button>
    </div>`;
}

/**
 * Thumbnails to choose from.
 * @param shown channels, in their order
 * @param limitsOf the limits of a channel's colours
 * @param isChosen whether a channel, by index, is chosen
 */
export function Thumbnails({ shown, limitsOf, isChosen, onChoose }) {
  const [count, setCount] = useState(PAGE);
  return html`
    <div class="grid">
      ${shown.slice(0, count).map((channel) => html`
        <button key=${channel.index} class="thumbnail ${channel.height === 1 ? "row" : ""}" aria-pressed=${String(isChosen(channel.index))}
                onClick=${() => onChoose(channel.index)}>
          <${Picture} map=${channel} limits=${limitsOf(channel)} label="Channel ${channel.index}" />
          <span>${channel.index}</span>
        </button>`)}
    </div>
    ${count < shown.length && html`<button class="more" onClick=${() => setCount(count + 4 * PAGE)}>More of ${shown.length} channels</button>`}`;
}

/** Order and colours of thumbnails: `order` and `scale` are signals of texts. */
export function ThumbnailControls({ order, scale }) {
  return html`
    <div class="controls">
      <label>Order <select value=${order.value} onChange=${(event) => { order.value = event.target.value; }}>
        <option value="strongest">strongest first</option><option value="index">by number</option></select></label>
      <label>Colours <select value=${scale.value} onChange=${(event) => { scale.value = event.target.value; }}>
        <option value="common">one scale</option><option value="own">each its own</option></select></label>
    </div>`;
}

/** Channels of a tensor in the chosen order, and the limits of their colours. */
export function useChannels(tensor, order, scale) {
  const all = useMemo(() => channels(tensor), [tensor]);
  const common = useMemo(() => range(tensor.values), [tensor]);
  const shown = useMemo(
    () => (order.value === "strongest" ? [...all].sort((a, b) => b.strength - a.strength) : all), [all, order.value]);
  return { all, shown, limitsOf: (channel) => (scale.value === "common" ? common : range(channel.values)) };
}

/**
 * @param chosen signals `channel`, `order` and `scale`, and `query` of an attention
 * @param image the input, to lay a channel over it; @param tokens of a text, or null
 */
export function Channels({ map, tensor, chosen, image, tokens }) {
  const { all, shown, limitsOf } = useChannels(tensor, chosen.order, chosen.scale);
  const isAttention = map.name.endsWith("/pattern");
  const large = chosen.channel.value === "" ? null : all[Number(chosen.channel.value)];
  return html`
    <${Statistics} map=${map} />
    ${all.length > 0 && html`
      <${ThumbnailControls} order=${chosen.order} scale=${chosen.scale} />
      ${large && isAttention && html`<${Head} head=${large} query=${chosen.query} image=${image} tokens=${tokens} onClose=${() => { chosen.channel.value = ""; }} />`}
      ${large && !isAttention && html`<${Large} channel=${large} image=${image} tokens=${tokens} onClose=${() => { chosen.channel.value = ""; }} />`}
      <${Thumbnails} key=${map.name} shown=${shown} limitsOf=${limitsOf} isChosen=${(index) => chosen.channel.value === String(index)}
                     onChoose=${(index) => { chosen.channel.value = String(index); }} />`}`;
}
