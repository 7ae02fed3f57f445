// Templates without a build step of their own: https://github.com/developit/htm
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);
/** A value, rounded. */
export const number = (value, digits = 4) => Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
/** A count, short: 9,408 or 11.7M. */
export const count = (value) =>
  Number(value) < 10_000 ? Number(value).toLocaleString("en")
    : Number(value).toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
