// Attributions: passes of the server, and the client's arithmetic on their values; of one image and the logit of a class.
import { ClassScoreKind } from "../../gen/trocar_api/v1/objective_pb.js";
import { Statistic } from "../../gen/trocar_api/v1/statistics_pb.js";
import { EXACT, extract, plan } from "../api.js";
import { argmax } from "../tensors.js";
import { channelsFirst, gradCam, gradCamPlusPlus } from "./cam.js";
import { occluded, OcclusionSum, windows } from "./occlusion.js";
import { Conductance, gaussLegendre, interpolants, PathIntegral } from "./path.js";
import { FIRST, IMAGES } from "../ports.js";
import { defaultPlace } from "./place.js";
import { minMaxScaled, resized, shareScaled } from "./scaling.js";

const OUTPUT = "/out";

/** Every method by its name in the client. `setting` is its one number: `{name, initial, label}`. */
export const METHODS = {
  grad_cam: { label: "Grad-CAM", isAtModule: true, compute: cam(gradCam), isMap: true },
  grad_cam_plus_plus: { label: "Grad-CAM++", isAtModule: true, compute: cam(gradCamPlusPlus), isMap: true },
  saliency: { label: "Saliency", compute: gradient(({ gradient: g }) => g.values.map(Math.abs)) },
  input_x_gradient: {
    label: "Input × gradient", hasValue: true,
    compute: gradient(({ value, gradient: g }) => g.values.map((one, at) => one * value.values[at])),
  },
  integrated_gradients: {
    label: "Integrated gradients", compute: integratedGradients,
    setting: { name: "steps", initial: 50, label: "Steps" },
  },
  layer_conductance: {
    label: "Layer conductance", isAtModule: true, compute: layerConductance,
    setting: { name: "steps", initial: 50, label: "Steps" },
  },
  guided_backprop: { label: "Guided backpropagation", compute: gradient(({ gradient: g }) => g.values), edits: guided() },
  occlusion: {
    label: "Occlusion", compute: occlusion,
    setting: { name: "window", initial: null, label: "Window in pixels" },
  },
};

/**
 * Computes an attribution.
 * @param request `{modelId, port, input, method, target, at, setting}`: `port` is that of the images, `target` is the number of a class, null for the
 *   predicted one; `at` a selector, null for the method's own place
 * @param options of the calls
 * @param tell gets the share of the work that is done, 0 to 1
 * @returns `{values, heat, pixels, place, target, score}`: `values` and `pixels` are tensors, `heat` a map from 0 to 1
 */
export async function attribute({ modelId, port, input, method, target, at, setting }, options, tell = () => {}) {
  const first = await extract(modelId, input, { taps: [{ selector: OUTPUT, alias: "value" }, { selector: port }], ...EXACT }, options);
  const { value: output, ...inputs } = named(first.maps);
  const [[ownPort, pixels]] = Object.entries(inputs); // `/in` where the images are the first parameter
  if (output?.shape.length !== 2) throw new RangeError("The model's output is no scores of classes.");
  const chosen = target ?? argmax(output.values);
  if (!(chosen >= 0 && chosen < output.shape[1])) throw new RangeError(`There are classes 0 to ${output.shape[1] - 1}, not ${chosen}.`);
  const objective = { terms: [{ kind: { case: "classScore", value: { classes: [BigInt(chosen)], kind: ClassScoreKind.LOGIT } } }] };
  const own = METHODS[method];
  const question = { modelId, port: ownPort, name: ownPort === FIRST ? "" : IMAGES, pixels, objective, target: chosen, score: output.values[chosen], setting, edits: own.edits ?? [], hasValue: own.hasValue, options, tell };
  const place = own.isAtModule && at === null ? await placeOf(question) : { at: at ?? ownPort, channelDim: null };
  const values = await own.compute({ ...question, place });
  const [height, width] = pixels.shape.slice(2);
  return { values, pixels, place, target: chosen, score: question.score, heat: heatOf(values, own.isMap, place, height, width) };
}

const named = (maps) => Object.fromEntries(maps.map(({ map, tensor }) => [map.name, tensor]));

