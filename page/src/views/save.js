// A button that saves values to a file of the user.
import { html } from "../html.js";

/** @param make returns the file's content, bytes or a text */
export function Save({ name, make }) {
  const save = () => {
    const url = URL.createObjectURL(new Blob([make()]));
    const link = Object.assign(document.createElement("a"), { href: url, download: name });
    link.click();
    URL.revokeObjectURL(url);
  };
  return html`<button class="save" onClick=${save}>Save as ${name}</button>`;
}

const KINDS = new Map([[Float32Array, "<f4"], [Float64Array, "<f8"]]);

/** An array as NumPy's file: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html */
export function npy({ shape, values }) {
  const sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const head = `{'descr': '${KINDS.get(values.constructor)}', 'fortran_order': False, 'shape': (${sizes}), }`;
  const padded = `${head.padEnd(Math.ceil((head.length + 11) / 64) * 64 - 11)}\n`;
  const bytes = new Uint8Array(10 + padded.length + values.byteLength);
  bytes.set([0x93, ...new TextEncoder().encode("NUMPY"), 1, 0, padded.length & 0xff, padded.length >> 8]);
  bytes.set(new TextEncoder().encode(padded), 10);
  bytes.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), 10 + padded.length);
  return bytes;
}
