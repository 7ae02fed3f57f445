// Class activation maps from a feature map and its gradient, in float64; the client's arithmetic (`_attribution/cam.py`).

const EPSILON = 1e-6;

/**
 * One sample's value as channels with positions.
 * @param tensor `{shape, values}` of one sample: (1, channels, height, width), (1, tokens, width), or as `channelDim` says
 * @param place `{channelDim, grid}` as `defaultPlace` gives them
 * @returns `{channels, height, width}`: an array of Float64Array
 */
export function channelsFirst({ shape, values }, { channelDim = null, grid = null } = {}) {
  if (shape.length === 3 && channelDim === null) return tokensAsGrid(shape, values, grid);
  if (shape.length !== 4) {
    throw new RangeError(`A value of shape ${shape.join("×")} has no height and width. Choose a module before the pooling.`);
  }
  const isLast = channelDim === -1;
  const [count, height, width] = isLast ? [shape[3], shape[1], shape[2]] : shape.slice(1);
  return { channels: taken(values, count, height * width, isLast, 0), height, width };
}

function tokensAsGrid([, count, width], values, grid) {
  const side = Math.floor(Math.sqrt(count));
  if (!grid && count - side * side > 1) throw new RangeError(`${count} tokens do not form a square.`);
  const [height, columns] = grid ?? [side, side];
  const first = count - height * columns; // a class token, registers
  return { channels: taken(values, width, height * columns, true, first * width), height, width: columns };
}

function taken(values, count, size, isLast, start) {
  return Array.from({ length: count }, (_, channel) =>
    Float64Array.from({ length: size }, (_, at) => values[start + (isLast ? at * count + channel : channel * size + at)]));
}

const summed = (values) => values.reduce((total, value) => total + value, 0);

function combined(weights, { channels, height, width }) {
  const total = new Float64Array(height * width);
  for (const [index, channel] of channels.entries()) {
    for (let at = 0; at < total.length; at += 1) total[at] += weights[index] * channel[at];
  }
  return { values: total.map((value) => Math.fround(value < 0 ? 0 : value)), height, width };
}

/** relu(sum of channels x mean gradient), Selvaraju et al. 2017. */
export const gradCam = (value, gradient) =>
  combined(gradient.channels.map((channel) => summed(channel) / channel.length), value);

/** With the weights of Chattopadhyay et al. 2018, equation 19, as pytorch-grad-cam has them. */
export function gradCamPlusPlus(value, gradient) {
  const weights = gradient.channels.map((channel, index) => {
    const total = summed(value.channels[index]);
    return channel.reduce((sum, g) => {
      const share = g === 0 ? 0 : g ** 2 / (2 * g ** 2 + total * g ** 3 + EPSILON);
      return sum + Math.max(g, 0) * share;
    }, 0);
  });
  return combined(weights, value);
}
