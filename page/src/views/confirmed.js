// A button that asks once more before it does something.
import { useState } from "preact/hooks";
import { html } from "../html.js";

export function Confirmed({ label, question, onConfirm, disabled = false }) {
  const [isAsked, setAsked] = useState(false);
  const confirm = () => {
    setAsked(false);
    onConfirm();
  };
  if (!isAsked) return html`<button disabled=${disabled} onClick=${() => setAsked(true)}>${label}</button>`;
  return html`
    <span class="confirmed" role="group" aria-label=${question}>${question}
      <button disabled=${disabled} onClick=${confirm}>Yes, ${label.toLowerCase()}</button>
      <button onClick=${() => setAsked(false)}>No</button></span>`;
}
