// The caller's trainers, and the events of a fit as they come.
import { FitCommand, FitService } from "../gen/trocar_api/v1/fit_pb.js";
import { TrainerService } from "../gen/trocar_api/v1/trainer_pb.js";
import { call, stream } from "./wire.js";

const AGAIN_MS = 1000;
const LAST_KINDS = ["finished", "failed", "cancelled"];
/** The server went away or the call was too long: the fit goes on, and its events are asked for again. */
const INTERRUPTIONS = ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"];

export const COMMANDS = { pause: FitCommand.PAUSE, resume: FitCommand.RESUME, cancel: FitCommand.CANCEL };

export const listTrainers = async (options) => (await call(TrainerService.method.listTrainers, {}, options)).trainers;

/** @param command one of `COMMANDS` */
export const controlFit = (trainerId, command, options) =>
  call(FitService.method.controlFit, { trainerId, command }, options);

export const publish = async (trainerId, modelId, options) =>
  (await call(TrainerService.method.publishTrainer, { trainerId, modelId }, options)).modelId;

const pause = (signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, AGAIN_MS);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Yields the events of a trainer's newest fit until it has ended; none is lost where the server restarts meanwhile. */
export async function* fitEvents(trainerId, { token, signal }) {
  let eventNumber;
  while (!signal.aborted) {
    try {
      for await (const { event } of stream(FitService.method.watchFit, [{ trainerId, eventNumber }], { token, signal })) {
        eventNumber = event.number + 1n;
        yield event;
        if (LAST_KINDS.includes(event.kind)) return;
      } // a server that stops ends the reply without a failure
    } catch (error) {
      if (!INTERRUPTIONS.includes(error.code)) throw error;
    }
    await pause(signal);
  }
}

/** Facts have these numbers as texts. */
const NOT_FINITE = ["NaN", "Infinity", "-Infinity"];
const isNumber = (value) => typeof value === "number" || NOT_FINITE.includes(value);

/**
 * The curves of a fit.
 * @param events of one fit
 * @param rules names of the trainer's gradient edits, in order
 * @returns an array of `{label, series}`, each series with `name` and `points`; without those that have no points. A value
 *   that is NaN is a point, too.
 */
export function curvesOf(events, rules) {
  const of = (kind, read) => events.filter((one) => one.kind === kind).map(({ facts }) => [facts.step, read(facts)])
    .filter(([, y]) => isNumber(y)).map((point) => point.map(Number));
  const metrics = new Set(events.flatMap(({ facts }) => Object.entries(facts.metrics ?? {})
    .filter(([, value]) => isNumber(value)).map(([name]) => name)));
  const rates = events.reduce((most, { facts }) => Math.max(most, facts.learning_rates?.length ?? 0), 0);
  const curves = {
    Loss: { training: of("step", (facts) => facts.loss), evaluation: of("evaluation", (facts) => facts.loss) },
    Metrics: Object.fromEntries([...metrics].map((name) => [name, of("evaluation", (facts) => facts.metrics?.[name])])),
    "Gradient norm": { "before clipping": of("step", (facts) => facts.gradient_norm) },
    "Changed gradient elements": Object.fromEntries(rules.map((name, at) => [`${at}: ${name}`, of("step", (facts) => facts.changed?.[at])])),
    "Learning rate": Object.fromEntries(Array.from({ length: rates }, (_, at) => [`group ${at}`, of("step", (facts) => facts.learning_rates?.[at])])),
    "Spool, bytes": { saved: of("step", (facts) => facts.saved_bytes), "written to disk": of("step", (facts) => facts.written_bytes) },
    "Samples per second": { training: of("step", (facts) => facts.samples_per_s) },
  };
  return Object.entries(curves).map(([label, series]) => ({
    label, series: Object.entries(series).map(([name, points]) => ({ name, points })).filter(({ points }) => points.length),
  })).filter(({ series }) => series.length);
}
