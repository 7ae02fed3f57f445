// The port of a model's images, which need not be the first parameter of its forward.
export const FIRST = "/in";
export const IMAGES = "pixel_values";
const NAMED = `${FIRST}(${IMAGES})`;

/** The selector of the images of a model, as `/in` or by name; @param inputs those of the model's description */
export const imagePort = (inputs) => (inputs.some(({ name }) => name === IMAGES) ? NAMED : FIRST);
