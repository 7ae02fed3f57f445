// Reference means of an edit: a number for each channel that is changed, typed, or taken from passes without edits.
import { html } from "../html.js";
import { extract, input, options, readSample, SAMPLES, view } from "../state.js";
import { channels } from "../tensors.js";
import { during } from "../work.js";
import { Field } from "./field.js";

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const rounded = (value) => Number(value.toPrecision(6));

/** Means of each channel at a place, over positions and inputs. */
async function meansAt(at, inputs) {
  const of = await Promise.all(inputs.map(async (one) => {
    const { maps } = await extract(view.model.value, one, { taps: [{ selector: at, values: true }] }, options());
    return channels(maps[0].tensor).map(({ values }) => mean(values));
  }));
  return of[0].map((_, channel) => rounded(mean(of.map((means) => means[channel]))));
}

/** @param edit with its operation's `option`; @param onGive gets numbers, or undefined */
export function Reference({ edit, option, onGive }) {
  const take = async (what, inputs) => {
    const means = await during(`Taking the means of ${what}`, async () => meansAt(edit.at, await inputs()));
    if (means?.length) onGive((edit.channels ?? means.map((_, at) => at)).map((at) => means[at]));
  };
  const numbers = (text) => {
    const given = text.split(",").map((one) => one.trim()).filter(Boolean).map(Number);
    onGive(given.length && given.every(Number.isFinite) ? given : undefined);
  };
  return html`
    <label>${option.name} <${Field} value=${(edit[option.name] ?? []).join(", ")} placeholder="the batch's own mean" onGive=${numbers} /></label>
    ${input.value.kind === "image"
      ? html`<button type="button" onClick=${() => take("the samples", () => Promise.all(SAMPLES.map((name) => readSample(name))))}>Means of the samples</button>`
      : html`<button type="button" onClick=${() => take("this text", () => [input.value])}>Means of this text</button>`}`;
}
