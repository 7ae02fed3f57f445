// What all panels share: the server, the model, the input, the module, and the pass that runs with them.
import { batch, computed, signal } from "@preact/signals";
import { Statistic } from "../gen/trocar_api/v1/statistics_pb.js";
import { SelectorKind } from "../gen/trocar_api/v1/tap_pb.js";
import { parameters, startAddress } from "./address.js";
import * as api from "./api.js";
import { channelDimOf } from "./attribution/place.js";
import { softmax } from "./tensors.js";
import { during, Latest, problem } from "./work.js";

const TOKEN_KEY = "trocar-token";
/** Characters of a header's value, as browsers and gRPC send it. */
const TOKEN = /^[\x21-\x7e]*$/;
const LOADING = 2;
const LOADED = 3;

/** What a link brings back, of what all panels share. */
export const view = parameters("", {
  panel: "look", model: "", module: "", port: "out", channel: "", sample: "", text: "", search: "",
});

export const token = signal("");
export const server = signal(null);
export const models = signal([]);
export const modules = signal([]);
export const categories = signal([]);
/** The model that `modules` and `categories` are of; empty until they are read. */
const described = signal("");
/** `{kind: "image", name, bytes, url}` or `{kind: "text", name, text}`; null without one. */
export const input = signal(null);
/** A second image of the user's own, like `input`; null without one. No link has it. */
export const second = signal(null);
/** Paths that the search stands for; null without a search. */
export const found = signal(null);
/** `{place, input, model, maps, timing, processed}` of the last pass; null without one. */
export const result = signal(null);

export const isTokenWanted = computed(() => problem.value?.code === "UNAUTHENTICATED");
export const model = computed(() => models.value.find((one) => one.modelId === view.model.value) ?? null);
export const module = computed(() => modules.value.find((one) => one.path === view.module.value) ?? null);
export const takesText = computed(() => model.value?.inputs.some((one) => one.name === "input_ids") ?? false);
export const takesImages = computed(() => Boolean(model.value?.preprocessing) || !takesText.value);

const place = computed(() => [view.model.value, view.module.value, view.port.value].join("\n"));

/** Whether `modules` and `categories` are those of the chosen model. */
export const isDescribed = computed(() => Boolean(described.value) && described.value === view.model.value);

/** The last pass where it is of the shown input and model; null while there is none, as in the first pass of a new input. */
export const current = computed(() =>
  result.value?.input === input.value && result.value.model === view.model.value ? result.value : null);

/** The values of the chosen module in the last pass. */
export const collected = computed(() =>
  current.value?.place === place.value && view.module.value
    ? current.value.maps.filter(({ map }) => map.path !== "") : []);
/** Paths of modules that compute an attention. */
export const attentions = signal([]);
/** Whether the chosen module has one attention to show, its own or that of a module inside. */
export const hasAttention = computed(() => {
  const path = view.module.value;
  return attentions.value.filter((one) => one === path || one.startsWith(`${path}.`)).length === 1;
});
/** The tokens of a text, as the vocabulary spells them; null where the input has none. */
export const tokens = computed(() => current.value?.processed[0]?.samples[0]?.tokens ?? null);
/** `[number, name, score]` of the best classes in the last pass; empty where the output is no scores of classes. */
export const best = computed(() => bestClasses(current.value?.maps));

/** The scores of all classes in a pass that has the model's output; null where that is no scores of classes. */
export function scoresOf(maps) {
  const outputs = maps?.filter(({ map }) => map.path === "" && map.port === "out") ?? [];
  const logits = outputs.find(({ map }) => map.pick === '["logits"]') ?? (outputs.length === 1 ? outputs[0] : null);
  if (logits?.tensor?.shape.length !== 2 || logits.tensor.shape[1] < 2) return null;
  return softmax(logits.tensor.values.subarray(0, logits.tensor.shape[1]));
}

/** As `best`, of any pass; `names` are those of its model's classes. */
export const bestClasses = (maps, names = categories.value) =>
  [...(scoresOf(maps)?.entries() ?? [])].sort(([, a], [, b]) => b - a).slice(0, 5)
    .map(([number, score]) => [number, names[number] ?? `class ${number}`, score]);

/** Options of every call. */
export const options = (signal) => ({ token: token.value, signal });

