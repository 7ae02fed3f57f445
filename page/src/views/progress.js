// What is under way.
import { html } from "../html.js";
import { working } from "../work.js";

/** The work that the page waits for, below the tabs. */
export function Working() {
  return html`<div class="status" role="status">${working.value && html`<progress aria-label=${working.value}></progress> ${working.value}`}</div>`;
}

/** A share of something long: `done` of `count`, with a text. */
export function Progress({ label, done, count }) {
  return html`<p class="progress"><progress aria-label=${label} value=${done} max=${count}></progress> ${label}: ${done} of ${count}</p>`;
}
