// Templates without a build step of their own: https://github.com/developit/htm
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);
const SMALL = 1e-4;
/** A value, rounded; 3.1e-5 where it would begin with many zeros. */
export function number(value, digits = 4) {
  const own = Number(value); // of a BigInt, too
  return own !== 0 && Math.abs(own) < SMALL
    ? Number(own.toPrecision(digits)).toExponential() : own.toLocaleString("en", { maximumSignificantDigits: digits });
}
/** A count, short: 9,408 or 11.7M. */
export const count = (value) =>
  Number(value) < 10_000 ? Number(value).toLocaleString("en")
    : Number(value).toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