/** Takes a token, and returns whether it can be one; otherwise it says so, beside the form that asks for another. */
export function setToken(text) {
  if (!TOKEN.test(text)) {
    problem.value = { what: "Taking the token", code: "UNAUTHENTICATED", text: "A token has only letters without accents, digits and signs such as _: copy it again, whole." };
    return false;
  }
  token.value = text;
  sessionStorage.setItem(TOKEN_KEY, text);
  return true;
}

/** Whether a link had another token than the one in use, which stays: calls would else be made in another's name. */
export const isLinkTokenLeft = signal(false);

function takeLinkToken(text) {
  isLinkTokenLeft.value = Boolean(token.value) && token.value !== text;
  if (!isLinkTokenLeft.value) setToken(text);
}

/** Reads the address and keeps it as what is shown changes. */
export function start() {
  token.value = sessionStorage.getItem(TOKEN_KEY) ?? "";
  startAddress(takeLinkToken, showModel);
}

/** Asks the server for its models and shows one. What is shown stays where the server does not answer. */
export async function connect() {
  const reply = await during("Asking the server for its models", async () => {
    const [info, listed] = await Promise.all([api.serverInfo(options()), api.listModels(options())]);
    return { info, listed };
  });
  if (!reply) return;
  server.value = reply.info;
  models.value = reply.listed;
  const usable = reply.listed.filter((one) => one.state === LOADED);
  if (!model.value) view.model.value = (usable[0] ?? reply.listed[0])?.modelId ?? "";
  if (model.value?.state === LOADING) { // as after a start of the server; the page asks again by itself
    problem.value = { what: `Waiting for ${view.model.value}`, code: "UNAVAILABLE", text: "The server is loading this model." };
    return;
  }
  await showModel();
}

export async function chooseModel(modelId) {
  batch(() => {
    view.model.value = modelId;
    view.module.value = view.channel.value = view.search.value = "";
    view.port.value = "out";
    found.value = null;
  });
  await showModel();
}

/** Drops what is of another model, so that nothing of it stands under the new one's name. */
function forget() {
  for (const one of [pass, searching, reading]) one.stop();
  searched = "";
  batch(() => {
    result.value = found.value = null;
    described.value = "";
    modules.value = categories.value = attentions.value = [];
  });
}

async function showModel() {
  const modelId = view.model.value;
  if (!modelId) return;
  if (described.value !== modelId) forget();
  const reply = await during(`Reading the modules of ${modelId}`, async () => {
    const [listed, described] = await Promise.all([
      api.listModules(modelId, options()), api.getModel(modelId, options()),
    ]);
    return { listed, described };
  });
  if (!reply || view.model.value !== modelId) return;
  batch(() => {
    described.value = modelId;
    modules.value = reply.listed;
    categories.value = reply.described.categories;
  });
  await bringInput();
  await search(view.search.value);
}

/** Brings the input that the address names. */
async function bringInput() {
  if (view.text.value && takesText.value) await useText(view.text.value);
  else if (view.sample.value && takesImages.value) await useSample(view.sample.value);
  else if (input.value && (input.value.kind === "text" ? takesText.value : takesImages.value)) await run();
}

/** The page's own images. */
export const SAMPLES = ["cat", "coffee", "astronaut"];

/** An image of the page's own as an input. */
export async function readSample(name, signal) {
  const reply = await fetch(`/${name}.jpg`, { signal });
  if (!reply.ok) throw Object.assign(new Error(`There is no sample ${name}.`), { code: "NOT_FOUND" });
  return { kind: "image", name: `${name}.jpg`, bytes: new Uint8Array(await reply.arrayBuffer()), url: `/${name}.jpg` };
}

/** A file of the user's own as an input; its `url` is to be revoked when it is no longer shown. */
export const imageInput = (bytes, name) =>
  ({ kind: "image", name, bytes, url: URL.createObjectURL(new Blob([bytes])) });

export const textInput = (text) => ({ kind: "text", name: "the text", text });

const reading = new Latest();

export async function useSample(name) {
  const sample = await reading.start("Reading a sample", (signal) => readSample(name, signal));
  if (sample) await useInput(sample, { sample: name });
}

/** Takes a file that was dropped or chosen, if any. */
export async function useFile(file) {
  const content = file && await reading.start("Reading the image", () => file.arrayBuffer());
  if (content) await useInput(imageInput(new Uint8Array(content), file.name));
}

export const useText = (text) => useInput(textInput(text), { text });

