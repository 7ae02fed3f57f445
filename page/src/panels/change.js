// Change: edits of values while the model runs, and what they do.
import { signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { parameters } from "../address.js";
import * as api from "../api.js";
import { OPERATIONS, unitVectors, wiredEdits } from "../edits.js";
import { html, number } from "../html.js";
import { categories, collected, input, options, passOf, result, scoresOf, taps, view } from "../state.js";
import { channels, range } from "../tensors.js";
import { BestChange } from "../views/best.js";
import { Thumbnails, ThumbnailControls, useChannels } from "../views/channels.js";
import { Copy } from "../views/copy.js";
import { EditForm } from "../views/edit_form.js";
import { Picture } from "../views/map.js";
import { Save } from "../views/save.js";
import { StoredEdits } from "../views/stored_edits.js";
import { Table } from "../views/table.js";
import { Latest } from "../work.js";

const SHOWN = 12;

const chosen = parameters("change", { edits: "[]", at: "0", order: "strongest", scale: "common" });
/** `{key, maps}` of the last pass with edits; null without one. */
const changed = signal(null);
const pass = new Latest();

function readEdits() {
  try {
    const read = JSON.parse(chosen.edits.value);
    return Array.isArray(read) ? read.filter((edit) => typeof edit === "string" || OPERATIONS.has(edit?.op)) : [];
  } catch {
    return []; // an address that was cut off
  }
}

const write = (edits) => { chosen.edits.value = JSON.stringify(edits); };

/** Edits that can run: a direction needs its channels. */
const isComplete = (edit) => typeof edit === "string" || !OPERATIONS.get(edit.op).takesVectors
  || OPERATIONS.get(edit.op).options.every((one) => one.kind !== "vectors" || edit[one.name]?.length);

async function runEdits(key, edits) {
  const reply = await pass.start(`Running ${view.model.value} with edits`, (signal) =>
    api.extract(view.model.value, input.value, { taps: taps(), ...wiredEdits(edits) }, options(signal)));
  if (reply) changed.value = { key, maps: reply.maps };
}

/** Channels that an edit names: its own, or those along which its directions point. */
function pickedOf(edit) {
  if (!edit || typeof edit === "string") return [];
  const vectors = OPERATIONS.get(edit.op).options.find((one) => one.kind === "vectors");
  if (!vectors) return edit.channels ?? [];
  const rows = edit[vectors.name] ?? [];
  return [...new Set((Array.isArray(rows[0]) ? rows : [rows]).flatMap((row) => row.flatMap((value, at) => (value ? [at] : []))))];
}

function picked(edit, indices, width) {
  const { channels: _, ...rest } = edit;
  const vectors = OPERATIONS.get(edit.op).options.find((one) => one.kind === "vectors");
  if (!vectors) return indices.length ? { ...rest, channels: indices } : rest;
  const rows = unitVectors(indices, width);
  const one = rows.length ? rows.reduce((sum, row) => sum.map((value, at) => value + row[at])) : [];
  return { ...rest, [vectors.name]: vectors.name === "direction" ? one : rows };
}

function EditList({ edits, at }) {
  const remove = (index) => {
    write(edits.filter((_, other) => other !== index));
    chosen.at.value = "0";
  };
  return html`
    <ol class="edits" aria-label="Edits, in order">
      ${edits.map((edit, index) => html`
        <li key=${index}>
          <button aria-pressed=${String(index === at)} onClick=${() => { chosen.at.value = String(index); }}>${textOf(edit)}</button>
          <button aria-label="Remove edit ${index + 1}" onClick=${() => remove(index)}>×</button>
        </li>`)}
    </ol>`;
}

function textOf(edit) {
  if (typeof edit === "string") return `stored: ${edit}`;
  const values = OPERATIONS.get(edit.op).options.filter(({ name, kind }) => kind !== "vectors" && edit[name] !== undefined)
    .map(({ name }) => `${name} ${edit[name]}`);
  const indices = pickedOf(edit);
  const where = indices.length ? [`channels ${indices.slice(0, 6).join(", ")}${indices.length > 6 ? ", …" : ""}`] : [];
  return [`${edit.at} ${edit.op}`, ...values, ...where].join(", ");
}

function Pair({ before, after }) {
  const parts = useMemo(() => compared(before.tensor, after.tensor), [before, after]);
  const common = useMemo(() => range(before.tensor.values), [before]);
  const rows = before.map.statistics.filter((one) => one.values.length === 1).map((one, at) =>
    ({ name: ["mean", "std", "min", "max", "zeros"][at], from: one.values[0], to: after.map.statistics[at].values[0] }));
  return html`
    <${Table} label="Statistics before and after" keyOf=${(row) => row.name} rows=${rows} columns=${[
      { title: before.map.name, cell: (row) => row.name }, { title: "before", isNumber: true, cell: (row) => number(row.from) },
      { title: "after", isNumber: true, cell: (row) => number(row.to) },
      { title: "change", isNumber: true, cell: (row) => number(row.to - row.from) }]} />
    ${parts.length > 0 && html`
      <p class="hint">The channels that changed most: before, after, and the difference (blue less, orange more).</p>
      <div class="pairs">${parts.slice(0, SHOWN).map(({ index, from, to, difference, extent }) => html`
        <figure key=${index} class="pair ${from.height === 1 ? "row" : ""}">
          <${Picture} map=${from} limits=${common} label="Channel ${index} before" />
          <${Picture} map=${to} limits=${common} label="Channel ${index} after" />
          <${Picture} map=${difference} limits=${[-extent, extent]} palette="diverging" label="Channel ${index}, difference" />
          <figcaption>${index}, up to ${number(extent, 3)}</figcaption>
        </figure>`)}</div>`}`;
}

function compared(before, after) {
  const others = channels(after);
  return channels(before).map((from, at) => {
    const to = others[at];
    const values = Float64Array.from(from.values, (value, place) => to.values[place] - value);
    const [low, high] = range(values);
    return { index: from.index, from, to, difference: { ...from, values }, extent: Math.max(-low, high) };
  }).filter(({ extent }) => extent > 0).sort((a, b) => b.extent - a.extent);
}

/** Values before and after, by name, where both passes have them. */
const pairsOf = (maps) => collected.value.map((one) => ({ before: one, after: maps.find(({ map }) => map.name === one.map.name) }))
  .filter((pair) => pair.after?.tensor.values.length === pair.before.tensor.values.length);

function Verdict({ edits, isStale }) {
  if (!result.value || !changed.value) return null;
  const nameOf = (index) => categories.value[index] ?? `class ${index}`;
  return html`
    <section class="after" aria-label="Before and after" aria-busy=${String(isStale)}>
      <${BestChange} before=${scoresOf(result.value.maps)} after=${scoresOf(changed.value.maps)} nameOf=${nameOf} />
      <${Copy} passes=${[passOf("before"), passOf("after", edits)]}>
        ${pairsOf(changed.value.maps).map(({ after }) => html`
          <${Save} key=${after.map.name} tensor=${after.tensor} name="after-${after.map.name}" label="Save what came out as .npy" />`)}
      <//>
    </section>`;
}

function Picker({ edit, value, onPick }) {
  const { all, shown, limitsOf } = useChannels(value.tensor, chosen.order, chosen.scale);
  const indices = pickedOf(edit);
  const toggle = (index) => onPick(indices.includes(index)
    ? indices.filter((one) => one !== index) : [...indices, index].sort((a, b) => a - b), all.length);
  if (!all.length || !OPERATIONS.get(edit.op).options.length && edit.op === "skip") return null;
  return html`
    <p>${indices.length ? `Channels ${indices.join(", ")}` : OPERATIONS.get(edit.op).takesVectors ? "Click the channels along which it points." : "All channels; click some to change these alone."}
      ${indices.length > 0 && html` <button onClick=${() => onPick([], all.length)}>None of them</button>`}</p>
    <${ThumbnailControls} order=${chosen.order} scale=${chosen.scale} />
    <${Thumbnails} shown=${shown} limitsOf=${limitsOf} isChosen=${(index) => indices.includes(index)} onChoose=${toggle} />`;
}

function Change() {
  const edits = readEdits();
  const at = Math.min(Number(chosen.at.value) || 0, edits.length - 1);
  const edit = edits[at];
  const running = edits.filter(isComplete);
  const key = JSON.stringify([running, view.model.value, view.module.value, view.port.value]);
  useEffect(() => {
    if (!running.length || !input.value) {
      pass.stop();
      changed.value = null;
    } else runEdits(key, running);
  }, [key, result.value]);
  if (!input.value) return html`<p class="hint">Give the model an input, then choose a module to change.</p>`;
  const place = collected.value[0]?.map.name;
  const add = (added) => {
    write([...edits, added]);
    chosen.at.value = String(edits.length);
  };
  const replace = (changedEdit) => write(edits.map((one, index) => (index === at ? changedEdit : one)));
  const own = edit && typeof edit !== "string" ? collected.value.find(({ map }) => map.name === edit.at) : null;
  return html`
    <section class="changes" aria-label="Change">
      <h2>Edits <small>values that are changed while the model runs</small></h2>
      <${EditList} edits=${edits} at=${at} />
      ${place ? html`<button class="add" onClick=${() => add({ at: place, op: "scale", factor: 0 })}>Add an edit of ${place}</button>`
        : html`<p class="hint">Choose a module to change.</p>`}
      ${edit && typeof edit !== "string" && html`<${EditForm} key=${at} edit=${edit} value=${own} onChange=${replace} />`}
      ${running.length > 0 && html`<${Verdict} edits=${running} isStale=${changed.value?.key !== key} />`}
      ${edit && typeof edit !== "string" && (own
        ? html`<${Picker} key=${edit.at} edit=${edit} value=${own} onPick=${(indices, width) => replace(picked(edit, indices, width))} />`
        : html`<p class="hint">Choose ${edit.at} in the tree to pick its channels.</p>`)}
      <${StoredEdits} edits=${edits} onUse=${add} />
      ${running.length > 0 && changed.value && result.value && pairsOf(changed.value.maps).map((pair) => html`<${Pair} key=${pair.before.map.name} ...${pair} />`)}
    </section>`;
}

export const change = { name: "change", title: "Change", View: Change, usesModel: true };
