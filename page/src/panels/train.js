// Train: the caller's trainers, and curves of their fits as they run.
import { batch, signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { parameters } from "../address.js";
import { python, shell } from "../code.js";
import { count, html, number } from "../html.js";
import { connect, options } from "../state.js";
import { COMMANDS, controlFit, curvesOf, fitEvents, listTrainers, publish } from "../trainers.js";
import { Confirmed } from "../views/confirmed.js";
import { Copies } from "../views/copy.js";
import { Curves } from "../views/curves.js";
import { SaveFacts } from "../views/save.js";
import { Table } from "../views/table.js";
import { during, problem } from "../work.js";

const LIST_MS = 3000;
const DRAW_MS = 200;
const UNKNOWN_FIT = "NOT_FOUND";
/** The call may have been carried out. The alert goes when the page reaches the server again. */
const UNANSWERED = ["UNAVAILABLE", "DEADLINE_EXCEEDED"];

const chosen = parameters("train", { trainer: "" });
const trainers = signal(null);
const events = signal([]);
/** What became of publishing. */
const note = signal("");
/** Why there are no events, in the server's words. */
const missing = signal("");

const COLUMNS = [
  { title: "trainer", cell: (one) => html`<button class="link" aria-pressed=${String(one.trainerId === chosen.trainer.value)} onClick=${() => { chosen.trainer.value = one.trainerId; }}>${one.trainerId.slice(0, 8)}</button>` },
  { title: "model", cell: (one) => one.spec?.modelId },
  { title: "state", cell: (one) => one.state },
  { title: "updates", isNumber: true, cell: (one) => count(one.updateCount) },
  { title: "trained elements", isNumber: true, cell: (one) => count(one.trainableElementCount) },
  { title: "own memory", isNumber: true, cell: (one) => `${number(Number(one.byteCount) / 2 ** 20, 3)} MiB` },
  { title: "problem", cell: (one) => one.problem },
];

const refresh = () => during("Listing your trainers", async () => { trainers.value = await listTrainers(options()); });

/** Lists again while the panel is shown; what fails is told by what the user does. */
function useTrainers() {
  useEffect(() => {
    refresh();
    const timer = setInterval(async () => {
      trainers.value = await listTrainers(options()).catch(() => trainers.value);
    }, LIST_MS);
    return () => clearInterval(timer);
  }, []);
}

/** Follows the newest fit of a trainer, and the next one when it begins. */
function useEvents(trainer) {
  const own = useRef({ isFollowing: false, isFirst: true, controller: new AbortController() }).current;
  useEffect(() => () => {
    own.controller.abort();
    batch(() => {
      events.value = [];
      note.value = missing.value = "";
    });
  }, []);
  useEffect(() => {
    if (own.isFollowing || !(own.isFirst || trainer.state === "fitting")) return;
    own.isFollowing = true;
    own.isFirst = false;
    follow(trainer.trainerId, own.controller.signal).finally(() => { own.isFollowing = false; });
  }, [trainer]); // another object each time the trainers are listed
}

async function follow(trainerId, signal) {
  const found = [];
  events.value = []; // those of the fit before
  const show = () => { if (!signal.aborted && found.length) events.value = [...found]; };
  const drawing = setInterval(() => { if (found.length !== events.value.length) show(); }, DRAW_MS);
  try {
    for await (const event of fitEvents(trainerId, options(signal))) {
      found.push(event);
      missing.value = "";
    }
  } catch (error) {
    if (error.code === UNKNOWN_FIT) missing.value = error.message;
    else if (error.name !== "AbortError") problem.value = { what: "Watching a fit", code: error.code ?? error.name, text: error.message };
  } finally {
    clearInterval(drawing);
    show();
  }
}

function Controls({ trainer }) {
  const [name, setName] = useState("");
  const told = (what, work) => during(what, work).then(async (reply) => {
    if (reply !== undefined) await refresh();
    return reply;
  });
  const control = (command) => told(`Asking to ${command} the fit`, () => controlFit(trainer.trainerId, COMMANDS[command], options()));
  const send = async () => {
    note.value = "";
    const modelId = await told(`Publishing ${name}`, () => publish(trainer.trainerId, name, options()));
    if (modelId) {
      note.value = `Published as ${modelId}.`;
      await connect();
    } else if (UNANSWERED.includes(problem.value?.code)) {
      note.value = `No answer came: ${name} may be published all the same. Look for it among the models before you publish again.`;
    }
  };
  return html`
    <div class="controls">
      <button disabled=${trainer.state !== "fitting"} onClick=${() => control("pause")}>Pause</button>
      <button disabled=${trainer.state !== "paused"} onClick=${() => control("resume")}>Resume</button>
      <${Confirmed} label="Cancel the fit" question="End this fit? The weights stay as they are." onConfirm=${() => control("cancel")} disabled=${!["fitting", "paused"].includes(trainer.state)} />
      <label>Publish as <input value=${name} pattern="[a-z0-9][a-z0-9._-]*" maxlength="63" onInput=${(event) => setName(event.target.value)} /></label>
      <${Confirmed} label="Publish" question="Host a copy of these weights as ${name}, for every caller?" onConfirm=${send} disabled=${!name} />
    </div>`;
}

const trainerPython = ({ trainerId }) => [
  "import trocar", "", "client = trocar.connect()", `trainer = client.trainer(${python(trainerId)})`,
  "for event in trainer.watch():", "    print(event.number, event.kind, dict(event.facts))", "",
].join("\n");

function Fit({ trainer }) {
  useEvents(trainer);
  const rules = trainer.spec?.gradientEdits.map((one) => one.name) ?? [];
  const last = events.value.at(-1);
  const plain = () => events.value.map(({ number: at, kind, timeS, facts }) => ({ number: Number(at), kind, time_s: timeS, facts }));
  return html`
    <section aria-label="Fit of ${trainer.trainerId}">
      <h2>${trainer.trainerId} <small>${trainer.spec?.modelId}, ${trainer.state}</small></h2>
      <${Copies} python=${trainerPython(trainer)} command=${["trocar", "trainers", "watch", trainer.trainerId].map(shell).join(" ")} />
      <${Controls} key=${trainer.trainerId} trainer=${trainer} />
      <p class="hint" role="status">${[note.value, missing.value, last && `Event ${Number(last.number)}: ${last.kind}${last.facts.message ? `, ${last.facts.message}` : ""}`].filter(Boolean).join(" ")}</p>
      <div class="all-curves">${curvesOf(events.value, rules).map((one) => html`<${Curves} key=${one.label} label=${one.label} series=${one.series} />`)}</div>
      ${events.value.length > 0 && html`<${SaveFacts} name="events.json" make=${plain} />`}
    </section>`;
}

function Train() {
  useTrainers();
  if (!trainers.value) return null;
  const trainer = trainers.value.find((one) => one.trainerId === chosen.trainer.value);
  return html`
    ${trainers.value.length === 0 && html`<p class="hint">You have no trainers. <code>trocar train</code> and <code>client.trainer(...)</code> make one.</p>`}
    ${trainers.value.length > 0 && html`<${Table} label="Your trainers" columns=${COLUMNS} rows=${trainers.value} keyOf=${(one) => one.trainerId} />`}
    ${chosen.trainer.value && !trainer && html`<p class="hint">You have no trainer ${chosen.trainer.value}.</p>`}
    ${trainer && html`<${Fit} key=${trainer.trainerId} trainer=${trainer} />`}`;
}

export const train = { name: "train", title: "Train", View: Train, usesModel: false };
