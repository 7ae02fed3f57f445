// The edits of a panel, in order: which there are, which one the form shows, and the list to choose from.
import { directionOf, isKnown, isOfParameter, OPERATIONS } from "../edits.js";
import { html } from "../html.js";
import { pickedOf } from "./edit_channels.js";
import { textOfPositions } from "./edit_positions.js";
import { rangesOf } from "./edit_region.js";

function read(text) {
  try {
    const edits = JSON.parse(text);
    return Array.isArray(edits) ? edits.filter(isKnown) : [];
  } catch {
    return []; // an address that was cut off
  }
}

/**
 * The edits that a panel's part of the address has.
 * @param chosen signals `edits`, JSON, and `at`, the index of the one in the form
 * @returns `edits`; `at` and `edit`, the one in the form, null for stored ones; `add`, `replace` that one, `remove` by index
 */
export function editsIn(chosen) {
  const edits = read(chosen.edits.value);
  const at = Math.min(Number(chosen.at.value) || 0, edits.length - 1);
  const write = (others) => { chosen.edits.value = JSON.stringify(others); };
  return {
    edits, at, edit: typeof edits[at] === "string" ? null : edits[at] ?? null,
    add(added) {
      write([...edits, added]);
      chosen.at.value = String(edits.length);
    },
    replace: (changed) => write(edits.map((one, index) => (index === at ? changed : one))),
    remove(index) {
      write(edits.filter((_, other) => other !== index));
      chosen.at.value = "0";
    },
  };
}

/** Whether an edit can run: a direction needs its channels or its name, and a swap a value. */
export function isComplete(edit) {
  if (typeof edit === "string") return true;
  if (edit.op === "swap") return Boolean(edit.source || edit.from);
  return OPERATIONS.get(edit.op).options.every((one) => one.kind !== "vectors" || edit[one.name]?.length);
}

/** An edit in words. */
export function textOf(edit) {
  if (typeof edit === "string") return `stored: ${edit}`;
  const values = OPERATIONS.get(edit.op).options.filter(({ name, kind }) => !["vectors", "reference"].includes(kind) && edit[name] !== undefined)
    .map(({ name }) => `${name} ${edit[name]}`);
  const [rows, columns] = rangesOf(edit);
  const part = [edit.tokens && `tokens ${edit.tokens.join(", ")}`, edit.positions && textOfPositions(edit.positions),
    rows && `rows ${rows}`, columns && `columns ${columns}`].filter(Boolean);
  const indices = pickedOf(edit);
  const where = indices.length ? [`${isOfParameter(edit) ? "rows" : "channels"} ${indices.slice(0, 6).join(", ")}${indices.length > 6 ? ", …" : ""}`] : [];
  return [`${edit.at} ${edit.op}${directionOf(edit) ? ` ${directionOf(edit)}` : ""}`, ...values, ...where, ...part].join(", ");
}

/** @param chosen as of `editsIn` */
export function EditList({ chosen }) {
  const { edits, at, remove } = editsIn(chosen);
  return html`
    <ol class="edits" aria-label="Edits, in order">
      ${edits.map((edit, index) => html`
        <li key=${index}>
          <button aria-pressed=${String(index === at)} onClick=${() => { chosen.at.value = String(index); }}>${textOf(edit)}</button>
          <button aria-label="Remove edit ${index + 1}" onClick=${() => remove(index)}>×</button>
        </li>`)}
    </ol>`;
}
