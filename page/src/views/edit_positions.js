// The positions of a text at which an edit acts while text is generated: of the prompt, and of generated tokens.
import { isOfParameter } from "../edits.js";
import { html } from "../html.js";
import { positionsOf } from "./edit_region.js";
import { Field } from "./field.js";

const ALL = "all";
const RANGE = /^(-?\d+)?:(-?\d+)?$/;
const PARTS = { prompt: "the prompt", generated: "generated tokens" };

const partText = (part) => (Array.isArray(part) ? part.join(", ") : part);

/** Positions in words. */
export const textOfPositions = (positions) =>
  Object.entries(positions).map(([name, part]) => `${name} ${partText(part)}`).join(", ");

/** Positions with another part; undefined, which is everywhere, where nothing is left or nothing is left out. */
function withPart(positions, name, part) {
  const { [name]: _, ...others } = positions ?? {};
  const next = { ...others, ...(part === null || part.length === 0 ? {} : { [name]: part }) };
  const isEverywhere = next.prompt === ALL && next.generated === ALL;
  return isEverywhere || !Object.keys(next).length ? undefined : next;
}

/** Positions with one more, or without it; of everywhere that one alone. */
export function withToggled(positions, name, at) {
  const own = positions?.[name];
  if (!Array.isArray(own)) return withPart(positions, name, [at]);
  return withPart(positions, name, own.includes(at) ? own.filter((one) => one !== at) : [...own, at].sort((a, b) => a - b));
}

function readPart(text) {
  const word = text.trim().replaceAll(/\s*:\s*/g, ":");
  if (word === ALL || (RANGE.test(word) && word !== ":")) return word;
  return word === ":" ? ALL : positionsOf(word);
}

function Part({ name, positions, tokens, onGive }) {
  const own = positions === undefined ? ALL : positions[name] ?? [];
  const toggleAll = () => {
    if (positions === undefined) return onGive({ [name]: ALL });
    return onGive(withPart(positions, name, own === ALL ? null : ALL));
  };
  return html`
    <div class="positions"><span>only positions of ${PARTS[name]}</span>
      <button type="button" aria-pressed=${String(own === ALL)} onClick=${toggleAll} aria-label="All of ${PARTS[name]}">all</button>
      <${Field} class="short" value=${own === ALL ? "" : partText(own)} placeholder=${own === ALL ? "all" : "none"} aria-label="Positions of ${PARTS[name]}"
                onGive=${(text) => onGive(withPart(positions, name, readPart(text)))} />
      <div class="tokens" role="group" aria-label="Only these of ${PARTS[name]}">
        ${tokens.map((token, at) => html`<button key=${at} type="button" aria-pressed=${String(Array.isArray(own) && own.includes(at))}
          title="position ${at} of ${PARTS[name]}" onClick=${() => onGive(withToggled(positions, name, at))}>${token}</button>`)}</div></div>`;
}

/** @param tokens texts of the tokens `{prompt, generated}`; @param onChange gets the edit with other positions */
export function EditPositions({ edit, tokens, onChange }) {
  if (isOfParameter(edit)) return null;
  const give = (positions) => {
    const { positions: _, ...rest } = edit;
    onChange(positions === undefined ? rest : { ...rest, positions });
  };
  return html`${Object.keys(PARTS).map((name) => html`
    <${Part} key=${name} name=${name} positions=${edit.positions} tokens=${tokens[name]} onGive=${give} />`)}`;
}
