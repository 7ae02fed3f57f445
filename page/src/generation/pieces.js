// The tokens of a run as pieces of text to choose from, each in the colour of its number.
import { useRef } from "preact/hooks";
import { colourOf } from "../colours.js";
import { html, number } from "../html.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };

/** A token's text with what cannot be seen. */
export const visible = (text) => (/^ +$/.test(text) ? "␣".repeat(text.length) : text.replaceAll("\n", "↵").replaceAll("\t", "⇥"));

/** The tokens of a text as it has them, by where they start and end; as the vocabulary spells them where that is not known. */
export function textsOf({ tokens, starts, ends }, text) {
  const characters = Array.from(text); // code points
  return tokens.map((token, at) => visible(characters.slice(starts[at], ends[at]).join("")) || token);
}

/** What a generated token is called. */
export const nameOf = ({ tokenId, text, likely }) =>
  visible(text || likely.find((one) => one.tokenId === tokenId)?.text || "") || `#${tokenId}`;

/**
 * All tokens of a run, `{position, text, token}` each; `token` is null for those of the prompt.
 * @param promptTexts texts of the prompt's tokens, or null
 */
export const piecesOf = ({ promptIds, tokens }, promptTexts) => [
  ...promptIds.map((id, position) => ({ position, text: promptTexts?.length === promptIds.length ? promptTexts[position] : `#${id}`, token: null })),
  ...tokens.map((token) => ({ position: token.position, text: nameOf(token), token })),
];

function tooltip({ position, token }, value) {
  const likely = token?.likely.slice(0, 3).map((one) => `${visible(one.text)} ${number(one.logprob, 3)}`) ?? [];
  return [`position ${position}`, token && `logprob ${number(token.logprob)}`, likely.length && `likely: ${likely.join(", ")}`,
    value !== null && value !== token?.logprob && number(value)].filter(Boolean).join("; ");
}

function Piece({ piece, value, below, limits, isChosen, isStop, differs, onChoose, onLook }) {
  const { background, text } = value === null ? {} : colourOf(value, limits);
  const look = () => onLook(piece.position);
  const leave = () => onLook(null);
  return html`
    <button class="piece ${piece.token ? "" : "given"} ${differs ? "differs" : ""}" style=${{ background, color: text }} title=${tooltip(piece, value)}
            tabindex=${isStop ? 0 : -1} aria-pressed=${String(isChosen)} data-position=${piece.position}
            onClick=${() => onChoose(piece.position)} onMouseEnter=${look} onMouseLeave=${leave} onFocus=${look} onBlur=${leave}>${piece.text}${below !== null && html`<small>${below}</small>`}</button>`;
}

/**
 * @param pieces as of `piecesOf`; @param valueOf the number of a position, or null; @param belowOf a short text for it, or null
 * @param chosen a position, or null; @param differing the position where this run begins to differ from another, or null
 * @param onChoose, onLook get a position; `onLook` null when it is left
 */
export function Pieces({ label, pieces, valueOf, belowOf, limits, chosen, differing, onChoose, onLook }) {
  const group = useRef(null);
  const stop = chosen ?? pieces.find(({ token }) => token)?.position ?? 0;
  const move = (event) => {
    const step = STEPS[event.key];
    const all = [...group.current.children];
    const at = all.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    all[Math.min(all.length - 1, Math.max(0, at + step))].focus();
  };
  return html`
    <div ref=${group} class="pieces" role="toolbar" aria-label=${label} onKeyDown=${move}>
      ${pieces.map((piece) => html`
        <${Piece} key=${piece.position} piece=${piece} value=${valueOf(piece.position)} below=${belowOf(piece.position)} limits=${limits} isStop=${piece.position === stop}
          isChosen=${piece.position === chosen} differs=${piece.position === differing} onChoose=${onChoose} onLook=${onLook} />`)}
    </div>`;
}
