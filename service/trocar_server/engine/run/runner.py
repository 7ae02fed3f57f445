"""Runner: the rules of a pass, each once, whatever executes it. Owner thread only.

    run_call(Eager(replica), call)                # one call, with remedies
    run_together(executor, calls, ...)            # calls of which those that it cannot run are declined

A call is bound to its tensors, resolved for its batch within the limits of memory and time, given arguments
that its pass may write to, executed, and its values are checked, reduced and reported. An `Executor` does
nothing but execute.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import Collected
from trocar_server.engine.execute.eager import Eager, NotStartedError
from trocar_server.engine.execute.executor import Executor, NotFiniteError
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.host.repeatable import watching_draws
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.resolve.planner import check_byte_count
from trocar_server.engine.run.bound_call import BoundCall, Prepared
from trocar_server.engine.run.extraction import ExecutionReport, Extraction, collected_names
from trocar_server.engine.run.finite import are_finite, are_within
from trocar_server.engine.run.logit_lens import heads_of
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.run.pass_result import NO_HEADS, PassResult, finish_pass
from trocar_server.engine.run.preview import stop_path
from trocar_server.engine.run.ready import Ready, make_ready
from trocar_server.engine.run.start_value import needs_data, needs_more
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.device_memory import give_back_cache, is_out_of_memory, keeps_memory
from trocar_server.engine.schedule.lease import StateWrittenError
from trocar_server.engine.transfer import this_thread
from trocar_server.errors import ServiceError, first_line
from trocar_server.surgery import (
    CallsDifferError,
    PassGuard,
    StartMixedError,
    clear_caches,
    is_of_inference_mode,
    needs_autograd,
)

_NOT_WATCHED = nullcontext()


@dataclass(frozen=True, eq=False)
class PassCall:
    """A call that waits for its pass.

    Attributes:
        prepared: The checked plan and its inputs.
        guard: Stops the pass on cancellation or deadline.
        asked_at: Arrival time, as `time.perf_counter()` in seconds.
        statistics: Takes the statistics of a stream, all or none; the extraction is then without them.
        flow: The flow that is charged.
    """

    prepared: Prepared
    guard: PassGuard
    asked_at: float
    statistics: StreamStatistics | None = None
    flow: str = ""


class DeclinedError(Exception):
    """An executor cannot run a call; it runs eagerly instead."""


class ExecutorFailedError(DeclinedError):
    """An executor failed on a call, perhaps because of its inputs: eager decides."""


Outcome = Extraction | BaseException
Refusal = Callable[[Ready], str]
"""Returns why an executor cannot run a call; empty where it can."""


def run_call(executor: Eager, call: PassCall) -> Extraction:
    """Run one call: the passes of its sources, then its own.

    A pass that runs out of GPU memory is retried once after the allocator has released its cache, which is
    often fragmented. So is one that was the first to be seen to write to the model's tensors. One that fails
    because of inference mode is run again without it, as all later ones of the deployment are; see Note:
    [Inference mode] in `surgery.kept_tensors`. One whose data calls modules more or less often than was
    recorded is resolved on a recording of its own data.

    Raises:
        ServiceError: Any error of the request, and any reason to stop a pass.
    """
    checked = call.prepared.checked
    deployment = checked.deployment
    outcome: Extraction | None = None
    is_own, is_second = False, False
    # Draws decide whether a reply is cached: those of other deployments never are.
    with watching_draws(deployment.hosted.device) if deployment.is_repeatable else _NOT_WATCHED as draws:
        while outcome is None:
            remedy = None
            try:
                with domain_errors(deployment.hosted, checked.memory_bytes):
                    outcome = _run(executor, call, on_own_data=is_own)
            except StateWrittenError:  # it has been undone
                continue
            except CallsDifferError as differs:
                if is_own:
                    raise _ambiguous(differs) from None
                is_own = True
            except ServiceError as error:
                remedy = None if is_second else _remedy(error, deployment)
                if remedy is None:
                    raise
                is_second = True
            if remedy is not None:  # not in the handler, which keeps the failed pass alive
                remedy(executor.replica.module)
    return outcome if draws is None else replace(outcome, has_drawn=draws.has_drawn)


def _run(executor: Eager, call: PassCall, *, on_own_data: bool) -> Extraction:
    bound, started = BoundCall.of(call.prepared, call.guard), time.perf_counter()
    ready, checked = make_ready(executor, bound, on_own_data=on_own_data), bound.checked
    if ready.resolved is checked.resolved and ready.executor is executor:
        (collected,) = executor.run([ready.call])
    else:
        with domain_errors(checked.deployment.hosted, ready.memory_bytes), _start_errors(ready):
            (collected,) = ready.executor.run([ready.call])
    extraction = _finished(ready, call, collected, started, checked.plan.batch_size or 0)
    if checked.work >= (pace := checked.deployment.pool.pace).watched_work:
        pace.observe(checked.work, extraction.compute_s)
    return extraction


def run_together(
    executor: Executor, calls: Sequence[PassCall], refusal: Refusal, max_pass_bytes: int
) -> list[Outcome]:
    """Run calls together; each gets its own extraction, or its own error.

    Args:
        executor: Behind which there is eager PyTorch: what it cannot run gets `DeclinedError`.
        calls: The calls, of one deployment.
        refusal: Asked for each call.
        max_pass_bytes: The most memory of calls that run in one pass; else each runs alone.
    """
    started = time.perf_counter()
    made = [_made_ready(executor, call, refusal) for call in calls]
    ready = [entry for entry in made if isinstance(entry, Ready)]
    values = iter(_values(executor, ready, max_pass_bytes))
    rows = sum(entry.bound.checked.plan.batch_size or 0 for entry in ready)
    outcomes: list[Outcome] = []
    for call, entry in zip(calls, made, strict=True):
        if isinstance(entry, Ready):
            outcomes.append(_outcome(entry, call, next(values), started, rows))
        else:
            outcomes.append(entry)
    return outcomes


def _made_ready(executor: Executor, call: PassCall, refusal: Refusal) -> Ready | BaseException:
    try:
        with domain_errors(call.prepared.checked.deployment.hosted):
            ready = make_ready(executor, BoundCall.of(call.prepared, call.guard))
            problem = refusal(ready) or _not_within(ready)
    except (ServiceError, CallsDifferError) as error:
        return error if isinstance(error, ServiceError) else DeclinedError(f"the calls of '{error}' differ")
    return DeclinedError(problem) if problem else ready


def _values(
    executor: Executor, ready: Sequence[Ready], max_pass_bytes: int
) -> Sequence[Collected | DeclinedError]:
    """Execute passes together where their memory is within the limit and none fails; else each alone."""
    is_one = len(ready) == 1
    if not is_one and sum(entry.memory_bytes for entry in ready) > max_pass_bytes:
        return [_values(executor, [entry], max_pass_bytes)[0] for entry in ready]
    try:
        return executor.run([entry.call for entry in ready]) if ready else []
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        if is_out_of_memory(error):
            return [DeclinedError("too little memory") for _ in ready]
        if is_one and isinstance(error, NotFiniteError):
            return [DeclinedError("a number inside the pass is not finite")]
        if is_one:
            return [ExecutorFailedError(f"it failed with {type(error).__name__}: {error}"[:300])]
    # it may be due to the inputs of one of them
    return [_values(executor, [entry], max_pass_bytes)[0] for entry in ready]


def _outcome(
    ready: Ready, call: PassCall, collected: Collected | DeclinedError, started: float, rows: int
) -> Outcome:
    if isinstance(collected, DeclinedError):
        return collected
    if _is_inexact(ready.executor) and not are_finite(collected.values.values()):
        return DeclinedError("its values are not finite")
    try:
        with domain_errors(ready.bound.checked.deployment.hosted):
            return _finished(ready, call, collected, started, rows)
    except ServiceError as error:
        return error


def _finished(ready: Ready, call: PassCall, collected: Collected, started: float, rows: int) -> Extraction:
    """Check, reduce and report the values of a pass.

    Args:
        ready: The call as it was executed.
        call: The call.
        collected: The values.
        started: When its pass began, as `time.perf_counter()` in seconds.
        rows: Samples of the batch that it was executed in.

    Raises:
        ServiceError: `REPLY_TOO_LARGE`, as the size may depend on the data; see `finish_pass` and
            `StreamStatistics.add`.
    """
    bound, resolved, executor = ready.bound, ready.resolved, ready.executor
    checked, deployment = bound.checked, bound.checked.deployment
    if not collected.is_stop_known:  # where eager would have stopped: later modules are not computed either
        targets = [target.target for target in resolved.targets]
        collected = replace(collected, stopped_at=stop_path(targets, bound.recording))
    with torch.inference_mode() if ready.call.is_inference else torch.no_grad():
        taps = bound.operands.taps
        heads = heads_of(deployment, resolved.targets) if checked.reads_tokens else NO_HEADS
        arguments = ready.named_arguments
        result = finish_pass(collected, resolved.targets, bound.guard, taps, started, arguments, heads)
        if deployment.predictions.symbolic:
            _check_predicted(ready, result)
        if result.byte_count > checked.limits.max_reply_bytes:
            check_byte_count(result.byte_count, checked.limits.max_reply_bytes)
        maps = call.statistics.add(result) if call.statistics else result.feature_maps
    is_from_start = checked.plan.start_at is not None
    transfers = this_thread.transfers
    return Extraction(
        maps,
        collected_names(resolved, result) if resolved.is_plural else resolved.expansions,
        result.stopped_at,
        started - call.asked_at,
        result.compute_s,
        resolved.surgery.expansions,
        result.objective,
        ExecutionReport(
            executor.numerics, executor.engine, rows, stateful=deployment.hosted.pristine.is_stateful
        ),
        depth=None if is_from_start else 1.0 if result.stopped_at is None else resolved.depth,
        copies=transfers.take() if transfers.has_begun else None,
    )


def _check_predicted(ready: Ready, result: PassResult) -> None:
    """Drop the predictions of a signature for which a value has another shape than predicted."""
    bound, predictions = ready.bound, ready.bound.checked.deployment.predictions
    if bound.checked.plan.start_at is not None or not predictions.has(bound.signature):
        return
    predicted = {output.name: output.shape for entry in ready.resolved.targets for output in entry.outputs}
    outcome = ((entry.output.name, tuple(entry.output.shape)) for entry in result.feature_maps)
    if any(predicted.get(name) != shape for name, shape in outcome):
        bound.checked.deployment.pass_differed(bound.signature)


def _is_inexact(executor: Executor) -> bool:
    """Whether its kernels differ from eager, see Note: [Values that are not finite]."""
    return executor.numerics is not Numerics.EXACT


def _not_within(ready: Ready) -> str:
    tensors = ready.call.tensors
    is_outside = _is_inexact(ready.executor) and not are_within(tensors)
    return "its inputs have NaN, infinities or huge numbers" if is_outside else ""


def _remedy(error: ServiceError, deployment: Deployment) -> Callable[[nn.Module], None] | None:
    """Return what makes another try of a failed pass worthwhile, or None."""
    device = deployment.hosted.device
    if needs_autograd(error):
        deployment.in_inference_mode = False
        return clear_caches
    if error.reason is ErrorReason.OUT_OF_MEMORY and keeps_memory(device):
        return lambda _: give_back_cache(device)
    return None


@contextmanager
def _start_errors(ready: Ready) -> Iterator[None]:
    """Convert errors of a pass that starts in the middle."""
    at = ready.bound.checked.plan.start_at
    try:
        yield
    except StartMixedError as mixed:
        assert at is not None
        raise needs_more(at, str(mixed)) from None
    except NotStartedError as failed:
        problem = failed.problem
        is_own = isinstance(problem, ServiceError | CallsDifferError)
        may_help = ready.bound.checked.deployment.in_inference_mode and is_of_inference_mode(str(problem))
        if is_own or may_help:  # `_remedy` sees to it
            raise problem from None
        assert at is not None
        raise needs_data(at, first_line(problem)) from None


def _ambiguous(differs: CallsDifferError) -> ServiceError:
    return ServiceError(
        ErrorReason.AMBIGUOUS_CALL,
        f"'{differs}' is called more often in one pass than in the next on the same data; name the call, "
        f"for example '{differs}@0'",
        name=str(differs),
    )
