// What the page shows. What a link can bring back stands in the address, behind `#`.
import { batch, computed, effect, signal } from "@preact/signals";
import { Statistic } from "../gen/trocar_api/v1/statistics_pb.js";
import { SelectorKind } from "../gen/trocar_api/v1/tap_pb.js";
import * as api from "./api.js";
import { softmax } from "./tensors.js";

const TOKEN_KEY = "trocar-token";

/** What a link brings back; texts, empty where nothing is chosen. */
export const view = {
  model: signal(""), module: signal(""), channel: signal(""), sample: signal(""), text: signal(""),
  search: signal(""), order: signal("strongest"), scale: signal("common"),
};

export const token = signal("");
export const server = signal(null);
export const models = signal([]);
export const modules = signal([]);
export const categories = signal([]);
/** `{kind: "image", name, bytes, url}` or `{kind: "text", name, text}`; null without one. */
export const input = signal(null);
/** Paths that the search stands for; null without a search. */
export const found = signal(null);
/** `{path, maps, timing, processed}` of the last pass; null without one. */
export const result = signal(null);
export const problem = signal(null);
export const working = signal("");
export const isTokenWanted = signal(false);

export const model = computed(() => models.value.find((one) => one.modelId === view.model.value) ?? null);
export const module = computed(() => modules.value.find((one) => one.path === view.module.value) ?? null);
export const takesText = computed(() => model.value?.inputs.some((one) => one.name === "input_ids") ?? false);
export const takesImages = computed(() => Boolean(model.value?.preprocessing) || !takesText.value);

/** The values of the chosen module in the last pass. */
export const collected = computed(() =>
  result.value?.path === view.module.value && view.module.value
    ? result.value.maps.filter(({ map }) => map.path === view.module.value) : []);
/** `[number, name, score]` of the best classes in the last pass; empty where the output is no scores of classes. */
export const best = computed(() => {
  const outputs = result.value?.maps.filter(({ map }) => map.path === "") ?? [];
  const logits = outputs.find(({ map }) => map.pick === '["logits"]') ?? (outputs.length === 1 ? outputs[0] : null);
  if (logits?.tensor?.shape.length !== 2 || logits.tensor.shape[1] < 2) return [];
  return [...softmax(logits.tensor.values).entries()].sort(([, a], [, b]) => b - a).slice(0, 5)
    .map(([number, score]) => [number, categories.value[number] ?? `class ${number}`, score]);
});

export const options = () => ({ token: token.value });

/** Does something that takes time: says so meanwhile, and shows what went wrong. */
export async function during(what, work) {
  working.value = what;
  problem.value = null;
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (error.code === "UNAUTHENTICATED") isTokenWanted.value = true;
    problem.value = { what, code: error.code ?? error.name, text: error.message };
    return undefined;
  } finally {
    if (working.value === what) working.value = "";
  }
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("token")) {
    // As `trocar page` opens it; it does not stay in the address, where it would be copied with a link.
    setToken(given.get("token"));
    given.delete("token");
    history.replaceState(null, "", `#${given}`);
  }
  batch(() => {
    for (const [name, one] of Object.entries(view)) {
      if (given.has(name)) one.value = given.get(name);
    }
  });
}

function writeAddress() {
  const shown = Object.entries(view).filter(([, one]) => one.value !== "").map(([name, one]) => [name, one.value]);
  history.replaceState(null, "", `#${new URLSearchParams(shown)}`);
}

export function setToken(text) {
  token.value = text;
  sessionStorage.setItem(TOKEN_KEY, text);
}

/** Reads the address and keeps it as what is shown changes. */
export function start() {
  token.value = sessionStorage.getItem(TOKEN_KEY) ?? "";
  readAddress();
  effect(writeAddress);
  addEventListener("hashchange", readAddress);
}

