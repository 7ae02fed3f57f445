// The channels of a value: statistics, thumbnails, and one channel large over the image.
import { useMemo, useState } from "preact/hooks";
import { html, number } from "../html.js";
import { channels, patchesOf, range } from "../tensors.js";
import { Head } from "./attention.js";
import { OverImage, Picture } from "./map.js";
import { Statistics } from "./statistics.js";
import { Tokens } from "./tokens.js";

const PAGE = 64;

function Large({ channel, limits, image, tokens, onClose }) {
  const isText = tokens?.length === channel.width && channel.height === 1;
  const behind = image?.kind === "image" && channel.height > 1 ? image : null;
  const [low, high] = range(channel.values);
  return html`
    <div class="large" aria-label="Channel ${channel.index}">
      ${isText ? html`<${Tokens} tokens=${tokens} values=${channel.values} limits=${limits} />`
        : html`<${OverImage} image=${behind} map=${channel} limits=${limits} label="Channel ${channel.index}" />`}
      <p>Channel ${channel.index}, ${number(low)} to ${number(high)}, mean of absolute values ${number(channel.strength)}</p>
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

/** Order and colours of thumbnails: `order` and `scale` are signals of texts; `isBesideOther` in a comparison. */
export function ThumbnailControls({ order, scale, isBesideOther = false }) {
  return html`
    <div class="controls">
      <label>Order <select value=${order.value} onChange=${(event) => { order.value = event.target.value; }}>
        <option value="strongest">strongest first</option><option value="index">by number</option></select></label>
      <label>Colours <select value=${scale.value} onChange=${(event) => { scale.value = event.target.value; }}>
        <option value="common">${isBesideOther ? "one scale for both sides" : "one scale"}</option>
        ${isBesideOther && html`<option value="side">one scale for each side</option>`}
        <option value="own">each its own</option></select></label>
    </div>`;
}

/**
 * Pictures of a tensor in the chosen order, and the limits of their colours.
 * @param split `channels`, or `rows` for a parameter; @param both limits that this value shares with another; null alone
 */
export function useShown(tensor, split, order, scale, both = null) {
  const all = useMemo(() => split(tensor), [tensor, split]);
  const common = useMemo(() => range(tensor.values), [tensor]);
  const shown = useMemo(
    () => (order.value === "strongest" ? [...all].sort((a, b) => b.strength - a.strength) : all), [all, order.value]);
  const limits = scale.value === "side" ? common : both ?? common;
  return { all, shown, limitsOf: (channel) => (scale.value === "own" ? range(channel.values) : limits) };
}

/**
 * @param chosen signals `channel`, `order` and `scale`, and `query` of an attention
 * @param image the input with the model's `preprocessing`, to lay a channel over it; @param tokens of a text, or null
 * @param both limits of colours that this value shares with the one beside it; null alone
 * @param hasControls whether order and colours are chosen here
 */
export function Channels({ map, tensor, chosen, image, tokens, both = null, hasControls = true }) {
  const { all, shown, limitsOf } = useShown(tensor, channels, chosen.order, chosen.scale, both);
  const isAttention = map.name.endsWith("/pattern");
  const large = chosen.channel.value === "" ? null : all[Number(chosen.channel.value)];
  const close = () => { chosen.channel.value = ""; };
  return html`
    <${Statistics} map=${map} />
    ${all.length > 0 && html`
      ${hasControls && html`<${ThumbnailControls} order=${chosen.order} scale=${chosen.scale} isBesideOther=${both !== null} />`}
      ${large && isAttention && html`<${Head} head=${large} patches=${tokens?.length === large.width ? null : patchesOf(tensor, tensor.shape.length - 1)} query=${chosen.query} image=${image} tokens=${tokens} onClose=${close} />`}
      ${large && !isAttention && html`<${Large} channel=${large} limits=${both && chosen.scale.value === "common" ? both : range(large.values)} image=${image} tokens=${tokens} onClose=${close} />`}
      <${Thumbnails} key=${map.name} shown=${shown} limitsOf=${limitsOf} isChosen=${(index) => chosen.channel.value === String(index)}
                     onChoose=${(index) => { chosen.channel.value = String(index); }} />`}`;
}
