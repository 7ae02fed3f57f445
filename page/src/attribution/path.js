// The straight path from zero to the input, for integrated gradients and layer conductance; the client's arithmetic
// (`_attribution/path.py`).

const LARGEST_BATCH = 16;
const ROOT_STEPS = 100;

/** Points and weights of the Gauss-Legendre rule on [0, 1], in ascending order. */
export function gaussLegendre(count) {
  const alphas = new Float64Array(count);
  const weights = new Float64Array(count);
  for (let at = 0; at < count; at += 1) {
    let x = -Math.cos((Math.PI * (at + 0.75)) / (count + 0.5));
    let slope = 0;
    for (let step = 0; step < ROOT_STEPS; step += 1) { // Newton's method on the Legendre polynomial
      let [before, now] = [1, x];
      for (let k = 2; k <= count; k += 1) [before, now] = [now, ((2 * k - 1) * x * now - (k - 1) * before) / k];
      slope = (count * (before - x * now)) / (1 - x * x);
      const next = x - now / slope;
      if (Math.abs(next - x) < 1e-16) break;
      x = next;
    }
    alphas[at] = 0.5 * (1 + x);
    weights[at] = 1 / ((1 - x * x) * slope * slope);
  }
  return { alphas, weights };
}

/** Copies in each batch: split as evenly as possible. */
const copiesPerBatch = (copies) => Math.ceil(copies / Math.ceil(copies / LARGEST_BATCH));

/**
 * Batches of points on the path; every batch holds as many, the last point is repeated at the end.
 * @returns an array of `{tensor, count}`; of `tensor` the first `count` samples are points
 */
export function* interpolants({ shape, values }, alphas) {
  const perBatch = copiesPerBatch(alphas.length);
  for (let start = 0; start < alphas.length; start += perBatch) {
    const batch = new Float32Array(perBatch * values.length);
    for (let copy = 0; copy < perBatch; copy += 1) {
      const factor = Math.fround(alphas[Math.min(start + copy, alphas.length - 1)]);
      for (let at = 0; at < values.length; at += 1) batch[copy * values.length + at] = factor * values[at];
    }
    yield { tensor: { shape: [perBatch, ...shape.slice(1)], values: batch }, count: Math.min(perBatch, alphas.length - start) };
  }
}

/** The integral of a gradient along the path, from batches in order. */
export class PathIntegral {
  constructor(weights, size) {
    this.weights = weights;
    this.sum = new Float64Array(size);
    this.count = 0;
  }

  add({ values }, count) {
    for (let point = 0; point < count; point += 1) {
      const weight = this.weights[this.count + point];
      const start = point * this.sum.length;
      for (let at = 0; at < this.sum.length; at += 1) this.sum[at] += weight * values[start + at];
    }
    this.count += count;
  }
}

/** sum of gradient(i) x (value(i + 1) - value(i)) along the path (Dhamdhere 2018), from batches in order. */
export class Conductance {
  add(value, gradient, count) {
    const size = value.values.length / value.shape[0];
    this.sum ??= new Float64Array(size);
    for (let point = 0; point < count; point += 1) {
      const v = value.values.subarray(point * size, (point + 1) * size);
      if (this.last) {
        for (let at = 0; at < size; at += 1) this.sum[at] += this.last.gradient[at] * (v[at] - this.last.value[at]);
      }
      this.last = { value: v, gradient: gradient.values.subarray(point * size, (point + 1) * size) };
    }
  }
}
