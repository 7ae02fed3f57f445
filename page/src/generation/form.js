// What is generated: the prompt, how tokens are chosen, and when the text ends.
import { html } from "../html.js";
import { Field } from "../views/field.js";
import { INITIAL, NUMBERS } from "./options.js";
import { READINGS, readingOf } from "./reading.js";

function NumberField({ name, chosen }) {
  const { label, low, isWhole } = NUMBERS[name];
  return html`<label>${label} <${Field} type="number" class="short" min=${low} step=${isWhole ? 1 : "any"} value=${chosen[name].value} placeholder=${INITIAL[name]}
    onGive=${(text) => { chosen[name].value = text; }} /></label>`;
}

/**
 * @param chosen signals of the texts, by their names in `INITIAL`; @param module the path of the chosen one
 * @param isReady whether a run can begin; @param isRunning whether one has
 * @param onPrompt gets a prompt that is complete; @param onRun starts a run of a prompt; @param onStop ends it
 */
export function Form({ prompt, chosen, module, isReady, isRunning, onPrompt, onRun, onStop }) {
  const send = (event) => {
    event.preventDefault();
    onRun(new FormData(event.target).get("prompt"));
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    event.target.form.requestSubmit();
  };
  return html`
    <form class="generate" onSubmit=${send} noValidate>
      <label>Prompt <${Field} as="textarea" name="prompt" rows="3" value=${prompt} placeholder="Type a text; Ctrl+Enter runs it" onGive=${onPrompt} onKeyDown=${onKeyDown} /></label>
      <div class="controls">${Object.keys(NUMBERS).map((name) => html`<${NumberField} key=${name} name=${name} chosen=${chosen} />`)}</div>
      <div class="controls">
        <label>Stop at, one text in each line <${Field} as="textarea" rows="1" value=${chosen.stop.value} placeholder="\\n is the end of a line" onGive=${(text) => { chosen.stop.value = text; }} /></label>
        <label><input type="checkbox" checked=${chosen.ends.value === "ignored"} onChange=${(event) => { chosen.ends.value = event.target.checked ? "ignored" : ""; }} /> let no token end the text</label>
        ${module && html`<label>Read at ${module} <select value=${readingOf(chosen.read.value)} onChange=${(event) => { chosen.read.value = event.target.value; }}>
          ${Object.entries(READINGS).map(([name, label]) => html`<option key=${name} value=${name}>${label}</option>`)}</select></label>`}
      </div>
      <div class="controls"><button type="submit" class="run" disabled=${isRunning || !isReady}>Run</button>
        <button type="button" disabled=${!isRunning} onClick=${onStop}>Stop</button></div>
    </form>`;
}
