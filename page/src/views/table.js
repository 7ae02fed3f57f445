// A table of rows that are alike. On a narrow screen each row is a card, its cells labelled; roles say that it is still
// a table, which browsers forget of elements that are laid out in another way.
import { html } from "../html.js";

/**
 * @param label what the table has, for screen readers
 * @param columns of each `title`, `cell(row)`, and `isNumber`; the first column names the row
 * @param rows any values
 * @param keyOf what tells rows apart
 */
export function Table({ label, columns, rows, keyOf }) {
  const [first, ...others] = columns;
  const align = (column) => (column.isNumber ? "number" : "");
  return html`
    <div class="scrolled" tabindex="0" role="region" aria-label=${label}><table class="table ${columns.length > 2 ? "folding" : ""}" role="table" aria-label=${label}>
      <thead role="rowgroup"><tr role="row">${columns.map((one) => html`<th key=${one.title} scope="col" role="columnheader" class=${align(one)}>${one.title}</th>`)}</tr></thead>
      <tbody role="rowgroup">${rows.map((row) => html`
        <tr key=${keyOf(row)} role="row"><th scope="row" role="rowheader">${first.cell(row)}</th>
          ${others.map((one) => html`<td key=${one.title} role="cell" data-title=${one.title} class=${align(one)}>${one.cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}
