// How much each token of a text contributes: its embedding times the gradient, summed, in float64.
import { Aggregate, ClassScoreKind, ElementFunction } from "../../gen/trocar_api/v1/objective_pb.js";
import { Statistic } from "../../gen/trocar_api/v1/statistics_pb.js";
import { extract, plan } from "../api.js";
import { argmax } from "../tensors.js";

/**
 * Computes the contributions of tokens.
 * @param target the number of a class; null for the predicted one, and where the output is no scores of classes: then
 *   the sum of the squares of the model's last value, before a normalisation
 * @returns `{tokens, values, place, target, of}`: `values` one number a token, `of` the selector of that value, if any
 */
export async function attributeTokens({ modelId, input, target }, options) {
  const everything = [{ selector: "**", statistics: [Statistic.ABSMAX], values: false }];
  const planned = (await plan(modelId, input, { taps: everything }, options)).featureMaps;
  const embedding = planned.find((map) => map.type === "Embedding" && map.tensor.shape.length === 3);
  if (!embedding) throw new RangeError("The model has no module of type Embedding for its tokens.");
  const output = await extract(modelId, input, { taps: [{ selector: OUTPUT }] }, options);
  const logits = output.maps.find(({ map, tensor }) => isScores(map, tensor))?.tensor;
  const chosen = logits ? (target ?? argmax(logits.values)) : null;
  const last = logits ? null : lastOf(planned, output.maps.at(-1));
  const objective = { terms: [{ kind: logits ? classScore(chosen) : squares(last) }] };
  const taps = [{ selector: embedding.name, alias: "value" }, { selector: embedding.name, alias: "gradient", isGradient: true }];
  const { maps, processed } = await extract(modelId, input, { taps, objective }, options);
  const { value, gradient } = Object.fromEntries(maps.map(({ map, tensor }) => [map.name, tensor]));
  return {
    tokens: processed[0].samples[0].tokens, values: products(value, gradient), place: embedding.name,
    target: chosen, of: last,
  };
}

const OUTPUT = "/out";

/** The model's last value; before its normalisation, if any, after which the squares have the same sum for every text. */
function lastOf(planned, { map, tensor }) {
  const isLike = (one) => one.tensor?.shape.map(Number).join() === tensor.shape.join();
  const before = planned.some(({ type }) => type === "Normalize")
    ? planned.filter((one) => one.type !== "Normalize" && isLike(one)).at(-1) : null;
  return before?.name ?? map.name;
}

const isScores = (map, tensor) => (map.pick === '["logits"]' || map.pick === "") && tensor?.shape.length === 2 && tensor.shape[1] > 1;

const classScore = (target) => ({ case: "classScore", value: { classes: [BigInt(target)], kind: ClassScoreKind.LOGIT } });

const squares = (selector) =>
  ({ case: "valueScore", value: { selector, function: ElementFunction.SQUARE, aggregate: Aggregate.SUM } });

function products(value, gradient) {
  const [, count, width] = value.shape;
  return Float64Array.from({ length: count }, (_, token) => {
    let sum = 0;
    for (let at = token * width; at < (token + 1) * width; at += 1) sum += value.values[at] * gradient.values[at];
    return sum;
  });
}
