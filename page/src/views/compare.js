// A second pass beside the first: another input, or another model.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { getModel } from "../api.js";
import { html, number } from "../html.js";
import { beside, bestClasses, extract, input, models, options, readSample, result, SAMPLES, second, taps, textInput, view } from "../state.js";
import { range } from "../tensors.js";
import { Best } from "./best.js";
import { Channels } from "./channels.js";
import { Field } from "./field.js";
import { Save } from "./save.js";
import { SecondImage } from "./second_image.js";
import { Latest, working } from "../work.js";

/** `{key, first, maps, input, model, described}` of the second pass, `first` the input of the first; null without one. */
const other = signal(null);
const pass = new Latest();

const LOADED = 3;

/** What is compared with, as `[kind, name]`: `sample:cat`, `image:` of the user's own, `text:...`, `model:...`. */
const partsOf = (against) => [against.slice(0, against.indexOf(":")), against.slice(against.indexOf(":") + 1)];

const INPUTS = {
  sample: (name, signal) => readSample(name, signal), image: () => second.value, text: (text) => textInput(text), model: () => input.value,
};

async function runOther(key, against, module) {
  const [kind, name] = partsOf(against);
  const model = kind === "model" ? name : view.model.value;
  const first = input.value;
  const reply = await pass.start(`Running ${model} for comparison`, async (signal) => {
    const given = await INPUTS[kind](name, signal);
    const [passed, described] = await Promise.all([
      extract(model, given, { taps: taps(module) }, options(signal)), getModel(model, options(signal))]);
    return { ...passed, input: given, model, described };
  });
  if (reply) other.value = { ...reply, key, first };
  else if (!pass.isRunning) other.value = null;
}

/** Cosine of the angle between two values of one shape, in float64; null for others. */
function similarity(a, b) {
  if (a.shape.join() !== b.shape.join()) return null;
  let [product, first, second] = [0, 0, 0];
  for (let at = 0; at < a.values.length; at += 1) {
    product += a.values[at] * b.values[at];
    first += a.values[at] ** 2;
    second += b.values[at] ** 2;
  }
  return product / Math.sqrt(first * second);
}

/** What the chosen module is compared with: `against` and `place`, another module's path, are signals. */
export function CompareControls({ against, place }) {
  const isText = input.value?.kind === "text";
  const others = models.value.filter((one) => one.state === LOADED && one.modelId !== view.model.value);
  return html`
    <div class="controls">
      <label>Compare with <select value=${against.value.startsWith("text:") ? "text:" : against.value} onChange=${(event) => { against.value = event.target.value; }}>
        <option value="">nothing</option>
        ${isText ? html`<option value="text:">another text</option>`
          : html`${SAMPLES.filter((name) => name !== view.sample.value).map((name) => html`<option key=${name} value="sample:${name}">the image ${name}</option>`)}
            <option value="image:">an image of your own</option>`}
        ${others.map(({ modelId }) => html`<option key=${modelId} value="model:${modelId}">the model ${modelId}</option>`)}
      </select></label>
      ${against.value.startsWith("text:") && html`<label>Other text <${Field} value=${against.value.slice(5)} onGive=${(text) => { against.value = `text:${text.trim()}`; }} /></label>`}
      ${against.value === "image:" && html`<${SecondImage} label="The other image" />`}
      ${against.value.startsWith("model:") && html`<label>Its module <${Field} value=${place.value || view.module.value} onGive=${(path) => { place.value = path.trim(); }} /></label>`}
    </div>`;
}

/** Path of the module whose value stands beside that of the chosen one. */
const moduleBeside = (against, place) => (against.value.startsWith("model:") && place.value ? place.value : view.module.value);

const keyOf = (against, place) =>
  JSON.stringify([against.value, moduleBeside(against, place), view.model.value, view.port.value, second.value?.url ?? ""]);

/** The second pass of what is chosen, beside a first pass of the same input; null until both are there. */
function doneOf({ against, place }) {
  const done = other.value;
  const isOfInput = done?.first === input.value && done.first === result.value?.input;
  return isOfInput && done.key === keyOf(against, place) ? done : null;
}

/** How alike `value` and that of the second pass are; nothing until both are there, or where their shapes differ. */
export function Likeness({ against, place, value }) {
  const done = doneOf({ against, place });
  if (!value?.tensor || !done?.maps[0].tensor) return null;
  const likeness = similarity(value.tensor, done.maps[0].tensor);
  if (likeness === null) return html`<p class="hint">The values have other shapes.</p>`;
  return html`<p>Cosine similarity of the values: ${number(likeness)}</p>`;
}

/** Limits of colours for both sides: of all values of `value` and of the second pass; null until both are there. */
export function limitsOfBoth({ against, place }, value) {
  const done = doneOf({ against, place });
  if (!against.value || !value?.tensor || !done) return null;
  const [[low, high], [otherLow, otherHigh]] = [range(value.tensor.values), range(done.maps[0].tensor.values)];
  return [Math.min(low, otherLow), Math.max(high, otherHigh)];
}

/** The second pass, beside the first. */
export function Other({ against, place, chosen, tokens, both }) {
  const key = keyOf(against, place);
  const isChosen = against.value === "image:" ? second.value !== null : !["", "text:"].includes(against.value);
  useEffect(() => {
    if (isChosen) runOther(key, against.value, moduleBeside(against, place));
    else {
      pass.stop();
      other.value = null;
    }
  }, [key, input.value]);
  const done = doneOf({ against, place });
  if (!done) return html`<p class="hint">${isChosen ? working.value || "Nothing was computed to compare with." : "Choose what to compare with."}</p>`;
  const [found] = done.maps;
  const image = { ...done.input, preprocessing: done.described.preprocessing };
  return html`
    <section class="other" aria-label="Compared with">
      <h3>${done.model}, ${done.input.kind === "text" ? done.input.text : done.input.name}</h3>
      <${Best} classes=${bestClasses(done.maps, done.described.categories)} label="Best classes of the other" />
      <${Channels} map=${found.map} tensor=${found.tensor} chosen=${chosen} image=${image} tokens=${done.processed[0]?.samples[0]?.tokens ?? tokens} both=${both} hasControls=${false} />
      <p><${Save} tensor=${found.tensor} name="other-${found.map.name}" label="Save the other as .npy" /></p>
    </section>`;
}

/** The second pass as `pythonCode` takes it; empty without one. `chosen` has `against` and `place`. */
export function otherPasses(chosen) {
  const done = chosen.against.value ? doneOf(chosen) : null;
  if (!done) return [];
  return [{ result: "other", model: done.model, input: done.input, taps: [...done.maps.filter(({ map }) => map.path !== "").map(({ map }) => map.name), beside()] }];
}
