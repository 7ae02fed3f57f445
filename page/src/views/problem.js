// The last failure, in the server's own words.
import { useEffect } from "preact/hooks";
import { html } from "../html.js";
import { problem } from "../work.js";

const RETRY_MS = 3000;

/** `onRetry` runs when the user asks, and by itself where the server did not answer. */
export function Problem({ onRetry }) {
  const failed = problem.value;
  useEffect(() => {
    if (failed?.code !== "UNAVAILABLE") return undefined;
    const timer = setTimeout(onRetry, RETRY_MS);
    return () => clearTimeout(timer);
  }, [failed]);
  if (!failed) return null;
  return html`
    <div class="problem" role="alert"><strong>${[failed.what, failed.code].filter(Boolean).join(": ")}</strong><p>${failed.text}</p>
      <button onClick=${onRetry}>Try again</button></div>`;
}
