// One token of a run: how likely it was, what else was likely, and what was read at its position.
import { html, number } from "../html.js";
import { Table } from "../views/table.js";
import { measuresAt, readingsAt } from "./colouring.js";
import { visible } from "./pieces.js";

const share = (logprob) => `${number(100 * Math.exp(logprob), 3)} %`;

/** Likely tokens, most likely first; the one with `chosenId` is marked. */
function Likely({ label, likely, chosenId }) {
  const columns = [
    { title: "token", cell: (one) => html`<span class="word">${visible(one.text) || `#${one.tokenId}`}</span>${one.tokenId === chosenId ? " (chosen)" : ""}` },
    { title: "probability", isNumber: true, cell: (one) => share(one.logprob) },
  ];
  return html`<div><h4>${label}</h4><${Table} label=${label} columns=${columns} rows=${likely} keyOf=${(one) => one.tokenId} /></div>`;
}

/**
 * @param piece as of `piecesOf`; @param run what it is of; @param title which of two runs that is, or empty
 * @param children buttons
 */
export function Details({ piece: { position, text, token }, run, title, children }) {
  const lens = run.lens?.rows.get(position);
  const ordinal = position - run.promptIds.length;
  const facts = [
    ...measuresAt(run, position).map(({ name, norm, mean }) => ({ name, text: `norm ${number(norm)}, mean ${number(mean)}` })),
    ...readingsAt(run, position).map(({ name, values }) => ({ name, text: `reads ${values.map((value) => number(value, 6)).join(", ")}` })),
  ];
  return html`
    <section class="details" aria-label="Token at position ${position}">
      <h3><span class="word">${text}</span> <small>${title}${token ? `generated token ${ordinal}` : `token ${position} of the prompt`}, position ${position}, id ${token?.tokenId ?? run.promptIds[position]}${
        token ? `, logprob ${number(token.logprob, 6)} (${share(token.logprob)})` : ""}</small></h3>
      ${children}
      <div class="side-by-side">
        ${token?.likely.length > 0 && html`<${Likely} label="Likely here" likely=${token.likely} chosenId=${token.tokenId} />`}
        ${lens && html`<${Likely} label="After it ${run.lens.selector} would say" likely=${lens} chosenId=${run.tokens[ordinal + 1]?.tokenId} />`}
      </div>
      ${facts.length > 0 && html`<dl class="statistics">${facts.map((one) => html`
        <div key=${one.name}><dt>${one.name}</dt><dd>${one.text}</dd></div>`)}</dl>`}
    </section>`;
}
