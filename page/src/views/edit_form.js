// The form of one edit, made from the operation's own fields.
import { html, number } from "../html.js";
import { OPERATIONS } from "../edits.js";
import { range } from "../tensors.js";

const STEPS = 200;

/** Ends of a slider: shares and factors have their own, other numbers those of the value. */
function ends(operation, option, value) {
  if (option === "probability") return [0, 0.99];
  if (option === "factor" || (operation === "affine" && option === "scale")) return [-2, 3];
  const [low, high] = value ? range(value.tensor.values) : [-1, 1];
  const extent = Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (["scale", "max_norm"].includes(option)) return [0, extent];
  return operation === "clamp" ? [low, high] : [-extent, extent];
}

/** What a new operation begins with, in the middle of its slider where it needs a number. */
export function initial(op, at, value) {
  const given = {};
  for (const { name, kind, isOptional, choices } of OPERATIONS.get(op).options) {
    const [low, high] = ends(op, name, value);
    if (kind === "choice") [given[name]] = choices;
    else if (kind === "integer" && !isOptional) given[name] = name === "k" ? 1 : 0;
    else if (kind === "text") given[name] = "";
    else if (["number", "operand"].includes(kind) && !isOptional) given[name] = name === "factor" ? 0 : rounded((low + 3 * high) / 4);
  }
  if (op === "clamp") given.high = rounded(ends(op, "high", value).reduce((sum, end) => sum + end) / 2);
  return { at, op, ...given };
}

const rounded = (value) => Number(value.toPrecision(3));

function NumberOption({ op, option, edit, value, onGive }) {
  const [low, high] = ends(op, option.name, value);
  const given = edit[option.name];
  const take = (event) => onGive(event.target.value === "" ? undefined : Number(event.target.value));
  return html`
    <label>${option.name}
      <input type="range" min=${low} max=${high} step=${(high - low) / STEPS || 1} value=${given ?? (low + high) / 2} aria-label="${option.name}, slider"
             onChange=${(event) => onGive(rounded(Number(event.target.value)))} />
      <input type="number" step="any" value=${given ?? ""} aria-label=${option.name} placeholder=${option.isOptional ? "not set" : ""} onChange=${take} />
    </label>`;
}

function Option({ op, option, edit, value, onGive }) {
  const { name, kind, choices } = option;
  if (kind === "vectors") return null; // the channels that are picked
  if (kind === "flag") {
    return html`<label><input type="checkbox" checked=${edit[name] ?? false} onChange=${(event) => onGive(event.target.checked || undefined)} /> ${name}</label>`;
  }
  if (kind === "choice") {
    return html`<label>${name} <select value=${edit[name]} onChange=${(event) => onGive(event.target.value)}>${choices.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>`;
  }
  if (kind === "text") return html`<label>${name} <input value=${edit[name] ?? ""} onChange=${(event) => onGive(event.target.value)} /></label>`;
  if (kind === "integer") {
    return html`<label>${name} <input type="number" step="1" value=${edit[name] ?? ""} onChange=${(event) => onGive(event.target.value === "" ? undefined : Math.round(Number(event.target.value)))} /></label>`;
  }
  return html`<${NumberOption} op=${op} option=${option} edit=${edit} value=${value} onGive=${onGive} />`;
}

/** @param edit as `edits.js` has it; @param value what is changed, for the ends of sliders; null where it is not shown */
export function EditForm({ edit, value, onChange }) {
  const give = (name) => (given) => {
    const { [name]: _, ...rest } = edit;
    onChange(given === undefined ? rest : { ...rest, [name]: given });
  };
  return html`
    <form class="edit" aria-label="Edit of ${edit.at}" onSubmit=${(event) => event.preventDefault()}>
      <label>Operation <select value=${edit.op} onChange=${(event) => onChange(initial(event.target.value, edit.at, value))}>
        ${[...OPERATIONS.keys()].map((name) => html`<option key=${name}>${name}</option>`)}</select></label>
      ${OPERATIONS.get(edit.op).options.map((option) => html`
        <${Option} key=${option.name} op=${edit.op} option=${option} edit=${edit} value=${value} onGive=${give(option.name)} />`)}
      ${value && html`<span class="hint">values from ${range(value.tensor.values).map((end) => number(end)).join(" to ")}</span>`}
    </form>`;
}
