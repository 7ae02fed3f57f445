// Tensors as files of NumPy: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
const TYPES = {
  Float32Array: "<f4", Float64Array: "<f8", Uint8Array: "|u1", Int8Array: "|i1", Int16Array: "<i2", Int32Array: "<i4",
};

/** A tensor as the bytes of a `.npy` file. */
export function npy({ shape, values, own = { type: TYPES[values.constructor.name], values } }) {
  const { type } = own;
  const text = `{'descr': '${type}', 'fortran_order': False, 'shape': (${shape.map((length) => `${length},`).join(" ")}), }`;
  const length = Math.ceil((10 + text.length + 1) / 64) * 64 - 10;
  const head = new TextEncoder().encode(`\x93NUMPY\x01\x00??${text.padEnd(length - 1)}\n`);
  // The first character has two bytes in UTF-8; the format wants one.
  const bytes = head.subarray(1);
  bytes[0] = 0x93;
  new DataView(bytes.buffer, bytes.byteOffset).setUint16(8, length, true);
  return new Blob([bytes, own.values]);
}

/** Gives the user a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
