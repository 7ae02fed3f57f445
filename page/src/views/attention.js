// One attention head: how much each query, a row, looks at each key, a column.
import { html, number } from "../html.js";
import { range } from "../tensors.js";
import { OverImage, Picture } from "./map.js";
import { Tokens } from "./tokens.js";

const patchName = (patches, at) => {
  const place = at - patches.first;
  if (place < 0 || place >= patches.rows * patches.columns) return `token ${at}`;
  return `patch ${Math.floor(place / patches.columns) + 1}, ${(place % patches.columns) + 1}`;
};

function Row({ weights, labels, image, patches }) {
  const limits = range(weights);
  if (!patches) return html`<${Tokens} tokens=${labels} values=${weights} limits=${limits} />`;
  const map = { values: weights.subarray(patches.first, patches.first + patches.rows * patches.columns), height: patches.rows, width: patches.columns };
  return html`
    <${OverImage} image=${image?.kind === "image" ? image : null} map=${map} limits=${range(map.values)} label="Attention to the patches of the image" />
    ${patches.first > 0 && html`<p>to token 0: ${number(weights[0])}</p>`}`;
}

function Matrix({ head, labels }) {
  const isLabelled = labels.length <= 40;
  return html`
    <div class="matrix ${isLabelled ? "labelled" : ""}">
      ${isLabelled && html`<ol class="queries" aria-hidden="true">${labels.map((one, at) => html`<li key=${at}>${one}</li>`)}</ol>`}
      <${Picture} map=${head} limits=${range(head.values)} label="Head ${head.index}: queries down, keys across" />
      ${isLabelled && html`<ol class="keys" aria-hidden="true">${labels.map((one, at) => html`<li key=${at}>${one}</li>`)}</ol>`}
    </div>
    <p class="hint">Rows are the tokens that look, columns the tokens that are looked at.</p>`;
}

/**
 * @param head of `channels`; @param patches of an image among the keys, of `patchesOf`, or null
 * @param query a signal: a row, or empty for all; @param tokens of a text, or null
 */
export function Head({ head, patches, query, image, tokens, onClose }) {
  const { height, width, values } = head;
  const isText = tokens?.length === width;
  const labels = Array.from({ length: width }, (_, at) => (isText ? tokens[at] : patches ? patchName(patches, at) : `token ${at}`));
  const row = query.value === "" ? -1 : Math.min(Number(query.value), height - 1);
  return html`
    <div class="large" aria-label="Head ${head.index}">
      <div class="controls"><label>Attention of <select value=${query.value} onChange=${(event) => { query.value = event.target.value; }}>
        <option value="">all tokens</option>${labels.slice(0, height).map((one, at) => html`<option key=${at} value=${String(at)}>${one}</option>`)}
      </select></label></div>
      ${row < 0 ? html`<${Matrix} head=${head} labels=${labels} />`
        : html`<${Row} weights=${values.subarray(row * width, (row + 1) * width)} labels=${labels} image=${image} patches=${patches} />`}
      <p>Head ${head.index}, up to ${number(range(values)[1])}</p>
      <button onClick=${onClose}>Close</button>
    </div>`;
}
