// Maps of any range and size as heat maps from 0 to 1, in float64; the client's arithmetic (`_attribution/scaling.py`).

const EPSILON = 1e-7; // added to a map's maximum, as pytorch-grad-cam does
const OUTLIERS = 0.02; // the share of the sum that may lie above 1, as in captum's pictures

const clipped = (value) => (value < 0 ? 0 : value > 1 ? 1 : value);

function lowest(values) {
  let low = Infinity;
  for (const value of values) if (value < low && value > -Infinity) low = value;
  return low < Infinity ? low : 0;
}

/** (x - min) / (1e-7 + max - min); NaN stays NaN. */
export function minMaxScaled(values) {
  const low = lowest(values);
  const lowered = Float64Array.from(values, (value) => value - low);
  const span = EPSILON - lowest(lowered.map((value) => -value));
  return lowered.map((value) => clipped(value / span));
}

/** Absolute values, divided by the one up to which they make 98 % of their sum, from the smallest on. */
export function shareScaled(values) {
  const sizes = Float64Array.from(values, Math.abs);
  const limit = shareLimit(sizes);
  return sizes.map((value) => (Number.isNaN(value) ? NaN : limit > 0 ? clipped(value / limit) : 0));
}

function shareLimit(sizes) {
  const sorted = sizes.filter(Number.isFinite).sort();
  if (!sorted.length) return 0;
  let sum = 0;
  const sums = sorted.map((value) => (sum += value));
  return sorted[sums.findIndex((one) => one >= sum * (1 - OUTLIERS))];
}

/** Weights of two neighbours for each of `wanted` positions: half-pixel centres, no antialiasing. */
function interpolation(size, wanted) {
  return Array.from({ length: wanted }, (_, at) => {
    const centre = Math.min(size - 1, Math.max(0, ((at + 0.5) * size) / wanted - 0.5));
    const lower = Math.floor(centre);
    return [lower, Math.min(lower + 1, size - 1), centre - lower];
  });
}

/** Resizes one map bilinearly, as OpenCV and torch do. */
export function resized({ values, height, width }, newHeight, newWidth) {
  const rows = interpolation(height, newHeight);
  const columns = interpolation(width, newWidth);
  const made = new Float64Array(newHeight * newWidth);
  for (const [y, [above, below, down]] of rows.entries()) {
    for (const [x, [left, right, along]] of columns.entries()) {
      const at = (row, column) => values[row * width + column];
      const one = (1 - down) * at(above, left) + down * at(below, left);
      const other = (1 - down) * at(above, right) + down * at(below, right);
      made[y * newWidth + x] = (1 - along) * one + along * other;
    }
  }
  return { values: made, height: newHeight, width: newWidth };
}
