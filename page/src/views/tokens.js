// The tokens of a text, each in the colour of its value.
import { colourOf } from "../colours.js";
import { html, number } from "../html.js";

export function Tokens({ tokens, values, limits }) {
  return html`
    <ol class="tokens" aria-label="Tokens">
      ${tokens.map((token, at) => {
        const { background, text } = colourOf(values[at], limits);
        return html`<li key=${at} style=${{ background, color: text }} title="${at}: ${number(values[at])}"><span>${token}</span><small>${number(values[at], 2)}</small></li>`;
      })}
    </ol>`;
}