/** Takes an input and runs a pass; `named` says how a link names it. */
async function useInput(given, { sample = "", text = "" } = {}) {
  reading.stop(); // of an input that was chosen before this one
  if (input.value?.url) URL.revokeObjectURL(input.value.url);
  batch(() => {
    input.value = given;
    view.sample.value = sample;
    view.text.value = text;
  });
  await run();
}

export async function chooseModule(path) {
  batch(() => {
    view.module.value = path;
    view.port.value = "out";
    view.channel.value = "";
  });
  await run();
}

export async function choosePort(port) {
  batch(() => {
    view.port.value = port;
    view.channel.value = "";
  });
  await run();
}

const pass = new Latest();

/**
 * What a pass collects beside the chosen module: the model's output. That of a language model has a number for each token
 * of its vocabulary at each position, which no panel shows: its tokens' ids, as a pass collects something.
 */
export const beside = () => (model.value?.generates ? "/in(input_ids)" : "/out");

/** Whether a value is one that a pass collects beside those that were chosen. */
export const isBeside = ({ map }) => map.path === "" && ["out", "in"].includes(map.port);

/** What a pass of the chosen module collects: its value, and what is beside it. */
export const taps = (path = view.module.value, port = view.port.value) =>
  [...(path ? [moduleTap(path, port)] : []), { selector: beside(), values: true }];

/** As `api.extract`, of values whose tensors say which dimension has the channels, where it is not the usual one. */
export async function extract(modelId, given, request, own) {
  const reply = await api.extract(modelId, given, request, own);
  const { preprocessing } = models.value.find((one) => one.modelId === modelId) ?? {};
  for (const { map, tensor } of reply.maps) {
    if (tensor && map.port !== "pattern") tensor.channelDim = channelDimOf({ shape: tensor.shape, axes: map.axes }, preprocessing);
  }
  return reply;
}

/** Runs a pass for what is chosen; one that is under way ends. */
export async function run() {
  if (!input.value || !view.model.value) return;
  const [own, given, modelId] = [place.value, input.value, view.model.value];
  const reply = await pass.start(`Running ${modelId}`, (signal) =>
    extract(modelId, given, { taps: taps() }, options(signal)));
  if (!reply) {
    // What is shown stays after a failure, but not beside an input or a model that it is not of.
    const isOther = result.value?.input !== given || result.value.model !== modelId;
    if (isOther && !pass.isRunning) result.value = null;
    return;
  }
  result.value = { ...reply, place: own, input: given, model: modelId };
  await findAttentions();
}

let searched = "";

/** Asks once for each model which of its modules compute an attention; not all models have one. */
async function findAttentions() {
  const modelId = view.model.value;
  if (searched === modelId) return;
  searched = modelId;
  attentions.value = [];
  const maps = await api.select(modelId, input.value, "**/pattern", options()).catch(() => []);
  const paths = maps.map(({ name }) => name.replace(/(@\d+)?\/pattern$/, "").replaceAll('"', ""));
  if (view.model.value === modelId) attentions.value = [...new Set(paths)];
}

const HISTOGRAM_BINS = 32;
const STATISTICS = [Statistic.MEAN, Statistic.STD, Statistic.MIN, Statistic.MAX, Statistic.ZERO_FRACTION, Statistic.HISTOGRAM];

/** A value with what its table of statistics shows; to be completed by what it is of. */
export const statisticsTap = { values: true, statistics: STATISTICS.slice(0, -1) };

/** A value of a module, with its statistics. In parts: paths may have characters that a selector quotes. */
function moduleTap(path, port) {
  const isEveryCall = modules.value.find((one) => one.path === path)?.calls.length > 1;
  const parts = { kind: SelectorKind.MODULE, path, port, isEveryCall };
  return { parts, values: true, statistics: STATISTICS, histogram: { binCount: HISTOGRAM_BINS } };
}

const searching = new Latest();

/** Asks the server which modules a selector stands for. */
export async function search(selector) {
  searching.stop();
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
  const modelId = view.model.value;
  const maps = await searching.start("Asking what the selector stands for", (signal) =>
    api.select(modelId, input.value, selector.trim(), options(signal)));
  const isLast = !searching.isRunning && view.search.value === selector && view.model.value === modelId;
  if (isLast) found.value = [...new Set(maps?.map((map) => map.path))];
}

/** The last pass as `pythonCode` takes it: with `result`, the name of its values. */
export const passOf = (result, edits) => ({
  result, model: view.model.value, input: input.value, taps: [...collected.value.map(({ map }) => map.name), beside()], edits,
});
