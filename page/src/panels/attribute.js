// Attribute: which parts of an input a class depends on, and how gradients flow.
import { signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { parameters } from "../address.js";
import { attribute as compute, METHODS } from "../attribution/attribute.js";
import { attributionCommand, attributionPython, healthCommand, healthPython, tokensCommand, tokensPython } from "../attribution/code.js";
import { gradientHealth } from "../attribution/health.js";
import { attributeTokens } from "../attribution/tokens.js";
import { html, number } from "../html.js";
import { imagePort } from "../ports.js";
import { best, categories, collected, input, isDescribed, model, options, view } from "../state.js";
import { Copies } from "../views/copy.js";
import { Field } from "../views/field.js";
import { HealthPicture } from "../views/health.js";
import { Picture } from "../views/map.js";
import { Progress } from "../views/progress.js";
import { Save, SaveFacts } from "../views/save.js";
import { Latest, working } from "../work.js";

const HEALTH = "health";
const UNIT = [0, 1];

const chosen = parameters("attribute", { method: "grad_cam", target: "", at: "", setting: "", opacity: "0.6" });
const work = new Latest();
const share = signal(null);
/** `{kind, asked, found, key}` of the last computation; null without one. */
const result = signal(null);

const NAMES = ["method", "target", "at", "setting"];
/** What is chosen beside the input: of another choice, the last result is not shown. */
const keyOf = () => JSON.stringify([view.model.value, ...NAMES.map((name) => chosen[name].value)]);

/** The number of a class by its number or name; null for the predicted one. */
function targetOf(text) {
  const word = text.trim();
  if (!word) return null;
  if (/^\d+$/.test(word)) return Number(word);
  const at = categories.value.indexOf(word);
  if (at < 0) throw new RangeError(`The model has no class ${word}. Choose one from the list, or write its number.`);
  return at;
}

function question() {
  const name = chosen.method.value;
  const { setting, isAtModule } = METHODS[name] ?? {};
  const value = Number(chosen.setting.value) || (setting?.initial ?? null);
  return {
    model: view.model.value, input: input.value, method: name, target: targetOf(chosen.target.value),
    at: isAtModule && chosen.at.value ? chosen.at.value : null,
    setting: setting && value !== null ? [setting.name, value] : null,
  };
}

async function run() {
  const kind = input.value.kind === "text" ? "text" : chosen.method.value === HEALTH ? HEALTH : "map";
  const key = keyOf();
  share.value = null;
  const found = await work.start(`Attributing with ${view.model.value}`, async (signal) => {
    const asked = question();
    return { kind, asked, found: await ANSWERS[kind](asked, options(signal)) };
  });
  share.value = null;
  if (found) result.value = { ...found, key };
}

const ANSWERS = {
  map: ({ model: modelId, setting, ...asked }, own) =>
    compute({ modelId, port: imagePort(model.value.inputs), ...asked, setting: setting?.[1] ?? null }, own, (done) => { share.value = done; }),
  text: ({ model: modelId, ...asked }, own) => attributeTokens({ modelId, ...asked }, own),
  [HEALTH]: (asked, own) => gradientHealth(asked.model, asked.input, asked.target, own),
};

function Controls() {
  const { setting, isAtModule } = METHODS[chosen.method.value] ?? {};
  const place = collected.value.find(({ map }) => map.port === "out")?.map.name;
  const places = [...new Set([chosen.at.value, place].filter(Boolean))];
  const isText = input.value.kind === "text";
  return html`
    <div class="controls">
      ${!isText && html`<label>Method <select value=${chosen.method.value} onChange=${(event) => { chosen.method.value = event.target.value; chosen.setting.value = ""; }}>
        ${Object.entries(METHODS).map(([name, one]) => html`<option key=${name} value=${name}>${one.label}</option>`)}
        <option value=${HEALTH}>Gradient health</option></select></label>`}
      ${(!isText || best.value.length > 0) && html`<label>Class <${Field} list="attribute-classes" value=${chosen.target.value} placeholder="the predicted one" onGive=${(text) => { chosen.target.value = text; }} /></label>`}
      <datalist id="attribute-classes">${categories.value.map((name, at) => html`<option key=${at} value=${name} />`)}</datalist>
      ${!isText && isAtModule && html`<label>At <select value=${chosen.at.value} onChange=${(event) => { chosen.at.value = event.target.value; }}>
        <option value="">the last feature map</option>${places.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
      ${!isText && setting && html`<label>${setting.label} <${Field} type="number" min="1" step="1" value=${chosen.setting.value} placeholder=${setting.initial ?? "a fourteenth"} onGive=${(text) => { chosen.setting.value = text; }} /></label>`}
      ${working.value && html`<button onClick=${() => work.stop()}>Stop</button>`}
    </div>
    ${share.value !== null && html`<${Progress} label="Passes, percent" done=${Math.round(100 * share.value)} count=${100} />`}`;
}

const className = (target) => (categories.value[target] ? `${categories.value[target]} (${target})` : `class ${target}`);

/** The model's own input as a picture: scale, mean and deviation of its preprocessing are undone. */
function Input({ pixels }) {
  const canvas = useRef(null);
  const [, channels, height, width] = pixels.shape;
  useLayoutEffect(() => {
    canvas.current.width = width;
    canvas.current.height = height;
    const image = new ImageData(width, height);
    const { mean = [], std = [], scale = 1 / 255 } = model.value?.preprocessing ?? {};
    const size = height * width;
    for (let at = 0; at < size; at += 1) {
      for (let part = 0; part < 3; part += 1) {
        const from = channels === 3 ? part : 0;
        image.data[4 * at + part] = (pixels.values[from * size + at] * (std[from] ?? 1) + (mean[from] ?? 0)) / scale;
      }
      image.data[4 * at + 3] = 255;
    }
    canvas.current.getContext("2d").putImageData(image, 0, 0);
  }, [pixels]);
  return html`<canvas ref=${canvas} role="img" aria-label="The model's input"></canvas>`;
}

function HeatMap({ asked, found }) {
  const { heat, values, place, score, target } = found;
  return html`
    <${Copies} python=${attributionPython(asked)} command=${attributionCommand(asked)} />
    <div class="large">
      <div class="over"><${Input} pixels=${found.pixels} />
        <div class="map" style=${{ opacity: Number(chosen.opacity.value) }}><${Picture} map=${heat} limits=${UNIT} label="Attribution to ${className(target)}" /></div></div>
      <label>Opacity <input type="range" min="0" max="1" step="0.05" value=${chosen.opacity.value} onInput=${(event) => { chosen.opacity.value = event.target.value; }} /></label>
      <dl class="statistics">
        <div><dt>class</dt><dd>${className(target)}</dd></div><div><dt>logit</dt><dd>${number(score, 6)}</dd></div>
        <div><dt>at</dt><dd>${place.at}</dd></div><div><dt>shape</dt><dd>${values.shape.join("×")}</dd></div>
      </dl>
      <${Save} name=${asked.method} tensor=${values} label="Save as ${asked.method}.npy" />
    </div>`;
}

function Tokens({ asked, found }) {
  const most = found.values.reduce((high, value) => Math.max(high, Math.abs(value)), 0) || 1;
  const colour = (value) => `rgb(${value < 0 ? "33 102 172" : "200 85 0"} / ${0.5 * Math.abs(value) / most})`;
  const shown = { model: asked.model, input: asked.input, found };
  return html`
    <${Copies} python=${tokensPython(shown)} command=${tokensCommand(shown)} />
    <p class="hint">${found.of === null ? `Contribution to ${className(found.target)}` : `Contribution to the squares of ${found.of}`}: orange more, blue less.</p>
    <p class="tokens">${found.tokens.map((token, at) => html`
      <span key=${at} class="token-share" style=${{ backgroundColor: colour(found.values[at]) }} title=${number(found.values[at])}>${token}<small>${number(found.values[at], 2)}</small></span>`)}</p>
    <${Save} name="tokens" tensor=${{ shape: [found.values.length], values: found.values }} label="Save as tokens.npy" />`;
}

function Health({ asked, found }) {
  const given = { ...asked, target: found.target };
  return html`
    <${Copies} python=${healthPython(given)} command=${healthCommand(given)} />
    <p class="hint">Gradients of the logit of ${className(found.target)}.</p>
    <${HealthPicture} rows=${found.rows} />
    <${SaveFacts} name="health.json" make=${() => found.rows} />`;
}

const VIEWS = { map: HeatMap, text: Tokens, [HEALTH]: Health };

function Shown() {
  useEffect(() => {
    if (!isDescribed.value) return undefined; // a class by its name is one of the new model's
    run();
    return () => work.stop();
  }, [input.value, isDescribed.value, categories.value, view.model.value, ...NAMES.map((name) => chosen[name].value)]);
  const { kind, asked, found, key } = result.value ?? {};
  const Found = key === keyOf() && asked.input === input.value ? VIEWS[kind] : null;
  return html`<${Controls} />${Found ? html`<${Found} asked=${asked} found=${found} />` : html`<p class="hint">${working.value || "Nothing was computed."}</p>`}`;
}

function Attribute() {
  if (!input.value) return html`<p class="hint">Give the model an input.</p>`;
  return html`<section aria-label="Attribution"><${Shown} /></section>`;
}

export const attribute = { name: "attribute", title: "Attribute", View: Attribute, usesModel: true };
