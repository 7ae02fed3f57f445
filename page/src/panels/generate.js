// Generate: the text that follows a prompt, token by token, with what is read and changed at each of them.
import { computed, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { parameters } from "../address.js";
import * as api from "../api.js";
import { wiredEdits } from "../edits.js";
import { runCommand, runPython } from "../generation/code.js";
import { colouringOf, colouringsOf, limitsOf } from "../generation/colouring.js";
import { Details } from "../generation/details.js";
import { Form } from "../generation/form.js";
import { INITIAL, optionsOf, wiredOptions } from "../generation/options.js";
import { Pieces, piecesOf, textsOf, visible } from "../generation/pieces.js";
import { LENS_TOKENS, readingOf, tapsOf } from "../generation/reading.js";
import { ReadoutList, readoutsIn, readoutTaps, valueName, withReadout } from "../generation/readouts.js";
import { firstDifference, Run, tensorOf } from "../generation/run.js";
import { html, number } from "../html.js";
import { collected, current, isDescribed, model, module, options, useText, view } from "../state.js";
import { Copies } from "../views/copy.js";
import { ChannelPicker, withChannels } from "../views/edit_channels.js";
import { EditForm } from "../views/edit_form.js";
import { EditList, editsIn, isComplete, textOf } from "../views/edit_list.js";
import { EditPlace, useEditedValue } from "../views/edit_place.js";
import { EditPositions, withToggled } from "../views/edit_positions.js";
import { Save } from "../views/save.js";
import { StoredDirections } from "../views/stored_directions.js";
import { StoredEdits } from "../views/stored_edits.js";
import { Table } from "../views/table.js";
import { Latest } from "../work.js";

const DRAW_MS = 60;
const SIDES = { before: "without edits", after: "with edits" };

const chosen = parameters("generate", { ...INITIAL, edits: "[]", readouts: "[]", at: "0", place: "", order: "strongest", scale: "common" });
/** `{asked, promptTexts, runs}`: what was asked, and by side what came of it so far; null without a run. */
const result = signal(null);
const isRunning = signal(false);
/** `{side, position}` of the token that was clicked, and of the one under the pointer or focus; null without one. */
const pinned = signal(null);
const looked = signal(null);
const work = new Latest();

/** Texts of the tokens of the shared input; null where it is another text. */
const promptTexts = (prompt) => {
  const sample = current.value?.input.text === prompt ? current.value.processed[0]?.samples[0] : null;
  return sample ? textsOf(sample, prompt) : null;
};

const isOfModel = computed(() => (result.value?.asked.model === view.model.value ? result.value : null));

const usePrompt = async (prompt) => { if (prompt && prompt !== view.text.value) await useText(prompt); };

const textsOfForm = () => Object.fromEntries(Object.keys(INITIAL).filter((name) => name !== "colour").map((name) => [name, chosen[name].value]));

/** What is chosen beside the prompt: of another choice, a run is marked. */
const keyOf = (prompt) => JSON.stringify([prompt, textsOfForm(), chosen.edits.value, chosen.readouts.value, view.module.value, view.port.value]);

/**
 * What the form asks for.
 * @throws RangeError where it is not complete
 */
function question(prompt) {
  if (!prompt) throw new RangeError("Type a prompt: the text that is continued.");
  return {
    model: view.model.value, prompt, options: optionsOf(textsOfForm()), edits: editsIn(chosen).edits.filter(isComplete),
    taps: tapsOf(module.value, view.port.value, readingOf(chosen.read.value)), readouts: readoutsIn(chosen), key: keyOf(prompt),
  };
}

/** Makes one run; what came so far is shown as it comes. */
async function follow(side, asked, own) {
  const { model: modelId, prompt, options: sampling, edits, taps, readouts } = asked;
  const run = new Run(readouts.map(valueName));
  const show = () => { // unless another run was started meanwhile
    if (result.value.asked === asked) result.value = { ...result.value, runs: { ...result.value.runs, [side]: run.shown } };
  };
  const drawing = setInterval(show, DRAW_MS);
  try {
    const request = { taps: [...taps, ...readoutTaps(readouts)], ...wiredEdits(side === "after" ? edits : []) };
    for await (const message of api.generate(modelId, prompt, request, wiredOptions(sampling), own)) run.add(message);
  } catch (error) {
    run.end ||= error.name === "AbortError" ? "stopped" : error.code ?? error.name;
    throw error;
  } finally {
    clearInterval(drawing);
    show();
  }
}

async function run(prompt) {
  if (!isDescribed.value) return; // the chosen module is one of the tree
  isRunning.value = true;
  await work.start(`Generating with ${view.model.value}`, async (signal) => {
    const asked = question(prompt);
    await usePrompt(prompt); // its tokens
    if (signal.aborted) return;
    pinned.value = looked.value = null;
    result.value = { asked, promptTexts: promptTexts(prompt), runs: {} };
    for (const side of asked.edits.length ? ["before", "after"] : ["before"]) await follow(side, asked, options(signal));
  });
  isRunning.value = work.isRunning;
}

function stop() {
  work.stop();
  isRunning.value = false;
}

/** How a run ended, for people. */
const endOf = ({ end, tokens, heldText }) => [`${tokens.length} tokens`, end && `end: ${end}`, heldText && `rest of the text: ${heldText}`].filter(Boolean).join("; ");

function Side({ side, run, shown, limits, differing }) {
  const name = colouringOf(chosen.colour.value, run);
  const { of: colour } = colouringsOf([run])[name];
  const lensOf = (position) => {
    const likely = run.lens?.rows.get(position)?.[0];
    return likely ? visible(likely.text) || `#${likely.tokenId}` : null;
  };
  const title = shown.asked.edits.length ? SIDES[side] : "";
  return html`
    <section aria-label=${`Generated ${title}`.trim()} data-side=${side}>
      ${title && html`<h3>${title[0].toUpperCase()}${title.slice(1)}</h3>`}
      <${Pieces} label=${`Tokens ${title}`.trim()} pieces=${piecesOf(run, shown.promptTexts)} limits=${limits} differing=${differing}
        valueOf=${(position) => colour(run, position)} belowOf=${name === "lens" ? lensOf : () => null}
        chosen=${pinned.value?.side === side ? pinned.value.position : null}
        onChoose=${(position) => { pinned.value = { side, position }; }} onLook=${(position) => { looked.value = position === null ? null : { side, position }; }} />
      <p class="hint end" role="status" aria-busy=${String(!run.end)}>${endOf(run)}</p>
    </section>`;
}

function Colours({ runs, limits, name }) {
  return html`
    <div class="controls"><label>Colour <select aria-label="Colour of tokens" value=${name} onChange=${(event) => { chosen.colour.value = event.target.value; }}>
      ${Object.entries(colouringsOf(runs)).map(([key, { label }]) => html`<option key=${key} value=${key}>${label}</option>`)}</select></label>
      <span class="hint">${number(limits[0])} <span class="scale" aria-hidden="true"></span> ${number(limits[1])}</span></div>`;
}

function Difference({ before, after, at }) {
  const word = (run) => (run.tokens[at] ? `${piecesOf(run, null)[run.promptIds.length + at].text}` : "the end");
  if (at === null) return html`<p class="hint" role="status">${before.end && after.end ? "Both runs have the same tokens." : "No token differs so far."}</p>`;
  return html`<p class="hint" role="status">The first token that differs is generated token ${at}: <span class="word">${word(after)}</span> instead of <span class="word">${word(before)}</span>.</p>`;
}

const COUNTS = [
  { title: "edit", cell: ({ edit }) => textOf(edit) },
  { title: "positions of the prompt", isNumber: true, cell: ({ count }) => Number(count.prompt) },
  { title: "of generated tokens", isNumber: true, cell: ({ count }) => Number(count.generated) },
];

/** Counts of edits; stored ones are several, whose names only the server knows. */
function Counts({ edits, counts }) {
  const rows = counts.map((count, at) => ({ at, count, edit: counts.length === edits.length ? edits[at] : `edit ${at + 1}` }));
  return rows.length > 0 && html`<${Table} label="Positions at which edits were applied" columns=${COUNTS} rows=${rows} keyOf=${({ at }) => at} />`;
}

/** Buttons that edit at the token of the details. */
function EditHere({ position, promptCount }) {
  const { edit, at, add, replace } = editsIn(chosen);
  const place = collected.value[0]?.map.name;
  const [part, own] = position < promptCount ? ["prompt", position] : ["generated", position - promptCount];
  const toggle = () => {
    const { positions, ...rest } = edit;
    const next = withToggled(positions, part, own);
    replace(next ? { ...rest, positions: next } : rest);
  };
  const isIn = Array.isArray(edit?.positions?.[part]) && edit.positions[part].includes(own);
  return html`<p class="copies">
    ${place && html`<button onClick=${() => add({ at: place, op: "scale", factor: 0, positions: { [part]: [own] } })}>Edit ${place} at this token</button>`}
    ${edit && html`<button onClick=${toggle} aria-pressed=${String(isIn)}>Edit ${at + 1} acts here</button>`}</p>`;
}

function Token({ shown }) {
  const { side, position } = looked.value ?? pinned.value ?? {};
  const of = shown.runs[side];
  const piece = of && piecesOf(of, shown.promptTexts)[position];
  if (!piece) return html`<p class="hint">Click a token, or move to it with the arrow keys, to see how likely it was.</p>`;
  return html`<${Details} piece=${piece} run=${of} title=${shown.asked.edits.length ? `${SIDES[side]}: ` : ""}>
    <${EditHere} position=${position} promptCount=${of.promptIds.length} /><//>`;
}

function Shown({ shown }) {
  const { asked, runs } = shown;
  const all = Object.values(runs);
  if (!all.length) return null;
  const [first] = all;
  const name = colouringOf(chosen.colour.value, first);
  const limits = limitsOf(name, all);
  const at = runs.after ? firstDifference(runs.before, runs.after) : null;
  const last = runs.after ?? runs.before;
  const values = [...last.read.values()];
  const lens = first.lens && { selector: first.lens.selector, top: LENS_TOKENS };
  const code = [asked, values.map((one) => one.name), lens];
  const isNamed = values.length > 0 || !asked.taps.length; // selectors are those that the server names
  return html`
    <section aria-label="Generated text">
      ${isNamed && html`<${Copies} python=${runPython(...code)} command=${runCommand(...code)}>
        ${[...values, ...last.readouts.values()].map((one) => html`<${Save} key=${one.name} name=${one.name} tensor=${tensorOf(one)} label="Save ${one.name} as .npy" />`)}<//>`}
      ${asked.key !== keyOf(view.text.value) && html`<p class="hint" role="status">This run is of other choices than those on the page: press Run to make one of these.</p>`}
      <${Colours} runs=${all} limits=${limits} name=${name} />
      ${runs.after && html`<${Difference} ...${runs} at=${at} />`}
      <div class=${runs.after ? "side-by-side" : ""}>
        ${Object.entries(runs).map(([side, one]) => html`
          <${Side} key=${side} side=${side} run=${one} shown=${shown} limits=${limits} differing=${at === null ? null : one.promptIds.length + at} />`)}</div>
      <${Counts} edits=${asked.edits} counts=${last.editCounts} />
      <${Token} shown=${shown} />
    </section>`;
}

/** The edits, the form of one, and its positions on the tokens of the run that is shown. */
function Edits({ shown }) {
  const { edits, at, edit, add, replace } = editsIn(chosen);
  const own = useEditedValue(edit, collected.value);
  const one = shown?.runs.before;
  const tokens = {
    prompt: promptTexts(view.text.value) ?? shown?.promptTexts ?? [],
    generated: one ? piecesOf(one, null).slice(one.promptIds.length).map(({ text }) => text) : [],
  };
  return html`
    <section class="changes" aria-label="Edits">
      <h2>Edits <small>what is changed at each token</small></h2>
      <${EditList} chosen=${chosen} />
      <${EditPlace} chosen=${chosen.place} takesGradients=${false} onAdd=${(place) => add({ at: place, op: "scale", factor: 0 })} />
      ${edit && html`<${EditForm} key=${at} edit=${edit} value=${own} sources=${[]} tokens=${tokens} onChange=${replace} Region=${EditPositions} />`}
      ${edit && html`<details class="stored"><summary>Channels</summary><${ChannelPicker} key=${edit.at} edit=${edit} value=${own} chosen=${chosen} onPick=${(...given) => replace(withChannels(edit, ...given))} /></details>`}
      <${StoredEdits} edits=${edits} onUse=${add} />
    </section>`;
}

/** The directions that a run reads, and those that the server keeps. */
function Directions() {
  const readouts = readoutsIn(chosen);
  const write = (others) => { chosen.readouts.value = JSON.stringify(others); };
  const read = (readout) => {
    write(withReadout(readouts, readout));
    chosen.colour.value = valueName(readout);
  };
  return html`
    <section aria-label="Directions">
      <h2>Directions <small>to steer along, or to read at each token</small></h2>
      <${ReadoutList} readouts=${readouts} onChange=${write} />
      <${StoredDirections} onEdit=${editsIn(chosen).add} onRead=${read} />
    </section>`;
}

function Generate() {
  useEffect(() => stop, [view.model.value]);
  const shown = isOfModel.value;
  return html`
    <section class="generation" aria-label="Generate">
      <${Form} prompt=${view.text.value} chosen=${chosen} module=${view.module.value} isReady=${isDescribed.value} isRunning=${isRunning.value} onPrompt=${usePrompt} onRun=${run} onStop=${stop} />
      ${shown && html`<${Shown} shown=${shown} />`}
      <${Edits} shown=${shown} />
      <${Directions} />
    </section>`;
}

const isOffered = computed(() => model.value?.generates ?? false);

export const generate = { name: "generate", title: "Generate", View: Generate, usesModel: true, hasOwnInput: true, isOffered };
