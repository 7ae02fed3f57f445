// The form of one edit, made from the operation's own fields.
import { html, number } from "../html.js";
import { alongDirection, directionOf, isOfParameter, OPERATIONS, optionsOfEdit, takesDirection } from "../edits.js";
import { range } from "../tensors.js";
import { Reference } from "./edit_reference.js";
import { EditRegion } from "./edit_region.js";
import { Field } from "./field.js";

const STEPS = 200;

/** Ends of a slider: shares, factors and multiples of a norm have their own, other numbers those of the value. */
function ends(operation, option, value, units) {
  if (units === "norm") return [-2, 2];
  if (option === "probability") return [0, 0.99];
  if (option === "factor" || (operation === "affine" && option === "scale")) return [-2, 3];
  const [low, high] = value ? range(value.tensor.values) : [-1, 1];
  const extent = Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (["scale", "max_norm"].includes(option)) return [0, extent];
  return operation === "clamp" ? [low, high] : [-extent, extent];
}

/** What a new operation begins with, in the middle of its slider where it needs a number. */
export function initial(op, at, value, sources) {
  const given = {};
  for (const { name, kind, isRequired, choices } of OPERATIONS.get(op).options) {
    if (kind === "source") [given[name]] = sources;
    else if (isRequired) given[name] = begin(op, name, kind, choices, ends(op, name, value));
  }
  if (["clamp", "cap"].includes(op)) given.high = rounded(ends(op, "high", value).reduce((sum, end) => sum + end) / 2);
  return { at, op, ...given };
}

function begin(op, name, kind, choices, [low, high]) {
  if (kind === "choice") return choices[0];
  if (kind === "integer") return 1;
  if (kind === "vectors") return undefined; // of channels that are picked
  return name === "factor" ? 0 : rounded((low + 3 * high) / 4);
}

/** The edit with another operation: it keeps a stored direction where the operation takes one. */
function withOperation(edit, op, value, sources) {
  const direction = directionOf(edit);
  if (direction !== null && takesDirection(op)) return alongDirection(op, edit.at, direction, edit.units ?? "norm");
  return initial(op, edit.at, value, sources);
}

const rounded = (value) => Number(value.toPrecision(3));

function NumberOption({ op, option, edit, value, onGive }) {
  const [low, high] = ends(op, option.name, value, edit.units);
  const given = edit[option.name] ?? option.default;
  return html`
    <label>${option.name}
      <${Field} type="range" min=${low} max=${high} step=${(high - low) / STEPS || 1} value=${given ?? (low + high) / 2} aria-label="${option.name}, slider"
                onGive=${(text) => onGive(rounded(Number(text)))} />
      <${Field} type="number" step="any" value=${edit[option.name] ?? ""} aria-label=${option.name} placeholder=${option.default ?? (option.isRequired ? "" : "not set")}
                onGive=${(text) => onGive(text === "" ? undefined : Number(text))} />
    </label>`;
}

function Option({ op, option, edit, value, sources, onGive }) {
  const { name, kind, choices } = option;
  if (kind === "vectors") return directionOf(edit) && html`<span>${name} <strong>${directionOf(edit)}</strong></span>`; // otherwise the channels that are picked
  if (kind === "reference") return html`<${Reference} edit=${edit} option=${option} onGive=${onGive} />`;
  if (kind === "flag") {
    return html`<label><input type="checkbox" checked=${edit[name] ?? false} onChange=${(event) => onGive(event.target.checked || undefined)} /> ${name}</label>`;
  }
  if (kind === "choice") {
    return html`<label>${name} <select value=${edit[name] ?? option.default} onChange=${(event) => onGive(event.target.value)}>${choices.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>`;
  }
  if (kind === "source") {
    return html`<label>${name} <select value=${edit[name] ?? ""} onChange=${(event) => onGive(event.target.value || undefined)}>
      <option value="">this input</option>${sources.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>`;
  }
  if (kind === "text") return html`<label>${name} <${Field} value=${edit[name] ?? ""} onGive=${(text) => onGive(text.trim() || undefined)} /></label>`;
  if (kind === "integer") {
    return html`<label>${name} <${Field} type="number" step="1" value=${edit[name] ?? ""} placeholder=${option.default ?? ""} onGive=${(text) => onGive(text === "" ? undefined : Math.round(Number(text)))} /></label>`;
  }
  return html`<${NumberOption} op=${op} option=${option} edit=${edit} value=${value} onGive=${onGive} />`;
}

/**
 * @param edit as `edits.js` has it; @param value what is changed, for the ends of sliders; null where it is not shown
 * @param sources names of other inputs, from which values may come; @param tokens of a text, or null
 * @param Region the fields of the part that is changed; `tokens` are as it takes them
 */
export function EditForm({ edit, value, sources, tokens, onChange, Region = EditRegion }) {
  const isLast = value?.tensor.channelDim === -1;
  const give = ({ name, kind }) => (given) => {
    const { [name]: _, ...rest } = edit;
    const dimension = kind === "reference" && isLast ? { channel_dim: -1 } : {}; // a number for each channel
    onChange(given === undefined ? rest : { ...rest, [name]: given, ...dimension });
  };
  return html`
    <form class="edit" aria-label="Edit of ${edit.at}" onSubmit=${(event) => event.preventDefault()}>
      <label>Operation <select value=${edit.op} onChange=${(event) => onChange(withOperation(edit, event.target.value, value, sources))}>
        ${[...OPERATIONS.keys()].map((name) => html`<option key=${name}>${name}</option>`)}</select></label>
      ${optionsOfEdit(edit).map((option) => html`
        <${Option} key=${option.name} op=${edit.op} option=${option} edit=${edit} value=${value} sources=${sources} onGive=${give(option)} />`)}
      ${!isOfParameter(edit) && html`<${Region} edit=${edit} value=${value} tokens=${tokens} onChange=${onChange} />`}
      ${value && html`<span class="hint">values from ${range(value.tensor.values).map((end) => number(end)).join(" to ")}</span>`}
    </form>`;
}
