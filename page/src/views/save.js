// The shown values as a file.
import { html } from "../html.js";
import { npy, save } from "../npy.js";

/** A button that saves a tensor as `name.npy`. */
export function Save({ tensor, name, label = "Save as .npy" }) {
  const file = `${name.replaceAll(/[^\w.@-]+/g, "_")}.npy`;
  return html`<button class="save" onClick=${() => save(npy(tensor), file)}>${label}</button>`;
}

/** A button that saves facts as `name`, a file of JSON; `make` returns them. */
export const SaveFacts = ({ make, name }) => html`
  <button class="save" onClick=${() => save(new Blob([JSON.stringify(make(), null, 1)]), name)}>Save as ${name}</button>`;
