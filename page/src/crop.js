// The part of an image that a model sees: torchvision's resize and centre crop, on sizes alone.

/** Size after a resize of the shorter side, whose longer side is at most `longest`; or to (height, width). */
function resized({ resize, longest = 0 }, width, height) {
  if (resize.length === 2) return [resize[1], resize[0]];
  if (!resize.length) return [width, height];
  let [short] = resize;
  let long = Math.floor((short * Math.max(width, height)) / Math.min(width, height));
  if (longest && long > longest) [short, long] = [Math.floor((longest * short) / long), longest];
  return width <= height ? [short, long] : [long, short];
}

/**
 * @param preprocessing of a model; null for one that takes no images
 * @returns `{left, top, width, height}` as shares of the image, beyond it where the crop is padded; null where all of it is seen
 */
export function cropOf(preprocessing, width, height) {
  if (!preprocessing?.crop.length || !width) return null;
  const [fullWidth, fullHeight] = resized(preprocessing, width, height);
  const [cropHeight, cropWidth] = preprocessing.crop;
  return {
    left: Math.round((fullWidth - cropWidth) / 2) / fullWidth, top: Math.round((fullHeight - cropHeight) / 2) / fullHeight,
    width: cropWidth / fullWidth, height: cropHeight / fullHeight,
  };
}
