// What is shown, as code for a program or the command line.
import { useState } from "preact/hooks";
import { html } from "../html.js";
import { pythonCode, shellCommand } from "../code.js";
import { input, view } from "../state.js";

function CopyButton({ label, text }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<button class="copy" data-text=${text} onClick=${copy}>${isDone ? "Copied" : label}</button>`;
}

/** Buttons that copy a program and a command; either may be left out. */
export const Copies = ({ python, command }) => html`
  <p class="copies">
    ${python && html`<${CopyButton} label="Copy as Python" text=${python} />`}
    ${command && html`<${CopyButton} label="Copy as command" text=${command} />`}
  </p>`;

/** Buttons that copy code which collects the named values. */
export function Copy({ names }) {
  const given = { model: view.model.value, input: input.value, names };
  return html`<${Copies} python=${pythonCode(given)} command=${shellCommand(given)} />`;
}
