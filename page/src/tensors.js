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

function tensor(spec, bytes) {
  const Kind = ARRAYS[spec.dtype];
  if (!Kind) throw new TypeError(`values of ${Dtype[spec.dtype].toLowerCase()} are not shown`);
  const values = new Kind(bytes.buffer);
  return { shape: spec.shape.map(Number), values: values instanceof BigInt64Array ? Float64Array.from(values, Number) : values };
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
 * @returns an array of `{index, values, height, width, strength}`; strength is the mean of the absolute values
 */
export function channels({ shape, values }, sample = 0) {
  const [, ...rest] = shape;
  const size = rest.reduce((product, length) => product * length, 1);
  const own = values.subarray(sample * size, (sample + 1) * size);
  if (rest.length === 3) return split(own, rest[0], rest[1], rest[2]);
  if (rest.length === 2) return columns(own, rest[0], rest[1]); // (tokens, width): one picture for each unit
  return [];
}

function split(values, count, height, width) {
  return Array.from({ length: count }, (_, index) =>
    channel(index, values.subarray(index * height * width, (index + 1) * height * width), height, width));
}

function columns(values, length, width) {
  return Array.from({ length: width }, (_, index) =>
    channel(index, Float64Array.from({ length }, (_, token) => values[token * width + index]), 1, length));
}

function channel(index, values, height, width) {
  let sum = 0;
  for (const value of values) sum += Math.abs(value);
  return { index, values, height, width, strength: sum / values.length };
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
