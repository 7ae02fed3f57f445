// What is shown, as code for a program or the command line.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "../html.js";
import { pythonCode, shellCommand } from "../code.js";

const DONE_MS = 2000;

/** Whether the browser let the page copy. It does not on a page without TLS that is not on this machine. */
async function isCopied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** The text, selected, for the user to copy. */
function Selected({ label, text }) {
  const area = useRef(null);
  useLayoutEffect(() => area.current.select(), [text]);
  return html`<textarea ref=${area} class="selected" readonly rows="6" aria-label="${label}: press Ctrl+C or ⌘C">${text}</textarea>
    <small class="hint">The browser lets this page copy nothing (it has no TLS): press Ctrl+C or ⌘C.</small>`;
}

function CopyButton({ label, text }) {
  const [state, setState] = useState("");
  const copy = async () => {
    if (!(await isCopied(text))) return setState(state === "refused" ? "" : "refused");
    setState("done");
    return setTimeout(() => setState(""), DONE_MS);
  };
  return html`
    <button class="copy" data-text=${text} onClick=${copy}>${state === "done" ? "Copied" : label}</button>
    ${state === "refused" && html`<${Selected} label=${label} text=${text} />`}`;
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
