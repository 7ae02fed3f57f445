// The part of a value that an edit changes, beside channels: tokens, or rows and columns.
import { html } from "../html.js";
import { Field } from "./field.js";

const RANGE = /^-?\d*:-?\d*$/;
const POSITION = /^\d+$/;

/** Positions of a text such as `0, 4:8`; the end of a range is not part of it. Null where it is no such text. */
export function positionsOf(text) {
  const positions = [];
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    const [, start, stop] = /^(\d+)(?::(\d+))?$/.exec(part) ?? [];
    if (start === undefined) return null;
    for (let at = Number(start); at < Number(stop ?? Number(start) + 1); at += 1) positions.push(at);
  }
  return positions.length ? [...new Set(positions)] : null;
}

/** Rows and columns of an index such as `:, :, 2:8, :`, or `:, 2:8, :, :` with the channels last; empty for all. */
export const rangesOf = (edit) =>
  (edit.index ?? ":, :, :, :").split(",").slice(...(edit.channel_dim === -1 ? [1, 3] : [2])).map((part) => part.trim().replace(/^:$/, ""));

const rangeOf = (text) => {
  const word = text.trim().replaceAll(/\s*:\s*/g, ":");
  return POSITION.test(word) ? `${word}:${Number(word) + 1}` : RANGE.test(word) ? word : "";
};

function Tokens({ edit, tokens, onGive }) {
  const chosen = edit.tokens ?? [];
  const toggle = (at) => {
    const next = chosen.includes(at) ? chosen.filter((one) => one !== at) : [...chosen, at].sort((a, b) => a - b);
    onGive(next.length ? next : undefined);
  };
  return html`
    <div class="tokens" role="group" aria-label="Only these tokens"><span>only tokens</span>
      ${tokens.map((token, at) => html`<button key=${at} type="button" aria-pressed=${String(chosen.includes(at))} onClick=${() => toggle(at)}>${token}</button>`)}</div>`;
}

/**
 * @param edit of a value; @param value `{tensor}` at the edit; null where it is not shown
 * @param tokens of a text, or null; @param onChange gets the edit with another region
 */
export function EditRegion({ edit, value, tokens, onChange }) {
  const isLast = value?.tensor.channelDim === -1;
  const give = (name) => (given) => {
    const { [name]: _, ...rest } = edit;
    onChange(given === undefined ? rest : { ...rest, [name]: given, ...(isLast ? { channel_dim: -1 } : {}) });
  };
  const shape = value?.tensor.shape ?? [];
  if (edit.op === "skip" || ![3, 4].includes(shape.length)) return null;
  if (shape.length === 3 && tokens?.length === shape[1]) return html`<${Tokens} edit=${edit} tokens=${tokens} onGive=${give("tokens")} />`;
  if (shape.length === 3) {
    return html`<label>only tokens <${Field} value=${(edit.tokens ?? []).join(", ")} placeholder="all ${shape[1]}" onGive=${(text) => give("tokens")(positionsOf(text) ?? undefined)} /></label>`;
  }
  const ranges = rangesOf(edit);
  const part = (at) => (text) => {
    const [rows, columns] = ranges.map((range, other) => (other === at ? rangeOf(text) : range));
    const both = `${rows || ":"}, ${columns || ":"}`;
    give("index")(rows || columns ? (isLast ? `:, ${both}, :` : `:, :, ${both}`) : undefined);
  };
  return html`${["rows", "columns"].map((name, at) => html`
    <label key=${name}>only ${name} <${Field} class="short" value=${ranges[at]} placeholder="0:${shape[(isLast ? 1 : 2) + at]}" onGive=${part(at)} /></label>`)}`;
}
