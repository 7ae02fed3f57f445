"""Running a group of calls on a compiled pass. Owner thread only."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trocar_server.config import Limits
from trocar_server.engine.collecting import Collected
from trocar_server.engine.constants import Constants
from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import build_arguments, signature_of
from trocar_server.engine.outcome import ExecutionReport, Extraction, there
from trocar_server.engine.passes import PassResult, domain_errors, finish_pass
from trocar_server.engine.planner import Resolved, check_byte_count
from trocar_server.engine.preview import stop_path
from trocar_server.engine.running import RunningStatistics
from trocar_server.engine.transfer import current
from trocar_server.engine.work import NO_SOURCES, Prepared
from trocar_server.engines.candidates import Runner
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, Recording


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """One call in a group.

    Attributes:
        prepared: What to do.
        guard: Says whether to go on.
        running: Takes in the statistics of a stream.
        asked_at: When it came, as `time.perf_counter()` in seconds.
        flow: Who pays for it.
    """

    prepared: Prepared
    guard: PassGuard
    running: RunningStatistics | None
    asked_at: float
    flow: str


class NotCompiledError(Exception):
    """A call cannot run on the compiled pass after all; it runs eagerly."""


@dataclass(frozen=True)
class _Ready:
    call: CompiledCall
    arguments: list[torch.Tensor]
    constants: Constants
    resolved: Resolved
    recording: Recording

    @property
    def rows(self) -> int:
        return self.arguments[0].shape[0]


def run_group(
    host: Host, runner: Runner, calls: Sequence[CompiledCall], limits: Limits
) -> list[Extraction | BaseException]:
    """Run calls together; each gets its own outcome, or the error that it alone failed with."""
    started = time.perf_counter()
    found: list[_Ready | BaseException] = [_caught(host, call, limits) for call in calls]
    ready = [entry for entry in found if isinstance(entry, _Ready)]
    values = _values(runner, ready)
    outcomes: list[Extraction | BaseException] = []
    parts = iter(values)
    for entry in found:
        outcome = (
            entry
            if isinstance(entry, BaseException)
            else _finished(
                host, runner, entry, next(parts), sum(other.rows for other in ready), started, limits
            )
        )
        outcomes.append(outcome)
    return outcomes


def _caught(host: Host, call: CompiledCall, limits: Limits) -> _Ready | BaseException:
    try:
        with domain_errors(host.hosted):
            return _ready(host, call, limits)
    except ServiceError as error:
        return error


def _ready(host: Host, call: CompiledCall, limits: Limits) -> _Ready | BaseException:
    """Make a call's tensors; `NotCompiledError` where they are of a form that was not foreseen."""
    call.guard.check()
    plan, payloads = call.prepared.plan, call.prepared.payloads
    arguments = build_arguments(host.hosted, plan.inputs, payloads.inputs, call.prepared.images, call.guard)
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if len(tensors) != len(arguments):
        return NotCompiledError("the model takes lists")
    signature = signature_of([""] * len(arguments), arguments)
    recording = host.record(signature, call.guard)
    resolved = host.resolve(plan, signature, recording, limits.max_reply_bytes, NO_SOURCES)
    return _Ready(call, tensors, Constants.of(host, plan, payloads), resolved, recording)


def _values(runner: Runner, ready: Sequence[_Ready]) -> list[Mapping[str, torch.Tensor]]:
    """Run the pass, for all together where the values can be told apart again."""
    if not ready:
        return []
    with torch.inference_mode():
        if len(ready) == 1:
            return [runner.run(ready[0].arguments)]
        rows = [entry.rows for entry in ready]
        joined = [torch.cat(columns) for columns in zip(*(entry.arguments for entry in ready), strict=True)]
        together = runner.run(joined)
        if any(value.dim() == 0 or value.shape[0] != sum(rows) for value in together.values()):
            return [runner.run(entry.arguments) for entry in ready]
        parts = {name: value.split(rows) for name, value in together.items()}
        return [{name: found[i] for name, found in parts.items()} for i in range(len(rows))]


def _finished(
    host: Host,
    runner: Runner,
    entry: _Ready,
    values: Mapping[str, torch.Tensor],
    row_count: int,
    started: float,
    limits: Limits,
) -> Extraction | BaseException:
    try:
        with domain_errors(host.hosted), torch.inference_mode():
            result = _reduced(entry, values, started)
            check_byte_count(result.byte_count, limits.max_reply_bytes)
            maps = entry.call.running.add(result) if entry.call.running else result.feature_maps
    except ServiceError as error:
        return error
    return Extraction(
        maps,
        there(entry.resolved, result),
        result.stopped_at,
        started - entry.call.asked_at,
        result.compute_s,
        report=ExecutionReport(runner.numerics, runner.engine, row_count),
        depth=1.0 if result.stopped_at is None else entry.resolved.depth,
        copies=current().take(),
    )


def _reduced(entry: _Ready, values: Mapping[str, torch.Tensor], started: float) -> PassResult:
    targets = entry.resolved.targets
    # Where the eager pass would have stopped: what lies behind is not computed here either.
    collected = Collected(dict(values), stop_path([target.target for target in targets], entry.recording))
    return finish_pass(collected, targets, entry.call.guard, entry.constants.taps, started)
