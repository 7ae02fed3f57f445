// The channels of an edit, picked from thumbnails: those that it changes, or along which its directions point.
import { directionOf, isOfParameter, OPERATIONS, unitVectors, vectorsOf } from "../edits.js";
import { html } from "../html.js";
import { channels, rows } from "../tensors.js";
import { ThumbnailControls, Thumbnails, useShown } from "./channels.js";

/** Channels that an edit names. */
export function pickedOf(edit) {
  const vectors = vectorsOf(edit);
  if (!vectors) return edit.channels ?? [];
  if (directionOf(edit) !== null) return [];
  const directions = edit[vectors.name] ?? [];
  return [...new Set((Array.isArray(directions[0]) ? directions : [directions]).flatMap((row) => row.flatMap((value, at) => (value ? [at] : []))))];
}

/** An edit of other channels: `width` is their count, `channelDim` the dimension that they are in, null for the usual one. */
export function withChannels(edit, indices, width, channelDim) {
  const { options: known } = OPERATIONS.get(edit.op);
  const outdated = ["channels", "channel_dim", ...known.filter((one) => one.kind === "reference").map(({ name }) => name)];
  const rest = Object.fromEntries(Object.entries(edit).filter(([name]) => !outdated.includes(name)));
  const vectors = known.find((one) => one.kind === "vectors");
  const dimension = channelDim === null ? {} : { channel_dim: channelDim };
  if (!vectors) return { ...rest, ...(indices.length ? { channels: indices } : {}), ...(indices.length || edit.index ? dimension : {}) };
  const rows = unitVectors(indices, width);
  const one = rows.length ? rows.reduce((sum, row) => sum.map((value, at) => value + row[at])) : [];
  return { ...rest, [vectors.name]: vectors.name === "direction" ? one : rows, ...dimension };
}

/**
 * @param value `{map, tensor}` at the edit; null where it is not known
 * @param chosen signals `order` and `scale`
 * @param onPick gets channels, their count, and the dimension that they are in: null for the usual one
 */
export function ChannelPicker({ edit, value, chosen, onPick }) {
  if (edit.op === "skip" || (isOfParameter(edit) && vectorsOf(edit))) return null;
  if (directionOf(edit) !== null) return html`<p class="hint">The stored direction ${directionOf(edit)} has all channels.</p>`;
  if (!value) return html`<p class="hint">Choose ${edit.at} in the tree to pick its channels.</p>`;
  return html`<${Picker} edit=${edit} value=${value} chosen=${chosen} onPick=${onPick} />`;
}

function Picker({ edit, value: { tensor }, chosen, onPick }) {
  const isParameter = isOfParameter(edit);
  const { all, shown, limitsOf } = useShown(tensor, isParameter ? rows : channels, chosen.order, chosen.scale);
  const channelDim = isParameter ? (tensor.shape.length > 1 ? 0 : null) : tensor.channelDim ?? null;
  const indices = pickedOf(edit);
  const pick = (picked) => onPick(picked, all.length, channelDim);
  const toggle = (index) => pick(indices.includes(index)
    ? indices.filter((one) => one !== index) : [...indices, index].sort((a, b) => a - b));
  if (!all.length) return null;
  const what = isParameter ? "rows" : "channels";
  return html`
    <p>${indices.length ? `${isParameter ? "Rows" : "Channels"} ${indices.join(", ")}`
      : vectorsOf(edit) ? "Click the channels along which it points." : `All ${what}; click some to change these alone.`}
      ${indices.length > 0 && html` <button onClick=${() => pick([])}>None of them</button>`}</p>
    <${ThumbnailControls} order=${chosen.order} scale=${chosen.scale} />
    <${Thumbnails} shown=${shown} limitsOf=${limitsOf} isChosen=${(index) => indices.includes(index)} onChoose=${toggle} />`;
}