const tensorInput = (tensor, name) => ({ kind: "tensor", ...tensor, name });

async function placeOf({ modelId, pixels, name, options }) {
  const taps = [{ selector: "**", statistics: [Statistic.ABSMAX], values: false }];
  const reply = await plan(modelId, tensorInput(pixels, name), { taps }, options);
  const values = reply.featureMaps.map((map) => ({ ...map, shape: map.tensor.shape.map(Number) }));
  return defaultPlace(values, pixels.shape);
}

/** Runs a pass with gradients; returns `{value, gradient}`. */
async function pass({ modelId, name, objective, edits, options }, tensor, at, hasValue) {
  const taps = [...(hasValue ? [{ selector: at, alias: "value" }] : []), { selector: at, alias: "gradient", isGradient: true }];
  return named((await extract(modelId, tensorInput(tensor, name), { taps, objective, edits }, options)).maps);
}

function gradient(combine) {
  return async (question) => {
    const found = await pass(question, question.pixels, question.place.at, question.hasValue);
    return { shape: found.gradient.shape, values: combine(found) };
  };
}

function cam(combine) {
  return async (question) => {
    const found = await pass(question, question.pixels, question.place.at, true);
    const { axes, grids } = found.value;
    const map = combine(channelsFirst(found.value, question.place), channelsFirst({ ...found.gradient, axes, grids }, question.place));
    return { shape: [1, map.height, map.width], values: Float32Array.from(map.values) };
  };
}

/** Each ReLU lets only positive parts of the gradient pass. */
function guided() {
  return [{ selector: "**:ReLU/grad_out", operation: { case: "clamp", value: { low: 0 } } }];
}

async function integratedGradients(question) {
  const { pixels, port, setting, tell } = question;
  const rule = gaussLegendre(setting);
  const integral = new PathIntegral(rule.weights, pixels.values.length);
  for (const { tensor, count } of interpolants(pixels, rule.alphas)) {
    integral.add((await pass(question, tensor, port, false)).gradient, count);
    tell(integral.count / setting);
  }
  return { shape: pixels.shape, values: pixels.values.map((value, at) => value * integral.sum[at]) };
}

async function layerConductance(question) {
  const { pixels, place, setting, tell } = question;
  const rule = gaussLegendre(setting + 1);
  const total = new Conductance();
  let [done, value] = [0, null];
  for (const { tensor, count } of interpolants(pixels, rule.alphas)) {
    const found = await pass(question, tensor, place.at, true);
    total.add(found.value, found.gradient, count);
    value = found.value;
    tell((done += count) / rule.alphas.length);
  }
  return { ...value, shape: [1, ...value.shape.slice(1)], values: Float32Array.from(total.sum) };
}

async function occlusion({ modelId, name, pixels, setting, target, score, options, tell }) {
  const every = windows(pixels.shape, setting);
  const total = new OcclusionSum(pixels.shape, score);
  let done = 0;
  for (const { tensor, places } of occluded(pixels, every)) {
    const { maps } = await extract(modelId, tensorInput(tensor, name), { taps: [{ selector: OUTPUT, alias: "score" }], ...EXACT }, options);
    const output = named(maps).score;
    total.add(places, places.map((_, at) => output.values[at * output.shape[1] + target]));
    tell((done += places.length) / every.length);
  }
  return { shape: pixels.shape, values: total.values };
}

/** As `Attribution.heatmap` of the client. */
function heatOf(values, isMap, place, height, width) {
  if (isMap) {
    const [, rows, columns] = values.shape;
    const small = { values: minMaxScaled(values.values), height: rows, width: columns };
    return { values: minMaxScaled(resized(small, height, width).values), height, width };
  }
  const maps = channelsFirst(values, place);
  const summed = new Float64Array(maps.height * maps.width);
  for (const channel of maps.channels) for (let at = 0; at < summed.length; at += 1) summed[at] += channel[at];
  const scaled = { values: shareScaled(summed), height: maps.height, width: maps.width };
  return maps.height === height && maps.width === width ? scaled : resized(scaled, height, width);
}
