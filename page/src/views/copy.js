// What is shown, as code for a program or the command line.
import { useState } from "preact/hooks";
import { html } from "../html.js";
import { pythonCode, shellCommand } from "../code.js";

function CopyButton({ label, text }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<button class="copy" data-text=${text} onClick=${copy}>${isDone ? "Copied" : label}</button>`;
}

/** Buttons that copy code of the given passes; see `pythonCode`. `children` are more buttons. */
export function Copy({ passes, children }) {
  return html`
    <p class="copies">
      <${CopyButton} label="Copy as Python" text=${pythonCode(passes)} />
      <${CopyButton} label="Copy as command" text=${shellCommand(passes)} />
      ${children}
    </p>`;
}
