// Where class activation maps are taken unless something else is said; the client's rule (`_attribution/place.py`):
// the last feature map with height and width before the pooling, or the tokens before the last attention.
import { channelsByAxes } from "../tensors.js";

/**
 * @param values `{name, path, type, pick, shape, axes, tokenGrids}` of every call of every module, as the calls end
 * @param inputShape of the model's input, (batch, channels, height, width)
 * @returns `{at, channelDim}`; `channelDim` is null where a reply says it, and for the usual one
 */
export function defaultPlace(values, inputShape) {
  const attention = values.map(({ path, type }) => [path, type.toLowerCase()])
    .filter(([path, type]) => path && type.includes("attention") && !type.includes("pool")).map(([path]) => path);
  const outside = values.filter((value) => counts(value, attention));
  const maps = outside.filter((value) => hasPositions(value, inputShape));
  const tokens = beforeLastAttention(outside, values, attention).filter(hasPatches);
  const [lastMap, lastTokens] = [maps.at(-1), tokens.at(-1)];
  if (lastTokens && (!lastMap || outside.indexOf(lastTokens) > outside.indexOf(lastMap))) {
    return { at: lastTokens.name, channelDim: null };
  }
  if (!lastMap) throw new RangeError("No module's output has height and width before a pooling. Choose a module.");
  return { at: lastMap.name, channelDim: !lastMap.axes.length && isChannelsLast(lastMap, inputShape) ? -1 : null };
}

/**
 * The dimension of a value's channels: -1 for (batch, height, width, channels), as of Swin; null for the usual one.
 * @param value `{shape, axes}`; `axes` as a reply says them, empty where nothing is known
 * @param preprocessing of the model, whose crop or fixed size is that of its images; null where it is not known
 */
export function channelDimOf(value, preprocessing) {
  const known = channelsByAxes(value.axes);
  if (known !== null) return value.shape.length === 4 && known === 3 ? -1 : null;
  const size = preprocessing?.crop.length ? preprocessing.crop : preprocessing?.resize;
  if (size?.length !== 2) return null;
  const inputShape = [1, 3, ...size];
  return hasPositions(value, inputShape) && isChannelsLast(value, inputShape) ? -1 : null;
}

const isWithin = (path, ancestor) => path === ancestor || path.startsWith(`${ancestor}.`);

const counts = ({ path, pick, type }, attention) =>
  path && !pick && !attention.some((one) => isWithin(path, one)) && !type.toLowerCase().includes("pool");

function beforeLastAttention(outside, values, attention) {
  if (!attention.length) return outside;
  const begin = values.findIndex(({ path }) => isWithin(path, attention.at(-1)));
  const earlier = new Set(values.slice(0, begin));
  return outside.filter((value) => earlier.has(value));
}

/** Whether one dimension of a value is the rows and columns of a picture. */
const hasPatches = ({ axes, tokenGrids }) =>
  tokenGrids.length === 1 && tokenGrids[0].sizes.length === 2 && channelsByAxes(axes) !== null;

function hasPositions(value, inputShape) {
  const { shape, axes = [] } = value;
  if (shape.length !== 4 || inputShape.length !== 4) return false;
  if (axes.length && !axes.includes("?")) return hasKnownPositions(value);
  if (shape[0] !== inputShape[0]) return false;
  const [height, width] = positions(value, inputShape);
  return Math.min(height, width) > 1 && height <= inputShape[2] && width <= inputShape[3];
}

/** Whether the dimensions beside samples and channels are positions of the inputs, more than one each. */
function hasKnownPositions({ shape, axes, tokenGrids = [] }) {
  const isSamples = (name) => name === "batch" || name === "images";
  const rest = axes.map((name, dim) => [name, dim]).filter(([name]) => name && name !== "channels" && name !== "heads" && !isSamples(name));
  return axes.includes("channels") && axes.filter(isSamples).length === 1 && rest.length === 2
    && !tokenGrids.length && rest.every(([, dim]) => shape[dim] > 1);
}

const positions = (value, inputShape) =>
  isChannelsLast(value, inputShape) ? value.shape.slice(1, 3) : value.shape.slice(2, 4);

/** Whether the channels come last in a value of which nothing is known: the proportions of the input tell. */
function isChannelsLast({ shape }, inputShape) {
  const size = inputShape.slice(2, 4);
  return isReduced(shape.slice(1, 3), size) && !isReduced(shape.slice(2, 4), size);
}

function isReduced(found, size) {
  if (Math.min(...found) < 1 || found[0] > size[0] || found[1] > size[1]) return false;
  const stride = Math.sqrt((size[0] * size[1]) / (found[0] * found[1]));
  return found.every((count, at) => Math.abs(count - size[at] / stride) <= 1);
}
