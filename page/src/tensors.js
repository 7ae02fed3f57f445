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
    return featureMaps.map((map) => ({ map, tensor: map.hasValues ? tensor(map.tensor, left.shift()) : null }));
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

/**
 * Splits one sample of a feature map into channels.
 * @param tensor `{shape, values}`; its `channelDim` is -1 where the channels are last
 * @returns an array of `{index, values, height, width, strength}`; strength is the mean of the absolute values
 */
export function channels({ shape, values, channelDim = null }, sample = 0) {
  const [, ...rest] = shape;
  const size = rest.reduce((product, length) => product * length, 1);
  const own = values.subarray(sample * size, (sample + 1) * size);
  if (rest.length === 3 && channelDim === -1) return columns(own, rest[0], rest[1], rest[2]);
  if (rest.length === 3) return split(own, rest[0], rest[1], rest[2]);
  if (rest.length === 2) return columns(own, 1, rest[0], rest[1]); // (tokens, width): one picture for each unit
  return [];
}

function split(values, count, height, width) {
  return Array.from({ length: count }, (_, index) =>
    channel(index, values.subarray(index * height * width, (index + 1) * height * width), height, width));
}

function columns(values, height, width, count) {
  return Array.from({ length: count }, (_, index) =>
    channel(index, Float64Array.from({ length: height * width }, (_, at) => values[at * count + index]), height, width));
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
