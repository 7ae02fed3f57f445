// A run: its tokens, and what was read at each position, put together from the messages of the server.
import { FinishReason } from "../../gen/trocar_api/v1/generation_pb.js";
import { Payloads } from "../tensors.js";
import { rowShape, rowsOf } from "./reading.js";

const REASONS = {
  [FinishReason.LENGTH]: "the most tokens were generated", [FinishReason.STOP_TOKEN]: "a token that ends the text",
  [FinishReason.STOP_STRING]: "a text to stop at", [FinishReason.GATE]: "a gate opened",
};
const LENS = /:lens$/;

/** Of a value: `{name, shape, rows}`, a row's shape and rows by position; `own` rows as they came, where they are others. */
function addRows(read, { map, tensor }) {
  const { name } = map;
  const known = read.get(name) ?? { name, shape: rowShape(tensor), type: tensor.own?.type, rows: new Map(), own: new Map() };
  const positions = map.tokenPositions[0].positions;
  rowsOf(tensor, tensor.values).forEach((row, at) => known.rows.set(positions[at], row));
  if (tensor.own) rowsOf(tensor, tensor.own.values).forEach((row, at) => known.own.set(positions[at], row));
  read.set(name, known);
}

/** A run that grows; `shown` is what it has so far. */
export class Run {
  promptIds = [];
  tokens = [];
  /** Values by name, in the order of the taps. */
  read = new Map();
  /** Of a lens the likely tokens by position, and the selector that it reads: null without one. */
  lens = null;
  /** What directions read, by name and as values: one row has the numbers of a direction's vectors. */
  readouts = new Map();
  editCounts = [];
  heldText = "";
  /** Why it has ended; empty while it runs. */
  end = "";
  /** The maps of the pass that is under way. */
  #pass = null;
  #readoutNames;

  /** @param readoutNames names of the values that directions read */
  constructor(readoutNames) {
    this.#readoutNames = readoutNames;
  }

  /** Takes the next message of the server. */
  add(message) {
    if (message.started) this.promptIds = [...message.started.prompts[0].ids];
    if (message.tokens.length) {
      this.#pass = { maps: message.featureMaps, parts: new Payloads(message.featureMaps), left: message.featureMaps.reduce((sum, map) => sum + Number(map.byteCount), 0) };
      this.tokens.push(...message.tokens);
    }
    this.#addChunks(message.chunks);
    if (message.sequence) this.#finish(message.sequence);
  }

  #addChunks(chunks) {
    if (!this.#pass) return;
    this.#pass.parts.add(chunks);
    this.#pass.left -= chunks.reduce((sum, { data }) => sum + data.length, 0);
    if (this.#pass.left > 0) return;
    this.#addValues(this.#pass.parts.tensors(this.#pass.maps));
    this.#pass = null;
  }

  #addValues(maps) {
    const companions = new Map(maps.filter(({ map }) => map.companionOf).map((one) => [one.map.companionOf, one]));
    for (const one of maps.filter(({ map, tensor }) => tensor && !map.companionOf)) {
      const indices = companions.get(one.map.name);
      if (indices) this.#addLens(one, indices);
      else addRows(this.#readoutNames.includes(one.map.name) ? this.readouts : this.read, one);
    }
  }

  #addLens({ map, tensor }, indices) {
    const selector = map.name.replace(LENS, "");
    this.lens ??= { selector, rows: new Map() };
    if (this.lens.selector !== selector) return; // of another call of the module
    const texts = new Map(indices.map.tokenTexts.map(({ tokenId, text }) => [tokenId, text]));
    const ids = rowsOf({ shape: tensor.shape, axes: tensor.axes }, indices.tensor.values);
    rowsOf(tensor, tensor.values).forEach((row, at) => this.lens.rows.set(map.tokenPositions[0].positions[at],
      Array.from(row, (logprob, rank) => ({ tokenId: ids[at][rank], text: texts.get(ids[at][rank]) ?? "", logprob }))));
  }

  #finish({ reason, text, editCounts }) {
    this.end = REASONS[reason] ?? "the server ended it";
    this.heldText = text;
    this.editCounts = editCounts;
  }

  get shown() {
    const { promptIds, read, lens, readouts, editCounts, heldText, end } = this;
    return { promptIds, tokens: [...this.tokens], read, lens, readouts, editCounts, heldText, end };
  }
}

/** Values of all positions as a tensor for a file, in the order of the positions. */
export function tensorOf({ shape, type, rows, own }) {
  const listed = (some) => [...some.keys()].sort((a, b) => a - b).map((position) => some.get(position));
  const joined = (parts) => {
    const whole = new parts[0].constructor(parts.reduce((sum, part) => sum + part.length, 0));
    parts.reduce((at, part) => { whole.set(part, at); return at + part.length; }, 0);
    return whole;
  };
  const tensor = { shape: [rows.size, ...shape], values: joined(listed(rows)) };
  return type ? { ...tensor, own: { type, values: joined(listed(own)) } } : tensor;
}

/** The index of the first generated token in which two runs differ; null where none does, as far as both have come. */
export function firstDifference(before, after) {
  const isWhole = (run) => run.end !== "";
  const most = Math.max(before.tokens.length, after.tokens.length);
  for (let at = 0; at < most; at += 1) {
    const [one, other] = [before.tokens[at], after.tokens[at]];
    if (one && other ? one.tokenId !== other.tokenId : isWhole(one ? after : before)) return at;
  }
  return null;
}
