// The input: a picture that is dropped or chosen, a sample, or a text; and what the model says of it.
import { html, number } from "../html.js";
import { best, current, input, SAMPLES, takesImages, takesText, useFile, useSample, useText, view } from "../state.js";
import { Best } from "./best.js";

const take = (files) => useFile(files?.[0]);

function ImageInput() {
  return html`
    <label class="drop" onDragOver=${(event) => event.preventDefault()}
           onDrop=${(event) => { event.preventDefault(); take(event.dataTransfer.files); }}>
      ${input.value?.kind === "image"
        ? html`<img src=${input.value.url} alt="The input, ${input.value.name}" />`
        : html`<span>Drop an image here, or choose one</span>`}
      <input type="file" accept="image/*" class="hidden" aria-label="Choose an image" onChange=${(event) => take(event.target.files)} />
    </label>
    <div class="samples" role="group" aria-label="Samples">
      ${SAMPLES.map((name) => html`
        <button key=${name} aria-pressed=${String(view.sample.value === name)} onClick=${() => useSample(name)}>
          <img src="/${name}.jpg" alt="" />${name}
        </button>`)}
    </div>`;
}

function TextInput() {
  const send = (event) => {
    event.preventDefault();
    const text = new FormData(event.target).get("text").trim();
    if (text) useText(text);
  };
  return html`
    <form onSubmit=${send}>
      <textarea name="text" rows="3" aria-label="Text" placeholder="Type a text">${view.text.value}</textarea>
      <button type="submit">Run</button>
    </form>`;
}

export function Input() {
  const timing = current.value?.timing;
  return html`
    <section class="input" aria-label="Input">
      ${takesImages.value && html`<${ImageInput} />`}
      ${takesText.value && html`<${TextInput} />`}
      <${Best} classes=${best.value} />
      ${timing && html`<p class="hint">${current.value.model}: ${number(timing.computeS * 1000, 3)} ms on the server</p>`}
    </section>`;
}
