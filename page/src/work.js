// Work that takes time: what is under way, and what went wrong.
import { computed, signal } from "@preact/signals";

const underWay = signal([]);

/** What the page waits for; empty when it waits for nothing. */
export const working = computed(() => underWay.value.at(-1)?.what ?? "");
/** `{what, code, text}` of the last failure, its code empty for a mistake that the page finds; null without one. */
export const problem = signal(null);

/**
 * Does something that takes time: says so meanwhile, and shows what went wrong.
 * @returns what `work` returns; undefined where it failed or was ended by its signal
 */
export async function during(what, work) {
  const own = { what };
  underWay.value = [...underWay.value, own];
  problem.value = null;
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") problem.value = { what, code: error.code ?? (error instanceof RangeError ? "" : error.name), text: error.message };
    return undefined;
  } finally {
    underWay.value = underWay.value.filter((one) => one !== own);
  }
}

/** Repeats work of which only the last counts: a new start ends the one before. */
export class Latest {
  isRunning = false;

  /** @returns as `during`; undefined also where another start came meanwhile */
  async start(what, work) {
    this.current?.abort();
    const own = new AbortController();
    this.current = own;
    this.isRunning = true;
    const done = await during(what, () => work(own.signal));
    if (this.current !== own) return undefined;
    this.isRunning = false;
    return done;
  }

  /** Ends what is under way. */
  stop() {
    this.current?.abort();
    this.current = null;
    this.isRunning = false;
  }
}
