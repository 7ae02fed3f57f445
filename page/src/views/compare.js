// A second pass beside the first: another input, or another model.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import * as api from "../api.js";
import { html, number } from "../html.js";
import { bestClasses, input, models, options, readSample, taps, view } from "../state.js";
import { SAMPLES } from "./input.js";
import { Best } from "./best.js";
import { Channels } from "./channels.js";
import { Save } from "./save.js";
import { Latest } from "../work.js";

/** `{key, maps, input, model, names}` of the second pass; null without one. */
export const other = signal(null);
const pass = new Latest();

const LOADED = 3;

async function runOther(key, against, module) {
  const [kind, name] = [against.slice(0, against.indexOf(":")), against.slice(against.indexOf(":") + 1)];
  const model = kind === "model" ? name : view.model.value;
  const reply = await pass.start(`Running ${model} for comparison`, async (signal) => {
    const given = kind === "sample" ? await readSample(name, signal) : kind === "text" ? { kind: "text", name: "the text", text: name } : input.value;
    const [passed, described] = await Promise.all([
      api.extract(model, given, { taps: taps(module) }, options(signal)), api.getModel(model, options(signal))]);
    return { ...passed, input: given, model, names: described.categories };
  });
  if (reply) other.value = { ...reply, key };
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
          : SAMPLES.filter((name) => name !== view.sample.value).map((name) => html`<option key=${name} value="sample:${name}">the image ${name}</option>`)}
        ${others.map(({ modelId }) => html`<option key=${modelId} value="model:${modelId}">the model ${modelId}</option>`)}
      </select></label>
      ${against.value.startsWith("text:") && html`<label>Other text <input value=${against.value.slice(5)} onChange=${(event) => { against.value = `text:${event.target.value}`; }} /></label>`}
      ${against.value.startsWith("model:") && html`<label>Its module <input value=${place.value || view.module.value} onChange=${(event) => { place.value = event.target.value.trim(); }} /></label>`}
    </div>`;
}

/** The second pass, beside `value`, what the first collected. */
export function Other({ against, place, value, chosen, tokens }) {
  const module = against.value.startsWith("model:") && place.value ? place.value : view.module.value;
  const key = JSON.stringify([against.value, module, view.model.value, view.port.value]);
  useEffect(() => {
    if (!against.value || against.value === "text:") {
      pass.stop();
      other.value = null;
    } else runOther(key, against.value, module);
  }, [key, input.value]);
  const done = other.value;
  if (done?.key !== key) return html`<p class="hint">Choose what to compare with.</p>`;
  const [found] = done.maps;
  const likeness = value?.tensor && found.tensor ? similarity(value.tensor, found.tensor) : null;
  return html`
    <section class="other" aria-label="Compared with">
      <h3>${done.model}, ${done.input.kind === "text" ? done.input.text : done.input.name}</h3>
      <p><${Save} tensor=${found.tensor} name="other-${found.map.name}" label="Save the other as .npy" /> ${likeness !== null && html`cosine similarity ${number(likeness)}`}</p>
      <${Best} classes=${bestClasses(done.maps, done.names)} label="Best classes of the other" />
      <${Channels} map=${found.map} tensor=${found.tensor} chosen=${chosen} image=${done.input} tokens=${done.processed[0]?.samples[0]?.tokens ?? tokens} />
    </section>`;
}

/** The second pass as `pythonCode` takes it; empty without one. */
export const otherPasses = () => (other.value
  ? [{ result: "other", model: other.value.model, input: other.value.input, taps: [...other.value.maps.filter(({ map }) => map.path !== "").map(({ map }) => map.name), "/out"] }] : []);
