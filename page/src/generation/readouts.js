// Directions that a run reads at each of its tokens, as a link has them: `[{"name": "warm", "at": "model.layers.1"}]`.
import { python } from "../code.js";
import { isDirectionName } from "../edits.js";
import { html } from "../html.js";

const isReadout = (one) => isDirectionName(one?.name) && typeof one.at === "string";

/** What the panel's part of the address has; `chosen` has the signal `readouts`, JSON. */
export function readoutsIn(chosen) {
  try {
    const readouts = JSON.parse(chosen.readouts.value);
    return Array.isArray(readouts) ? readouts.filter(isReadout).reduce(withReadout, []) : [];
  } catch {
    return []; // an address that was cut off
  }
}

/** The name of what a direction reads. */
export const valueName = ({ name, at }) => `${at}:${name}`;

/** Readouts with one more, which is there once. */
export const withReadout = (readouts, { name, at }) => [...readouts.filter((one) => valueName(one) !== valueName({ name, at })), { name, at }];

export const readoutTaps = (readouts) =>
  readouts.map(({ name, at }) => ({ selector: at, reductions: [{ kind: { case: "readout", value: { name } } }] }));

export const readoutPython = ({ name, at }) => `trocar.readout(${python(name)}, ${python(at)})`;

/** @param onChange gets the readouts without one */
export const ReadoutList = ({ readouts, onChange }) => html`
  <ol class="edits" aria-label="Directions that are read">
    ${readouts.map((one) => html`
      <li key=${valueName(one)}><span>read ${one.name} at ${one.at}</span>
        <button aria-label="Remove ${one.name} at ${one.at}" onClick=${() => onChange(readouts.filter((other) => other !== one))}>×</button></li>`)}
  </ol>`;
