// Tensors of replies: payloads put together from chunks, as typed arrays.
import { Dtype } from "../gen/trocar_api/v1/tensor_pb.js";

const ARRAYS = {
  [Dtype.FLOAT32]: Float32Array, [Dtype.FLOAT64]: Float64Array, [Dtype.UINT8]: Uint8Array, [Dtype.INT8]: Int8Array,
  [Dtype.INT16]: Int16Array, [Dtype.INT32]: Int32Array, [Dtype.INT64]: BigInt64Array, [Dtype.BOOL]: Uint8Array,
};

/** Puts the payloads of a reply together, one array for each feature map that has values. */
export class Payloads {
  constructor(featureMaps) {
    this.buffers = featureMaps.filter((map) => map.hasValues).map((map) => new Uint8Array(Number(map.byteCount)));
  }

  add(chunks) {
    for (const chunk of chunks) this.buffers[chunk.payloadIndex].set(chunk.data, Number(chunk.offsetBytes));
  }

  tensors(featureMaps) {
    const left = [...this.buffers];
    return featureMaps.map((map) => ({
      map, tensor: map.hasValues ? { ...tensor(map.tensor, left.shift()), axes: map.axes, grids: map.tokenGrids } : null,
    }));
  }
}

/** Numbers of 16 bits. NumPy has no bfloat16: it is saved as float32, as the client has it. */
const WIDENED = { [Dtype.FLOAT16]: halves, [Dtype.BFLOAT16]: brainFloats };

/** Values as numbers; `own`, the values as they came with the type of a `.npy` file, where they are others. */
function tensor(spec, bytes) {
  const shape = spec.shape.map(Number);
  if (spec.dtype in WIDENED) return { shape, ...WIDENED[spec.dtype](new Uint16Array(bytes.buffer)) };
  const Kind = ARRAYS[spec.dtype];
  if (!Kind) throw new TypeError(`values of ${Dtype[spec.dtype].toLowerCase()} are not shown`);
  const values = new Kind(bytes.buffer);
  if (spec.dtype === Dtype.INT64) return { shape, values: Float64Array.from(values, Number), own: { type: "<i8", values } };
  return { shape, values, ...(spec.dtype === Dtype.BOOL ? { own: { type: "|b1", values } } : {}) };
}

/** IEEE 754 binary16: a sign, 5 bits of exponent, 10 of fraction. Exact as float32. */
function halves(bits) {
  const values = Float32Array.from(bits, (word) => {
    const [exponent, fraction] = [(word >> 10) & 31, word & 1023];
    const size = exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    return word & 0x8000 ? -size : size;
  });
  return { values, own: { type: "<f2", values: bits } };
}

/** The upper half of a float32. */
function brainFloats(bits) {
  return { values: new Float32Array(Uint32Array.from(bits, (word) => word << 16).buffer) };
}

/** Least and greatest of the finite values. */
export function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low && value > -Infinity) low = value;
    if (value > high && value < Infinity) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

/** The dimension of the channels as a reply says it, or of the heads of attention; null where it does not. */
export function channelsByAxes(axes = []) {
  const name = axes.includes("channels") ? "channels" : "heads";
  return axes.filter((one) => one === name).length === 1 ? axes.indexOf(name) : null;
}

/** The dimensions of samples, channels and positions of a value, by what a reply says of it, or by its rank. */
function roles({ shape, axes = [], channelDim = null }) {
  const channels = channelsByAxes(axes);
  const samples = axes.findIndex((name) => name === "batch" || name === "images");
  const isKnown = axes.length === shape.length && !axes.includes("?") && channels !== null && samples >= 0;
  const own = channelDim ?? (shape.length === 3 ? -1 : 1);
  const [sample, channel] = isKnown ? [samples, channels] : [0, own < 0 ? shape.length + own : own];
  return { sample, channel, rest: shape.map((_, dim) => dim).filter((dim) => dim !== sample && dim !== channel) };
}

/** The one grid of patches along a dimension, as `{rows, columns, first}`; null where there is none, or of a video. */
export function patchesOf({ grids = [] }, dim) {
  const own = grids.filter((grid) => grid.dimension === dim && grid.sizes.length === 2);
  return own.length === 1 ? { rows: own[0].sizes[0], columns: own[0].sizes[1], first: own[0].first } : null;
}

/**
 * One sample of a value as pictures: patches as rows and columns, other tokens as one row.
 * @param tensor `{shape, values, axes, grids}` as a reply has them; `channelDim` is -1 where they say nothing and the channels are last
 * @returns `{height, width, channels}`, an array of Float64Array; null where it has no one or two dimensions of positions
 */
export function pictures(tensor, sample = 0) {
  const { shape, values } = tensor;
  if (shape.length < 3) return null;
  const strides = shape.map((_, dim) => shape.slice(dim + 1).reduce((product, size) => product * size, 1));
  const { sample: samples, channel, rest } = roles(tensor);
  if (rest.length < 1 || rest.length > 2) return null;
  const patches = rest.length === 1 ? patchesOf(tensor, rest[0]) : null;
  const step = strides[rest.at(-1)];
  const [height, width] = patches ? [patches.rows, patches.columns] : rest.length === 1 ? [1, shape[rest[0]]] : rest.map((dim) => shape[dim]);
  const down = patches ? patches.columns * step : rest.length === 1 ? 0 : strides[rest[0]];
  const start = sample * strides[samples] + (patches ? patches.first * step : 0);
  const picture = (index) => Float64Array.from({ length: height * width }, (_, at) =>
    values[start + index * strides[channel] + Math.floor(at / width) * down + (at % width) * step]);
  return { height, width, channels: Array.from({ length: shape[channel] }, (_, index) => picture(index)) };
}

/**
 * Splits one sample of a feature map into channels.
 * @param tensor as of `pictures`
 * @returns an array of `{index, values, height, width, strength}`; strength is the mean of the absolute values
 */
export function channels(tensor, sample = 0) {
  const found = pictures(tensor, sample);
  return found ? found.channels.map((values, index) => channel(index, values, found.height, found.width)) : [];
}

function channel(index, values, height, width) {
  let sum = 0;
  for (const value of values) sum += Math.abs(value);
  return { index, values, height, width, strength: sum / values.length };
}

/** A parameter as a picture for each index of its first dimension, like `channels`. */
export function rows({ shape, values }) {
  const size = values.length / shape[0];
  const [height, width] = shape.length === 4 ? [shape[1] * shape[2], shape[3]] : [1, size];
  return Array.from({ length: shape[0] }, (_, index) => channel(index, values.subarray(index * size, (index + 1) * size), height, width));
}

/** Position of the greatest value, the first of equal ones. */
export const argmax = (values) => values.indexOf(values.reduce((a, b) => (b > a ? b : a)));

/** The shares of classes, in float64: exp(x - max) / sum. */
export function softmax(values) {
  const highest = range(values)[1];
  const powers = Float64Array.from(values, (value) => Math.exp(value - highest));
  const sum = powers.reduce((total, value) => total + value, 0);
  return powers.map((value) => value / sum);
}
