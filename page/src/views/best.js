// The best classes of one pass, or of two beside each other.
import { html, number } from "../html.js";

export function Best({ classes, label = "Best classes" }) {
  if (!classes.length) return null;
  return html`
    <table class="best" aria-label=${label}>
      <tbody>${classes.map(([index, name, score]) => html`
        <tr key=${index}><th scope="row">${name}</th><td><meter min="0" max="1" value=${score} aria-label=${name}></meter></td><td>${number(score, 3)}</td></tr>`)}
      </tbody>
    </table>`;
}

/** What became of the best classes: `before` and `after` are all scores, by class. */
export function BestChange({ before, after, nameOf }) {
  if (!before || !after || before.length !== after.length) return null;
  const rank = (scores) => [...scores.keys()].sort((a, b) => scores[b] - scores[a]).slice(0, 5);
  const shown = [...new Set([...rank(before), ...rank(after)])];
  return html`
    <table class="best change" aria-label="Best classes before and after">
      <thead><tr><th scope="col">class</th><th scope="col">before</th><th scope="col">after</th><th scope="col">change</th></tr></thead>
      <tbody>${shown.map((index) => html`
        <tr key=${index}><th scope="row">${nameOf(index)}</th><td>${number(before[index], 3)}</td><td>${number(after[index], 3)}</td>
          <td class=${after[index] < before[index] ? "less" : "more-of"}>${after[index] > before[index] ? "+" : ""}${number(after[index] - before[index], 3)}</td></tr>`)}
      </tbody>
    </table>`;
}
