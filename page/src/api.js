// The calls of the page, in its own words.
import { DirectionService } from "../gen/trocar_api/v1/direction_pb.js";
import { EditStoreService } from "../gen/trocar_api/v1/edit_store_pb.js";
import { Numerics } from "../gen/trocar_api/v1/execution_pb.js";
import { GenerationService } from "../gen/trocar_api/v1/generation_pb.js";
import { ModelService } from "../gen/trocar_api/v1/model_pb.js";
import { ServerService } from "../gen/trocar_api/v1/server_pb.js";
import { ExtractionService } from "../gen/trocar_api/v1/extraction_pb.js";
import { Dtype } from "../gen/trocar_api/v1/tensor_pb.js";
import { Payloads } from "./tensors.js";
import { call, stream } from "./wire.js";

const CHUNK_BYTES = 1 << 20;

/** Fields of a request of which the values are subtracted from others. Passes with edits or gradients are always exact. */
export const EXACT = { execution: { numerics: Numerics.EXACT } };

export const serverInfo = (options) => call(ServerService.method.getServerInfo, {}, options);

export const listModels = async (options) => (await call(ModelService.method.listModels, {}, options)).models;

export const getModel = async (modelId, options) =>
  (await call(ModelService.method.getModel, { modelId }, options)).model;

export const listModules = async (modelId, options) =>
  (await call(ModelService.method.listModules, { modelId }, options)).modules;

/** One input of the page as an `Input` and its payload. */
function wired(input) {
  if (input.kind === "text") {
    const entries = [{ form: { case: "text", value: input.text } }];
    return { inputs: [{ value: { case: "texts", value: { entries } } }], payloads: [] };
  }
  if (input.kind === "tensor") {
    const { shape, values, name = "" } = input; // float32
    const spec = { dtype: Dtype.FLOAT32, shape: shape.map(BigInt) };
    return { inputs: [{ name, value: { case: "tensor", value: spec } }], payloads: [new Uint8Array(values.buffer, values.byteOffset, values.byteLength)] };
  }
  const images = [{ form: { case: "encodedByteCount", value: BigInt(input.bytes.length) } }];
  return { inputs: [{ value: { case: "images", value: { images } } }], payloads: [input.bytes] };
}

function* requests(head, payloads) {
  yield head;
  for (const [payloadIndex, payload] of payloads.entries()) {
    for (let at = 0; at < payload.length; at += CHUNK_BYTES) {
      yield { chunks: [{ payloadIndex, offsetBytes: BigInt(at), data: payload.subarray(at, at + CHUNK_BYTES) }] };
    }
  }
}

/**
 * Runs one pass.
 * @param request fields of an `ExtractRequest` beside the model and the inputs: `taps`, `edits`, `objective`, ...;
 *   `payloads`, arrays of bytes, are those of its tensors, in the order of the protocol; `sources` are inputs by name
 * @returns `{maps, timing, processed, isExact}`; `maps` has `{map, tensor}` for each value, in the order of the reply
 */
export async function extract(modelId, input, { payloads: own = [], sources: named = {}, ...request }, options) {
  const { inputs, payloads } = wired(input);
  const others = Object.entries(named).map(([name, other]) => ({ name, ...wired(other) }));
  const sources = others.map(({ name, inputs: its }) => ({ name, inputs: its }));
  const head = { modelId, inputs, maxChunkBytes: CHUNK_BYTES, sources, ...request };
  let first, parts;
  for await (const message of stream(ExtractionService.method.extract, [...requests(head, [...payloads, ...own, ...others.flatMap((one) => one.payloads)])], options)) {
    if (!first) {
      first = message;
      parts = new Payloads(message.featureMaps);
    }
    parts.add(message.chunks);
  }
  const { numerics = 0, asked = 0 } = first.execution ?? {}; // the next pass may be as loose as was asked
  const isExact = Math.max(numerics, asked) <= Numerics.EXACT;
  return { maps: parts.tensors(first.featureMaps), timing: first.timing, processed: first.processed, isExact };
}

/**
 * Generates the text that follows a text; yields the messages of the run.
 * @param request `taps`, `edits` and `payloads`, as for `extract`
 * @param sampling fields of a `GenerationOptions`
 */
export function generate(modelId, text, { payloads, ...request }, sampling, options) {
  const { inputs } = wired({ kind: "text", text });
  const head = { extraction: { modelId, inputs, maxChunkBytes: CHUNK_BYTES, ...request }, options: sampling };
  return stream(GenerationService.method.generate, [...requests(head, payloads)], options);
}

/** What a pass would collect; nothing is computed. `request` is as for `extract`, without payloads. */
export const plan = (modelId, input, request, options) =>
  call(ExtractionService.method.plan, { extraction: { modelId, inputs: wired(input).inputs, ...request } }, options);

/** Feature maps of a tap, without values; the server decides what its selector means. */
export const expand = async (modelId, input, tap, options) =>
  (await plan(modelId, input, { taps: [tap] }, options)).featureMaps;

/** As `expand`, of a selector as text. */
export const select = (modelId, input, selector, options) => expand(modelId, input, { selector }, options);

/** The caller's stored edits for a model. */
export const listEdits = async (modelId, options) =>
  (await call(EditStoreService.method.listEdits, { modelId }, options)).stored;

export function storeEdits(modelId, name, edits, payloads, options) {
  const chunks = payloads.map((data, payloadIndex) => ({ payloadIndex, offsetBytes: 0n, data }));
  return call(EditStoreService.method.storeEdits, { modelId, name, edits, chunks }, options);
}

export const deleteEdits = (modelId, name, options) =>
  call(EditStoreService.method.deleteEdits, { modelId, name }, options);

/** The caller's directions for a model, without their vectors. */
export const listDirections = async (modelId, options) =>
  (await call(DirectionService.method.listDirections, { modelId }, options)).directions;
