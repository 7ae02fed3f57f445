// What waits on the server, who computes, and what its caches have: `GetServerStatusResponse`.
import { count, html, number } from "../html.js";
import { Table } from "./table.js";

/** A number of bytes with its unit. */
export const bytes = (value) => {
  const exponent = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, Number(value))) / 10)));
  return `${number(Number(value) / 2 ** (10 * exponent), 4)} ${["B", "KiB", "MiB", "GiB", "TiB"][exponent]}`;
};

const seconds = (value) => `${number(value, 3)} s`;
const percent = (share) => `${Math.round(100 * share)} %`;

const QUEUES = [
  { title: "model", cell: (one) => one.modelId },
  { title: "running", isNumber: true, cell: (one) => `${one.leasedCount} of ${one.replicaCount}` },
  { title: "waiting", isNumber: true, cell: (one) => count(one.waitingCount) },
  { title: "work left", isNumber: true, cell: (one) => seconds(one.pendingS) },
];

const callerColumns = (total) => [
  { title: "caller", cell: (one) => one.caller || "(the server)" },
  { title: "calls", isNumber: true, cell: (one) => count(one.callCount) },
  { title: "waiting", isNumber: true, cell: (one) => count(one.waitingCount) },
  { title: "memory", isNumber: true, cell: (one) => bytes(one.byteCount) },
  { title: "work left", isNumber: true, cell: (one) => seconds(one.pendingS) },
  { title: "used in 1 min", isNumber: true, cell: (one) => seconds(one.usedS) },
  { title: "share", isNumber: true, cell: (one) => percent(total.usedS ? one.usedS / total.usedS : 0) },
];

const CACHES = [
  { title: "cache", cell: (one) => one.name },
  { title: "entries", isNumber: true, cell: (one) => count(one.entryCount) },
  { title: "size", isNumber: true, cell: (one) => (one.maxBytes ? `${bytes(one.byteCount)} of ${bytes(one.maxBytes)}` : "off") },
  { title: "hits", isNumber: true, cell: (one) => count(one.hitCount) },
  { title: "misses", isNumber: true, cell: (one) => count(one.missCount) },
  { title: "hit rate", isNumber: true, cell: ({ hitCount, missCount }) => (hitCount + missCount ? percent(Number(hitCount) / Number(hitCount + missCount)) : "") },
];

export function ServerStatus({ status: { queues, callers, total, caches } }) {
  return html`
    <h3>Queues</h3><${Table} label="Queues" columns=${QUEUES} rows=${queues} keyOf=${(one) => one.modelId} />
    <h3>Callers</h3>
    ${callers.length
      ? html`<${Table} label="Callers" columns=${callerColumns(total)} rows=${callers} keyOf=${(one) => one.caller} />
        <p class="hint">Share: of the computing of the last minute. Work left is estimated from earlier passes.</p>`
      : html`<p class="hint">Nobody has computed anything in the last minute.</p>`}
    <h3>Caches</h3><${Table} label="Caches" columns=${CACHES} rows=${caches} keyOf=${(one) => one.name} />`;
}
