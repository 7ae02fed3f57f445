// Gradient health: norms of gradients by module in one pass; the client's arithmetic (`_analysis/health_rows.py`).
import { ClassScoreKind } from "../../gen/trocar_api/v1/objective_pb.js";
import { Statistic } from "../../gen/trocar_api/v1/statistics_pb.js";
import { extract } from "../api.js";
import { valueOfGradient } from "../edits.js";
import { argmax } from "../tensors.js";

/** Norms and ratios outside of these are flagged. */
export const LIMITS = { vanishing: 1e-6, exploding: 1e3 };
const FLAGS = ["nan", "inf", "exploding", "dead", "vanishing"];
const OF_GRADIENTS = [Statistic.L2, Statistic.ZERO_FRACTION, Statistic.NAN_COUNT, Statistic.INF_COUNT];
const EVERYTHING = "**";
/** Owners of parameters: every module, and the model itself. Fewer, where one of them has none with a gradient. */
const OWNERS = [[EVERYTHING, ""], [EVERYTHING], [""], []];
const REFUSALS = ["INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"];

/**
 * Reports how gradients of the logit of a class flow through a model.
 * @param wanted the number of the class; null for the predicted one
 * @returns `{target, rows}`: of each row `name`, `path`, `type`, `norm`, `zeros`, `nans`, `infs`, `parameterNorm`,
 *   `weightNorm`, `ratio`, null where there is none, and `flags`
 */
export async function gradientHealth(modelId, input, wanted, options) {
  const target = wanted ?? (await predicted(modelId, input, options));
  return { target, rows: await healthOf(modelId, input, target, options) };
}

async function predicted(modelId, input, options) {
  const { maps } = await extract(modelId, input, { taps: [{ selector: "/out" }] }, options);
  if (maps.length !== 1 || maps[0].tensor.shape.length !== 2) throw new RangeError("The model's output is no scores of classes.");
  return argmax(maps[0].tensor.values);
}

async function healthOf(modelId, input, target, options) {
  const objective = { terms: [{ kind: { case: "classScore", value: { classes: [BigInt(target)], kind: ClassScoreKind.LOGIT } } }] };
  const at = { selector: EVERYTHING, isGradient: true, values: false, statistics: OF_GRADIENTS };
  let refused;
  for (const owners of OWNERS) {
    const taps = [at, ...owners.flatMap((owner) => [
      { selector: `${owner}/param_grad(*)`, values: false, statistics: OF_GRADIENTS },
      { selector: `${owner}/param(*)`, values: false, statistics: [Statistic.L2] },
    ])];
    try {
      return rowsOf((await extract(modelId, input, { taps, objective }, options)).maps.map(({ map }) => map));
    } catch (error) {
      if (!REFUSALS.includes(error.code)) throw error;
      refused ??= error; // nothing was computed
    }
  }
  throw refused;
}

const statistic = (map, wanted) => map.statistics.find((one) => one.statistic === wanted)?.values[0];
const size = (map) => map.tensor.shape.reduce((product, length) => product * Number(length), 1);
const keyOf = (map) => `${map.path}\n${map.port.slice(map.port.indexOf("("))}`;

/** Statistics of several tensors as if they were one. */
function merged(maps) {
  const norms = maps.map((map) => statistic(map, Statistic.L2));
  const count = maps.reduce((sum, map) => sum + size(map), 0);
  const zeros = maps.reduce((sum, map) => (size(map) ? sum + statistic(map, Statistic.ZERO_FRACTION) * size(map) : sum), 0);
  const total = (wanted) => maps.reduce((sum, map) => sum + statistic(map, wanted), 0);
  return {
    norm: norms.some(Number.isNaN) ? NaN : Math.hypot(...norms), zeros: count ? zeros / count : NaN,
    nans: total(Statistic.NAN_COUNT), infs: total(Statistic.INF_COUNT),
  };
}

function rowsOf(maps) {
  const ofValues = maps.filter((map) => !map.port.startsWith("param"));
  const weights = new Map(maps.filter((map) => map.port.startsWith("param(")).map((map) => [keyOf(map), statistic(map, Statistic.L2)]));
  const gradients = Map.groupBy(maps.filter((map) => map.port.startsWith("param_grad(")), (map) => map.path);
  const own = new Map([...gradients].map(([path, found]) => [path, {
    name: `${found[0].name.slice(0, found[0].name.lastIndexOf("/param_grad("))}/param(*)`, type: found[0].type,
    gradient: merged(found), weightNorm: Math.hypot(...found.map((map) => weights.get(keyOf(map)) ?? NaN)),
  }]));
  const rows = ofValues.map((map) => row(valueOfGradient(map.name), map, merged([map]), own.get(map.path)));
  const called = new Set(rows.map((one) => one.path));
  for (const [path, one] of own) if (!called.has(path)) insert(rows, row(one.name, { path, type: one.type }, null, one));
  return rows;
}

/** Modules that are never called stand before the first one that they are inside of; the model itself at the end. */
function insert(rows, own) {
  const place = rows.findIndex((one) => one.path !== own.path && (!one.path || own.path.startsWith(`${one.path}.`)));
  rows.splice(place < 0 ? rows.length : place, 0, own);
}

function row(name, { path, type }, at, own) {
  const ratio = own?.weightNorm ? own.gradient.norm / own.weightNorm : null;
  const both = [at, own?.gradient].filter(Boolean);
  return {
    name, path, type, norm: at?.norm ?? null, zeros: at?.zeros ?? null,
    nans: both.reduce((sum, one) => sum + one.nans, 0), infs: both.reduce((sum, one) => sum + one.infs, 0),
    parameterNorm: own?.gradient.norm ?? null, weightNorm: own?.weightNorm ?? null, ratio, flags: flagsOf(both, own, ratio),
  };
}

function flagsOf(both, own, ratio) {
  const filled = both.filter((one) => !Number.isNaN(one.zeros));
  const alive = filled.filter((one) => one.zeros !== 1).map((one) => one.norm);
  const isOwnAlive = own && filled.includes(own.gradient) && own.gradient.zeros !== 1;
  const compared = [...alive, ...(isOwnAlive && ratio !== null ? [ratio] : [])];
  const found = {
    nan: both.some((one) => one.nans), inf: both.some((one) => one.infs),
    exploding: compared.some((one) => one > LIMITS.exploding), dead: filled.some((one) => one.zeros === 1),
    vanishing: compared.some((one) => one < LIMITS.vanishing),
  };
  return FLAGS.filter((flag) => found[flag]);
}
