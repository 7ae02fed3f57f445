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

/** Buttons that copy a program and a command; either may be left out. `children` are more buttons. */
export const Copies = ({ python, command, children }) => html`
  <p class="copies">
    ${python && html`<${CopyButton} label="Copy as Python" text=${python} />`}
    ${command && html`<${CopyButton} label="Copy as command" text=${command} />`}
    ${children}
  </p>`;

/** Buttons that copy code of the given passes; see `pythonCode`. */
export const Copy = ({ passes, children }) =>
  html`<${Copies} python=${pythonCode(passes)} command=${shellCommand(passes)}>${children}</${Copies}>`;
