// Class activation maps from a feature map and its gradient, in float64; the client's arithmetic (`_attribution/cam.py`).

import { pictures } from "../tensors.js";

const EPSILON = 1e-6;

/**
 * One sample's value as channels with positions.
 * @param tensor `{shape, values, axes, grids}` of one sample
 * @param place `{channelDim}` as `defaultPlace` gives it
 * @returns `{channels, height, width}`: an array of Float64Array
 */
export function channelsFirst(tensor, { channelDim = null } = {}) {
  const found = pictures({ channelDim, ...tensor });
  if (!found) throw new RangeError(`A value of shape ${tensor.shape.join("×")} has no height and width. Choose a module before the pooling.`);
  return found;
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
