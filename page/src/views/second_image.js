// A second image of the user's own, to compare with or to take values from.
import { html } from "../html.js";
import { imageInput, second } from "../state.js";
import { Latest } from "../work.js";

const reading = new Latest();

async function take(files) {
  const [file] = files ?? [];
  const content = file && await reading.start("Reading the second image", () => file.arrayBuffer());
  if (!content) return;
  if (second.value) URL.revokeObjectURL(second.value.url);
  second.value = imageInput(new Uint8Array(content), file.name);
}

export function SecondImage({ label }) {
  return html`
    <label class="drop small" onDragOver=${(event) => event.preventDefault()}
           onDrop=${(event) => { event.preventDefault(); take(event.dataTransfer.files); }}>
      ${second.value ? html`<img src=${second.value.url} alt="The second image, ${second.value.name}" />` : html`<span>${label}: drop it here, or choose one</span>`}
      <input type="file" accept="image/*" class="hidden" aria-label=${label} onChange=${(event) => take(event.target.files)} />
    </label>`;
}
