// The part of the state that a link brings back: named texts in the address, behind `#`.
import { batch, effect, signal } from "@preact/signals";

/** Signal and initial text by name in the address. */
const entries = new Map();

/**
 * Declares texts that links bring back.
 * @param prefix a panel's name, or empty for what all panels share
 * @param initials the text of each while nothing is chosen; it is left out of links
 * @returns a signal for each name
 */
export function parameters(prefix, initials) {
  return Object.fromEntries(Object.entries(initials).map(([name, initial]) => {
    const one = signal(initial);
    entries.set(prefix ? `${prefix}.${name}` : name, { one, initial });
    return [name, one];
  }));
}

function read(given) {
  batch(() => {
    for (const [name, { one, initial }] of entries) one.value = given.get(name) ?? initial;
  });
}

function written() {
  const shown = [...entries].filter(([, { one, initial }]) => one.value !== initial);
  return `#${new URLSearchParams(shown.map(([name, { one }]) => [name, one.value]))}`;
}

/**
 * Reads the address, and writes it whenever a text changes.
 * @param takeToken gets the token of an address that has one; it is then removed, so that no link has it
 * @param arrive runs when the user goes to another address of the page
 */
export function startAddress(takeToken, arrive) {
  const take = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    if (given.has("token")) takeToken(given.get("token"));
    read(given);
  };
  take();
  effect(() => {
    const address = written();
    if (address !== location.hash) history.replaceState(null, "", address);
  });
  addEventListener("hashchange", () => {
    take();
    arrive();
  });
}
