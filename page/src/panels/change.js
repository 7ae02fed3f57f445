// Change: edits of values, parameters and gradients while the model runs, and what they do.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { parameters } from "../address.js";
import { DROPPED, offeredSources, runEdited } from "../edited_passes.js";
import { isKnown, isOfGradient, isOfParameter, OPERATIONS, sourcesOf, unitVectors } from "../edits.js";
import { html } from "../html.js";
import { best, categories, collected, current, input, options, scoresOf, second, tokens, view } from "../state.js";
import { pairsOf, Pair } from "../views/before_after.js";
import { BestChange } from "../views/best.js";
import { Copy } from "../views/copy.js";
import { EditForm } from "../views/edit_form.js";
import { ChannelPicker, pickedOf } from "../views/edit_channels.js";
import { EditPlace, useEditedValue } from "../views/edit_place.js";
import { rangesOf } from "../views/edit_region.js";
import { Field } from "../views/field.js";
import { Save } from "../views/save.js";
import { SecondImage } from "../views/second_image.js";
import { StoredEdits } from "../views/stored_edits.js";
import { Latest, working } from "../work.js";

const chosen = parameters("change", { edits: "[]", at: "0", place: "", target: "", text: "", order: "strongest", scale: "common" });
/** `{key, input, before, after, passes}` of the last passes with edits; null without them. */
const changed = signal(null);
const pass = new Latest();

function readEdits() {
  try {
    const read = JSON.parse(chosen.edits.value);
    return Array.isArray(read) ? read.filter(isKnown) : [];
  } catch {
    return []; // an address that was cut off
  }
}

const write = (edits) => { chosen.edits.value = JSON.stringify(edits); };

/** Edits that can run: a direction needs its channels, and a swap a value. */
function isComplete(edit) {
  if (typeof edit === "string") return true;
  if (edit.op === "swap") return Boolean(edit.source || edit.from) && (edit.source !== "text" || Boolean(chosen.text.value));
  return OPERATIONS.get(edit.op).options.every((one) => one.kind !== "vectors" || edit[one.name]?.length);
}

/** The class whose logit has the gradients: the chosen one, otherwise the predicted one. */
const targetOf = () => (/^\d+$/.test(chosen.target.value) ? Number(chosen.target.value) : best.value[0]?.[0] ?? 0);

async function run(key, edits) {
  const own = input.value;
  const given = { target: targetOf(), text: chosen.text.value };
  const found = await pass.start(`Running ${view.model.value} with edits`, (signal) => runEdited(edits, given, options(signal)));
  if (found) changed.value = { ...found, key, input: own };
  else if (!pass.isRunning) changed.value = null; // of other edits
}

function picked(edit, indices, width, channelDim) {
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
  const values = OPERATIONS.get(edit.op).options.filter(({ name, kind }) => !["vectors", "reference"].includes(kind) && edit[name] !== undefined)
    .map(({ name }) => `${name} ${edit[name]}`);
  const [rows, columns] = rangesOf(edit);
  const part = [edit.tokens && `tokens ${edit.tokens.join(", ")}`, rows && `rows ${rows}`, columns && `columns ${columns}`].filter(Boolean);
  const indices = pickedOf(edit);
  const where = indices.length ? [`${isOfParameter(edit) ? "rows" : "channels"} ${indices.slice(0, 6).join(", ")}${indices.length > 6 ? ", …" : ""}`] : [];
  return [`${edit.at} ${edit.op}`, ...values, ...where, ...part].join(", ");
}

/** The class of gradients, and the other inputs of swaps: only where an edit needs them. */
function Needs({ edits }) {
  const sources = sourcesOf(edits);
  const isSwap = edits.some(({ op }) => op === "swap");
  const give = (name) => (text) => { chosen[name].value = text.trim(); };
  return html`
    <div class="controls">
      ${edits.some(isOfGradient) && html`<label>Gradients of class <${Field} inputmode="numeric" pattern="[0-9]*" value=${chosen.target.value} placeholder="${targetOf()}, the predicted one" onGive=${give("target")} /></label>`}
      ${sources.includes("text") && html`<label>Other text <${Field} value=${chosen.text.value} onGive=${give("text")} /></label>`}
      ${isSwap && input.value.kind === "image" && html`<${SecondImage} label="Values from an image of your own" />`}
    </div>`;
}

function Verdict({ found, before, isStale }) {
  const nameOf = (index) => categories.value[index] ?? `class ${index}`;
  const pairs = pairsOf(before, found.after);
  return html`
    <section class="after" aria-label="Before and after" aria-busy=${String(isStale)}>
      <${BestChange} before=${scoresOf(found.before ?? current.value?.maps)} after=${scoresOf(found.after)} nameOf=${nameOf} />
      <${Copy} passes=${found.passes}>
        ${pairs.map(({ after }) => html`
          <${Save} key=${after.map.name} tensor=${after.tensor} name="after-${after.map.name}" label=${`Save what came out as .npy${pairs.length > 1 ? `: ${after.map.name}` : ""}`} />`)}
      <//>
    </section>`;
}

function Change() {
  const edits = readEdits();
  const at = Math.min(Number(chosen.at.value) || 0, edits.length - 1);
  const edit = typeof edits[at] === "string" ? null : edits[at] ?? null;
  const running = edits.filter(isComplete);
  const key = JSON.stringify([running, view.model.value, view.module.value, view.port.value, chosen.target.value, chosen.text.value]);
  const ownSecond = sourcesOf(running).includes(DROPPED) ? second.value : null;
  useEffect(() => {
    if (!running.length || !input.value || !current.value) {
      pass.stop();
      changed.value = null;
    } else run(key, running);
  }, [key, current.value, ownSecond]);
  const found = changed.value?.input === input.value ? changed.value : null; // never beside another input
  const isStale = found?.key !== key;
  const before = found?.before?.filter(({ map }) => map.name !== "/out") ?? collected.value;
  const own = useEditedValue(edit, before);
  if (!input.value) return html`<p class="hint">Give the model an input, then choose a module to change.</p>`;
  const add = (added) => {
    write([...edits, added]);
    chosen.at.value = String(edits.length);
  };
  const replace = (changedEdit) => write(edits.map((one, index) => (index === at ? changedEdit : one)));
  const pick = (indices, width, channelDim) => replace(picked(edit, indices, width, channelDim));
  return html`
    <section class="changes" aria-label="Change">
      <h2>Edits <small>what is changed while the model runs</small></h2>
      <${EditList} edits=${edits} at=${at} />
      <${EditPlace} chosen=${chosen.place} onAdd=${(place) => add({ at: place, op: "scale", factor: 0 })} />
      ${edit && html`<${EditForm} key=${at} edit=${edit} value=${own} sources=${offeredSources()} tokens=${tokens.value} onChange=${replace} />`}
      <${Needs} edits=${edits.filter((one) => typeof one !== "string")} />
      ${running.length > 0 && found && html`<${Verdict} found=${found} before=${before} isStale=${isStale} />`}
      ${running.length > 0 && !found && html`<p class="hint">${working.value || "Nothing was computed with these edits."}</p>`}
      ${edit && html`<${ChannelPicker} key=${edit.at} edit=${edit} value=${own} chosen=${chosen} onPick=${pick} />`}
      <${StoredEdits} edits=${edits} onUse=${add} />
      ${running.length > 0 && found && html`<div class="after-values" aria-busy=${String(isStale)}>
        ${pairsOf(before, found.after).map((pair) => html`<${Pair} key=${pair.before.map.name} ...${pair} />`)}</div>`}
    </section>`;
}

export const change = { name: "change", title: "Change", View: Change, usesModel: true };
