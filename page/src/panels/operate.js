// Operate: what a server runs, for those with the scope admin.
import { computed, effect, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ModelState } from "../../gen/trocar_api/v1/model_pb.js";
import { DrainAction, ServerService } from "../../gen/trocar_api/v1/server_pb.js";
import * as api from "../api.js";
import { count, html, number } from "../html.js";
import { connect, models, options, server } from "../state.js";
import { Confirmed } from "../views/confirmed.js";
import { Copies } from "../views/copy.js";
import { bytes, ServerStatus } from "../views/server_status.js";
import { Table } from "../views/table.js";
import { call } from "../wire.js";
import { during } from "../work.js";

const LOOK_MS = 2000;
const REFUSALS = ["PERMISSION_DENIED", "UNAUTHENTICATED"];

/** `DrainResponse`; null for callers without the scope. */
const state = signal(null);
const changes = signal(null);
/** Whether the last look failed. */
const isLost = signal(false);
/** `GetServerStatusResponse`; null until it is known. */
const status = signal(null);

const ask = (action) => call(ServerService.method.drain, { action }, options());

// Whoever may ask for the state may operate. Others are not told of what they cannot do.
effect(() => {
  if (!server.value) return;
  ask(DrainAction.UNSPECIFIED).then((reply) => { state.value = reply; }, ({ code }) => { if (REFUSALS.includes(code)) state.value = null; });
});

const MODELS = [
  { title: "model", cell: (one) => one.modelId },
  { title: "state", cell: (one) => ModelState[one.state].toLowerCase() },
  { title: "weights", cell: (one) => one.weights },
  { title: "parameters", isNumber: true, cell: (one) => count(one.parameterCount) },
  { title: "memory", isNumber: true, cell: (one) => bytes(one.byteCount) },
  { title: "device", cell: (one) => one.device },
  { title: "error", cell: (one) => one.errorMessage },
];

const FEATURES = [
  { title: "feature", cell: (one) => one.name },
  { title: "on", cell: (one) => (one.isOn ? "yes" : "no") },
  { title: "why, and details", cell: (one) => one.reason },
];

const LIMITS = [
  { title: "limit", cell: ([name]) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`) },
  { title: "value", isNumber: true, cell: ([name, value]) => (/Bytes$/.test(name) ? bytes(value) : number(value, 12)) },
];

const limits = computed(() => Object.entries(server.value?.limits ?? {}).filter(([name]) => !name.startsWith("$")));

/** Looks again while the panel is shown. */
async function look() {
  const [reply, work, info, listed] = await Promise.all([
    ask(DrainAction.UNSPECIFIED), call(ServerService.method.getServerStatus, {}, options()), api.serverInfo(options()), api.listModels(options())]);
  isLost.value = false;
  state.value = reply;
  status.value = work;
  server.value = info;
  models.value = listed;
}

async function drain(action, what) {
  const reply = await during(what, () => ask(action));
  if (reply) state.value = reply;
}

async function reload() {
  changes.value = null;
  const reply = await during("Reloading the configuration", () => call(ServerService.method.reloadConfig, {}, options()));
  if (!reply) return;
  changes.value = reply.changes;
  await connect();
}

const Controls = ({ isDraining }) => html`
  <div class="controls">
    ${isDraining
      ? html`<button onClick=${() => drain(DrainAction.UNDO, "Accepting work again")}>Accept work again</button>`
      : html`<${Confirmed} label="Drain" question="Refuse new work? Calls that run go on; fits are saved and paused." onConfirm=${() => drain(DrainAction.START, "Draining")} />`}
    <${Confirmed} label="Reload the configuration" question="Read the configuration file again?" onConfirm=${reload} />
  </div>`;

const python = ["import trocar", "", "client = trocar.connect()", "print(client.status())", "print(client.server_info())", "print(client.models())", ""].join("\n");

function Operate() {
  useEffect(() => {
    const again = () => look().catch(() => { isLost.value = true; });
    again();
    const timer = setInterval(again, LOOK_MS);
    return () => clearInterval(timer);
  }, []);
  const { isDraining, runningCallCount, waitingFitCount } = state.value;
  return html`
    <section class="operate" aria-label="The server">
      <h2>Server ${server.value.serverId.slice(0, 8)} <small>${server.value.version}, torch ${server.value.torchVersion}, ${server.value.device}</small></h2>
      <${Copies} python=${python} command="trocar status" />
      ${isLost.value && html`<p role="status">The last look at the server failed: these numbers are older.</p>`}
      <dl class="statistics">
        <div><dt>work</dt><dd>${isDraining ? "refused: draining" : "accepted"}</dd></div>
        <div><dt>running calls</dt><dd>${runningCallCount}</dd></div><div><dt>waiting calls</dt><dd>${status.value?.total.waitingCount ?? ""}</dd></div>
        <div><dt>work left</dt><dd>${status.value ? `${number(status.value.total.pendingS, 3)} s` : ""}</dd></div><div><dt>waiting fits</dt><dd>${waitingFitCount}</dd></div>
        <div><dt>memory of models</dt><dd>${bytes(models.value.reduce((sum, one) => sum + one.byteCount, 0n))}</dd></div>
      </dl>
      <${Controls} isDraining=${isDraining} />
      ${changes.value && html`<p role="status">${changes.value.length ? changes.value.join("; ") : "Nothing has changed."}</p>`}
      ${status.value && html`<${ServerStatus} status=${status.value} />`}
      <h3>Models</h3><${Table} label="Models" columns=${MODELS} rows=${models.value} keyOf=${(one) => one.modelId} />
      <h3>Features</h3><${Table} label="Features" columns=${FEATURES} rows=${server.value.features} keyOf=${(one) => one.name} />
      <h3>Limits of a call and of a caller</h3><${Table} label="Limits" columns=${LIMITS} rows=${limits.value} keyOf=${([name]) => name} />
    </section>`;
}

export const operate = { name: "operate", title: "Operate", View: Operate, usesModel: false, isOffered: computed(() => state.value !== null) };
