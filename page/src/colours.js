// Values as pixels, in viridis: even to the eye, and readable without colour vision.

// A polynomial of degree 6 for each of red, green and blue, by Matt Zucker (https://www.shadertoy.com/view/WlfXRN, CC0).
const VIRIDIS = [
  [0.2777273272, 0.0054073445, 0.3340998053],
  [0.1050930431, 1.4046135299, 1.3845901626],
  [-0.3308618287, 0.2148475595, 0.0950951630],
  [-4.6342304990, -5.7991009734, -19.3324409563],
  [6.2282699363, 14.1799333668, 56.6905526007],
  [4.7763849973, -13.7451453776, -65.3530326334],
  [-5.4354558560, 4.6458526122, 26.3124352496],
];

const packed = (red, green, blue) => (255 << 24) | (blue << 16) | (green << 8) | red;

const SEQUENTIAL = Uint32Array.from({ length: 256 }, (_, step) => {
  const [red, green, blue] = [0, 1, 2].map((part) => {
    const share = VIRIDIS.reduceRight((sum, row) => sum * (step / 255) + row[part], 0);
    return Math.round(255 * Math.min(1, Math.max(0, share)));
  });
  return packed(red, green, blue);
});

// Blue, white, orange: for differences, with limits that are equal on both sides of 0.
const DIVERGING = Uint32Array.from({ length: 256 }, (_, step) => {
  const share = (step - 127.5) / 127.5;
  const [red, green, blue] = share < 0 ? [33, 102, 172] : [200, 85, 0];
  const mixed = (part) => Math.round(247 + (part - 247) * Math.abs(share));
  return packed(mixed(red), mixed(green), mixed(blue));
});

const PALETTES = { sequential: SEQUENTIAL, diverging: DIVERGING };

const NOT_FINITE = 0xff0000ff; // red

/**
 * Draws values, row by row, into a canvas of one pixel for each; from `low` to `high`.
 * @param palette `sequential`, dark to bright, or `diverging`, for differences
 */
export function draw(canvas, { values, height, width }, [low, high], palette = "sequential") {
  const table = PALETTES[palette];
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = high > low ? 255 / (high - low) : 0;
  for (let at = 0; at < pixels.length; at += 1) {
    const step = Math.round((values[at] - low) * scale);
    pixels[at] = Number.isFinite(values[at]) ? table[Math.min(255, Math.max(0, step))] : NOT_FINITE;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Relative luminance above which black text has more contrast than white text: of either there is then 4.5 to 1, as WCAG asks. */
const BRIGHT = 0.179;

const linear = (part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);

/** The colour of one value, and of text on it, for styles. */
export function colourOf(value, [low, high]) {
  const step = high > low ? Math.round((255 * (value - low)) / (high - low)) : 0;
  const pixel = Number.isFinite(value) ? SEQUENTIAL[Math.min(255, Math.max(0, step))] : NOT_FINITE;
  const [red, green, blue] = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  const luminance = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return { background: `rgb(${red} ${green} ${blue})`, text: luminance > BRIGHT ? "#000" : "#fff" };
}
