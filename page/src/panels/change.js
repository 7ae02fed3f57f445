// Change: edits of values, parameters and gradients while the model runs, and what they do.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { parameters } from "../address.js";
import { DROPPED, offeredSources, runEdited } from "../edited_passes.js";
import { isOfGradient, sourcesOf } from "../edits.js";
import { html } from "../html.js";
import { best, categories, collected, current, input, isBeside, options, scoresOf, second, tokens, view } from "../state.js";
import { pairsOf, Pair } from "../views/before_after.js";
import { BestChange } from "../views/best.js";
import { Copy } from "../views/copy.js";
import { EditForm } from "../views/edit_form.js";
import { ChannelPicker, withChannels } from "../views/edit_channels.js";
import { EditList, editsIn, isComplete } from "../views/edit_list.js";
import { EditPlace, useEditedValue } from "../views/edit_place.js";
import { Field } from "../views/field.js";
import { Save } from "../views/save.js";
import { SecondImage } from "../views/second_image.js";
import { StoredEdits } from "../views/stored_edits.js";
import { Latest, working } from "../work.js";

const chosen = parameters("change", { edits: "[]", at: "0", place: "", target: "", text: "", order: "strongest", scale: "common" });
/** `{key, input, before, after, passes}` of the last passes with edits; null without them. */
const changed = signal(null);
const pass = new Latest();

const canRun = (edit) => isComplete(edit) && (edit.source !== "text" || Boolean(chosen.text.value));

/** The class whose logit has the gradients: the chosen one, otherwise the predicted one. */
const targetOf = () => (/^\d+$/.test(chosen.target.value) ? Number(chosen.target.value) : best.value[0]?.[0] ?? 0);

async function run(key, edits) {
  const own = input.value;
  const given = { target: targetOf(), text: chosen.text.value };
  const found = await pass.start(`Running ${view.model.value} with edits`, (signal) => runEdited(edits, given, options(signal)));
  if (found) changed.value = { ...found, key, input: own };
  else if (!pass.isRunning) changed.value = null; // of other edits
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
  const { edits, at, edit, add, replace } = editsIn(chosen);
  const running = edits.filter(canRun);
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
  const before = found?.before?.filter((one) => !isBeside(one)) ?? collected.value;
  const own = useEditedValue(edit, before);
  if (!input.value) return html`<p class="hint">Give the model an input, then choose a module to change.</p>`;
  const pick = (...given) => replace(withChannels(edit, ...given));
  return html`
    <section class="changes" aria-label="Change">
      <h2>Edits <small>what is changed while the model runs</small></h2>
      <${EditList} chosen=${chosen} />
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
