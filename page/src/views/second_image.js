// A second image of the user's own, to compare with or to take values from.
import { html } from "../html.js";
import { imageInput, second } from "../state.js";

async function take(files) {
  const [file] = files ?? [];
  if (!file) return;
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (second.value) URL.revokeObjectURL(second.value.url);
  second.value = imageInput(bytes, file.name);
}

export function SecondImage({ label }) {
  return html`
    <label class="drop small" onDragOver=${(event) => event.preventDefault()}
           onDrop=${(event) => { event.preventDefault(); take(event.dataTransfer.files); }}>
      ${second.value ? html`<img src=${second.value.url} alt="The second image, ${second.value.name}" />` : html`<span>${label}: drop it here, or choose one</span>`}
      <input type="file" accept="image/*" class="hidden" aria-label=${label} onChange=${(event) => take(event.target.files)} />
    </label>`;
}
