// Note: [Half-typed text]
// Preact writes `value` into an input whenever its component renders, which here happens when any pass ends. So a field
// whose text counts only when it is complete keeps what is typed until then as a state of its own.
import { useState } from "preact/hooks";
import { html } from "../html.js";

/**
 * An input whose text counts when it is complete: with Enter, when it is left, or when a slider is let go.
 * @param value the text that counts; @param onGive gets the next one; other properties are those of the element
 * @param as the element, for example `textarea`
 */
export function Field({ value, onGive, as = "input", ...properties }) {
  const [typed, setTyped] = useState(null);
  const forget = () => setTyped(null);
  const give = (event) => {
    forget();
    onGive(event.target.value);
  };
  return html`<${as} ...${properties} value=${typed ?? value} onInput=${(event) => setTyped(event.target.value)} onChange=${give} onBlur=${forget} />`;
}
