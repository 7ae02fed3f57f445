// A table of rows that are alike.
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
    <div class="scrolled" tabindex="0" role="region" aria-label=${label}><table class="table" aria-label=${label}>
      <thead><tr>${columns.map((one) => html`<th key=${one.title} scope="col" class=${align(one)}>${one.title}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`
        <tr key=${keyOf(row)}><th scope="row">${first.cell(row)}</th>
          ${others.map((one) => html`<td key=${one.title} class=${align(one)}>${one.cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}