/** Asks the server for its models and shows one. */
export async function connect() {
  const came = await during("Asking the server for its models", async () => {
    const [info, listed] = await Promise.all([api.serverInfo(options()), api.listModels(options())]);
    return { info, listed };
  });
  if (!came) return;
  isTokenWanted.value = false;
  server.value = came.info;
  models.value = came.listed;
  const usable = came.listed.filter((one) => one.state === 3);
  if (!model.value) view.model.value = (usable[0] ?? came.listed[0])?.modelId ?? "";
  await showModel();
}

export async function chooseModel(modelId) {
  batch(() => {
    view.model.value = modelId;
    for (const one of [view.module, view.channel, view.search]) one.value = "";
    result.value = null;
    found.value = null;
  });
  await showModel();
}

async function showModel() {
  const modelId = view.model.value;
  if (!modelId) return;
  modules.value = [];
  await during(`Reading the modules of ${modelId}`, async () => {
    const [listed, described] = await Promise.all([
      api.listModules(modelId, options()), api.getModel(modelId, options()),
    ]);
    batch(() => {
      modules.value = listed;
      categories.value = described.categories;
    });
  });
  await bringInput();
}

/** Brings the input that the address names. */
async function bringInput() {
  if (view.text.value && takesText.value) await useText(view.text.value);
  else if (view.sample.value && takesImages.value) await useSample(view.sample.value);
  else if (input.value) await run();
}

export async function useSample(name) {
  const reply = await fetch(`/${name}.jpg`);
  if (!reply.ok) {
    problem.value = { what: "Reading a sample", code: "NOT_FOUND", text: `There is no sample ${name}.` };
    return;
  }
  await useImage(new Uint8Array(await reply.arrayBuffer()), `${name}.jpg`, name);
}

export async function useImage(bytes, name, sample = "") {
  if (input.value?.url) URL.revokeObjectURL(input.value.url);
  batch(() => {
    input.value = { kind: "image", name, bytes, url: URL.createObjectURL(new Blob([bytes])) };
    view.sample.value = sample;
    view.text.value = "";
  });
  await run();
}

export async function useText(text) {
  batch(() => {
    input.value = { kind: "text", name: "the text", text };
    view.text.value = text;
    view.sample.value = "";
  });
  await run();
}

export async function chooseModule(path) {
  batch(() => {
    view.module.value = path;
    view.channel.value = "";
  });
  await run();
}

let current = null;

/** Runs a pass for what is chosen; one that is under way ends. */
export async function run() {
  if (!input.value || !view.model.value) return;
  current?.abort();
  const own = new AbortController();
  current = own;
  const path = view.module.value;
  const taps = [...(path ? [moduleTap(path)] : []), { selector: "/out", values: true }];
  const came = await during(`Running ${view.model.value}`, () =>
    api.extract(view.model.value, input.value, taps, { ...options(), signal: own.signal }));
  if (came && current === own) result.value = { ...came, path };
}

const HISTOGRAM_BINS = 32;
const STATISTICS = [Statistic.MEAN, Statistic.STD, Statistic.MIN, Statistic.MAX, Statistic.ZERO_FRACTION, Statistic.HISTOGRAM];

/** The output of a module, with its statistics. In parts: paths may have characters that a selector quotes. */
function moduleTap(path) {
  const parts = { kind: SelectorKind.MODULE, path, port: "out" };
  return { parts, values: true, statistics: STATISTICS, histogram: { binCount: HISTOGRAM_BINS } };
}

/** Asks the server which modules a selector stands for. */
export async function search(selector) {
  view.search.value = selector;
  if (!selector.trim()) {
    found.value = null;
    return;
  }
  const words = selector.trim().toLowerCase();
  const isPlain = /^[\w.]+$/.test(words);
  if (isPlain || !input.value) {
    found.value = modules.value.map((one) => one.path).filter((path) => path.toLowerCase().includes(words));
    return;
  }
  const paths = await during("Asking what the selector stands for", () =>
    api.select(view.model.value, input.value, selector.trim(), options()));
  found.value = paths ?? [];
}
