// Passes with edits: what the page asks for, and the same as `pythonCode` takes it.
import { ClassScoreKind } from "../gen/trocar_api/v1/objective_pb.js";
import { EXACT } from "./api.js";
import { isOfGradient, sourcesOf, valueOfGradient, wiredEdits } from "./edits.js";
import { imagePort } from "./ports.js";
import { collected, extract, input, model, passOf, readSample, result, second, SAMPLES, statisticsTap, taps, textInput, view } from "./state.js";

/** The name of a dropped image as a source of values. */
export const DROPPED = "dropped";
const TEXT = "text";

/** Names of inputs from which an edit may take values, beside the shown one. */
export const offeredSources = () => (input.value?.kind === "text" ? [TEXT]
  : [...SAMPLES.filter((name) => name !== view.sample.value), ...(second.value ? [DROPPED] : [])]);

async function source(name, text, signal) {
  if (name === TEXT) return textInput(text);
  if (name !== DROPPED) return readSample(name, signal);
  if (!second.value) throw new RangeError("Choose the second image again: a link has no images.");
  return second.value;
}

const sources = async (edits, text, signal) =>
  Object.fromEntries(await Promise.all(sourcesOf(edits).map(async (name) => [name, await source(name, text, signal)])));

/** Values whose gradients are shown: those that are edited, the chosen module's, and the image's. */
function gradientPlaces(edits) {
  const shown = collected.value.map(({ map }) => map.name).filter((name) => !name.endsWith("/pattern"));
  const changed = edits.filter(isOfGradient).map(({ at }) => valueOfGradient(at));
  return [...new Set([...shown, ...changed, ...(input.value.kind === "image" ? [imagePort(model.value.inputs)] : [])])];
}

const logitOf = (target) =>
  ({ terms: [{ kind: { case: "classScore", value: { classes: [BigInt(target)], kind: ClassScoreKind.LOGIT } } }] });

/** Tensors of edits come before those of sources, as in the protocol. */
const pass = (edits, request, named, options) =>
  extract(view.model.value, input.value, { ...request, ...wiredEdits(edits), sources: named }, options);

/**
 * Runs the passes that show what edits do: of gradients there is one without edits, too, and where the last one was not exact.
 * @param target the class whose logit has the gradients
 * @param text the other text, from which values may come
 * @returns `{before, after, passes}`: maps, `before` null where the last pass without edits has them; `passes` for `pythonCode`
 */
export async function runEdited(edits, { target, text }, options) {
  const named = await sources(edits, text, options.signal);
  if (!edits.some(isOfGradient)) {
    const isExact = result.value.isExact;
    const before = isExact ? null : (await pass([], { taps: taps(), ...EXACT }, {}, options)).maps;
    const { maps } = await pass(edits, { taps: taps() }, named, options);
    const first = { ...passOf("before"), numerics: isExact ? "" : "exact" };
    return { before, after: maps, passes: [first, { ...passOf("after", edits), sources: named }] };
  }
  const at = gradientPlaces(edits);
  const request = {
    objective: logitOf(target),
    taps: [...at.map((selector) => ({ ...statisticsTap, selector, isGradient: true })), { selector: "/out", values: true }],
  };
  const { maps: before } = await pass([], request, {}, options);
  const { maps: after } = await pass(edits, request, named, options);
  const common = { model: view.model.value, input: input.value, taps: ["/out"], of: target, at };
  return { before, after, passes: [{ ...common, result: "before" }, { ...common, result: "after", edits, sources: named }] };
}
