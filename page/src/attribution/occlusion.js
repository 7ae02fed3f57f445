// Occlusion: the drop of a score when a window of the input is replaced by zeros; the client's arithmetic
// (`_attribution/occlusion.py`).

const DEFAULT_WINDOWS = 14;
const PER_BATCH = 16;

const starts = (whole, size, step) =>
  Array.from({ length: Math.ceil((whole - size) / step) + 1 }, (_, at) => at * step);

/**
 * Places windows in an input (1, channels, height, width).
 * @param size pixels of height and width; a fourteenth of the input when null
 * @returns an array of `{top, left, bottom, right}`; those at the far edges are cut off
 */
export function windows([, , height, width], size = null) {
  const [tall, wide] = size ? [size, size] : [Math.ceil(height / DEFAULT_WINDOWS), Math.ceil(width / DEFAULT_WINDOWS)];
  if (!(tall >= 1 && tall <= height && wide <= width)) throw new RangeError(`A window of ${tall}×${wide} does not fit ${height}×${width}.`);
  const [down, along] = [tall, wide].map((one) => Math.max(1, Math.floor(one / 2)));
  return starts(height, tall, down).flatMap((top) => starts(width, wide, along).map((left) => ({
    top, left, bottom: Math.min(top + tall, height), right: Math.min(left + wide, width),
  })));
}

function* covered({ top, left, bottom, right }, [, channels, height, width]) {
  for (let channel = 0; channel < channels; channel += 1) {
    for (let y = top; y < bottom; y += 1) {
      const row = (channel * height + y) * width;
      for (let x = left; x < right; x += 1) yield row + x;
    }
  }
}

/** Batches of the input with one window after another replaced: `{tensor, places}`. */
export function* occluded({ shape, values }, every) {
  for (let start = 0; start < every.length; start += PER_BATCH) {
    const places = every.slice(start, start + PER_BATCH);
    const batch = new Float32Array(places.length * values.length);
    for (const [copy, place] of places.entries()) {
      batch.set(values, copy * values.length);
      for (const at of covered(place, shape)) batch[copy * values.length + at] = 0;
    }
    yield { tensor: { shape: [places.length, ...shape.slice(1)], values: batch }, places };
  }
}

/** The mean drop of the score over the windows that cover an element. */
export class OcclusionSum {
  constructor(shape, score) {
    this.shape = shape;
    this.score = score;
    const size = shape.reduce((product, length) => product * length, 1);
    this.sum = new Float64Array(size);
    this.count = new Float64Array(size);
  }

  add(places, scores) {
    for (const [copy, place] of places.entries()) {
      const lost = this.score - scores[copy];
      for (const at of covered(place, this.shape)) {
        this.sum[at] += lost;
        this.count[at] += 1;
      }
    }
  }

  get values() {
    return Float32Array.from(this.sum, (total, at) => total / this.count[at]);
  }
}
