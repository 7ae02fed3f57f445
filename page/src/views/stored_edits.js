// Edits that the server keeps for the caller under a name: use, store and remove them.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import * as api from "../api.js";
import { wiredEdits } from "../edits.js";
import { html } from "../html.js";
import { options, view } from "../state.js";
import { during } from "../work.js";

/** `{model, edits}`: those of a model, in the server's order. */
const stored = signal({ model: "", edits: [] });

async function list() {
  const model = view.model.value;
  const reply = await during("Asking for stored edits", () => api.listEdits(model, options()));
  if (reply && view.model.value === model) stored.value = { model, edits: reply };
}

async function store(name, edits) {
  const { edits: messages, payloads } = wiredEdits(edits);
  const isDone = await during(`Storing ${name}`, async () => {
    await api.storeEdits(view.model.value, name, messages, payloads, options());
    return true;
  });
  if (isDone) await list();
}

async function remove(name) {
  const isDone = await during(`Removing ${name}`, async () => {
    await api.deleteEdits(view.model.value, name, options());
    return true;
  });
  if (isDone) await list();
}

/** @param edits those on the page, which can be stored; @param onUse gets a name */
export function StoredEdits({ edits, onUse }) {
  useEffect(() => { list(); }, [view.model.value]);
  const listed = stored.value.model === view.model.value ? stored.value.edits : [];
  const own = edits.filter((edit) => typeof edit !== "string");
  const send = (event) => {
    event.preventDefault();
    store(new FormData(event.target).get("name").trim(), own);
  };
  return html`
    <details class="stored"><summary>Stored edits (${listed.length})</summary>
      ${own.length > 0 && html`<form onSubmit=${send}><label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]{0,62}" /></label> <button type="submit">Store these edits</button></form>`}
      <ul>${listed.map(({ name, problem }) => html`
        <li key=${name}>${name} ${problem && html`<span class="hint">${problem}</span>`}
          <button onClick=${() => onUse(name)} aria-label="Use ${name}">Use</button>
          <button onClick=${() => remove(name)} aria-label="Remove ${name}">Remove</button></li>`)}</ul>
    </details>`;
}
