"""One pass and what is made of its values on the device. Owner thread only."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.collecting import Arguments, Collected, Work, collect
from trocar_server.engine.hosting import input_rejected
from trocar_server.engine.lease import Replica
from trocar_server.engine.outputs import COVARIANCE, Output, TapTarget, companion_output
from trocar_server.engine.plan import Payload
from trocar_server.engine.transfer import current
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.reductions import CastValue, Reduced, cast_value, reduce_value
from trocar_server.stats import Accumulator, StatisticsResult
from trocar_server.surgery import (
    PassAborted,
    PassGuard,
    StartMixedError,
    ValueMissingError,
    independent,
)

Constants = Sequence[Sequence[torch.Tensor]]
"""Tensors that come with a request, for each tap."""


@dataclass(frozen=True)
class FeatureMap:
    """One collected value.

    Attributes:
        output: What it is.
        values: Its bytes in row-major order, or None when only statistics were wanted. Not to be read before
            the copies of its pass have arrived; whoever has an `Extraction` from the engine may.
        statistics: What was asked for, or None.
    """

    output: Output
    values: Payload | None = None
    statistics: StatisticsResult | None = None
    cast: CastValue | None = None
    """How the values were cast, or None."""


@dataclass(frozen=True)
class PassResult:
    """What one pass collected, where it stopped and how long it took."""

    feature_maps: tuple[FeatureMap, ...]
    taken: Mapping[str, Accumulator]
    """By feature map, what its statistics were made of."""
    stopped_at: str | None
    compute_s: float
    objective: float | None = None
    has_drawn: bool = False
    """Whether it drew from torch's random numbers, so that another one would be different; asked of
    models whose replies may be kept at all."""

    @property
    def byte_count(self) -> int:
        """Bytes of all values."""
        return sum(found.values.nbytes for found in self.feature_maps if found.values is not None)


def run_pass(
    replica: Replica,
    arguments: Arguments,
    targets: Sequence[TapTarget],
    work: Work,
    guard: PassGuard,
    constants: Constants = (),
) -> PassResult:
    """Run the model until the last needed call, and back, and reduce what was collected.

    Args:
        replica: Leased by the caller.
        arguments: Positional and keyword arguments of the forward.
        targets: What to collect, values and gradients.
        work: How.
        guard: Says whether to go on.
        constants: Of each tap, by its position: what its reductions need.

    Raises:
        StartMixedError: What follows the start needs a value from before it.
        ServiceError: `MODULE_NOT_CALLED` when this input did not take the model to a tapped module,
            `NOT_DIFFERENTIABLE` when no gradient came to one.
        Exception: Whatever the model raises; see `domain_errors`.
    """
    started = time.perf_counter()
    with torch.inference_mode() if work.scoring is None else torch.no_grad():
        collected = collect(replica.module, arguments, work, guard)
        _check_data(collected.values)
        values = _apart(collected.values, targets) if replica.is_live else collected.values
        return finish_pass(replace(collected, values=values), targets, guard, constants, started)


def finish_pass(
    collected: Collected,
    targets: Sequence[TapTarget],
    guard: PassGuard,
    constants: Constants,
    started: float,
) -> PassResult:
    """Reduce what a pass collected and bring to the host what was asked for.

    The bytes may still be on their way when this returns, and the next pass may begin: see `Transfers`.

    Args:
        collected: What came.
        targets: What was to be collected.
        guard: Says whether to go on.
        constants: Of each tap, by its position: what its reductions need.
        started: When the pass began, as `time.perf_counter()` in seconds.

    Raises:
        ServiceError: What `run_pass` raises of values.
    """
    values = collected.values
    finished = [
        _finish(target, values, constants, guard) for target in targets if not _is_left_out(target, values)
    ]
    feature_maps = tuple(found for entry in finished for found in entry.feature_maps)
    taken = {entry.feature_maps[0].output.name: entry.taken for entry in finished if entry.taken}
    current().synchronize()  # so that this pass gets its own errors, and its time counts
    compute_s = time.perf_counter() - started
    return PassResult(feature_maps, taken, collected.stopped_at, compute_s, collected.objective)


def _apart(values: Mapping[str, torch.Tensor], targets: Sequence[TapTarget]) -> dict[str, torch.Tensor]:
    """Copy parameters, which may change while the reply is being sent."""
    names = {entry.target.name for entry in targets if entry.target.parameter is not None}
    return {name: value.clone() if name in names else value for name, value in values.items()}


def _is_left_out(target: TapTarget, values: Mapping[str, torch.Tensor]) -> bool:
    """Whether a pattern names it and the objective does not depend on it."""
    is_missing = target.target.is_gradient and target.target.name not in values
    return is_missing and target.tap.selector.is_plural


@contextmanager
def domain_errors(hosted: HostedModel, needed_bytes: int = 0) -> Iterator[None]:
    """Turn what torch, a model or a guard raises inside the context into domain errors.

    Args:
        hosted: The model.
        needed_bytes: What the pass needs by estimate, to say so where there was not as much; 0 if unknown.

    Raises:
        ServiceError: `DEADLINE_EXCEEDED`, `CANCELLED`, `OUT_OF_MEMORY` or `INPUT_REJECTED`.
    """
    problem: ServiceError
    try:
        yield
        return
    except ServiceError:
        raise
    except PassAborted as stop:
        problem = _aborted(stop.reason)
    except ValueMissingError as missing:
        problem = ServiceError(
            ErrorReason.UNKNOWN_PICK,
            f"'{missing.args[0]}' is not there with these inputs: the model decides on its data",
        )
    except (torch.OutOfMemoryError, MemoryError) as error:  # the first is a RuntimeError: caught before
        problem = _out_of_memory(error, needed_bytes)
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        is_memory = "can't allocate memory" in str(error)
        problem = _out_of_memory(error, needed_bytes) if is_memory else input_rejected(hosted, error)
    # Raised here, and not above, where it would keep the frames of the failed pass, and so its values, alive.
    raise problem


def _check_data(values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        if value.is_meta:  # computed beside the start, from what lies before it
            raise StartMixedError(name)


@dataclass(frozen=True)
class _Finished:
    """What one value became."""

    feature_maps: tuple[FeatureMap, ...]
    taken: Accumulator | None


def _finish(
    target: TapTarget, values: Mapping[str, torch.Tensor], constants: Constants, guard: PassGuard
) -> _Finished:
    """Reduce one value on the device and bring to the host what was asked for."""
    guard.check()
    name, tap = target.target.name, target.tap
    if name not in values and target.target.is_gradient:
        raise independent([name])
    if name not in values:
        raise ServiceError(
            ErrorReason.MODULE_NOT_CALLED,
            f"'{name}' was not called in this pass: the model decides on its data",
        )
    with target.named_errors():
        reduced = _reduced(target, values[name], constants, guard)
        taken = _taken(target, reduced.value)
        cast = cast_value(reduced.value, tap.cast, reduced.channel_dim) if tap.cast else None
    sent = cast.value if cast else reduced.value
    main = Output(name, target, tuple(sent.shape), sent.dtype, tap.values)
    result = taken.result() if taken else None
    found = [FeatureMap(main, _bytes_of(name, sent) if tap.values else None, result, cast)]
    companions = dict(reduced.companions) if tap.values else {}
    return _Finished((*found, *_companions(main, companions, result)), taken)


def _taken(target: TapTarget, value: torch.Tensor) -> Accumulator | None:
    if not target.tap.statistics:
        return None
    accumulator = target.accumulator()
    accumulator.update(value)
    return accumulator


def _companions(
    main: Output, values: Mapping[str, torch.Tensor], result: StatisticsResult | None
) -> Iterator[FeatureMap]:
    for role, value in values.items():
        output = companion_output(main, role, tuple(value.shape), value.dtype)
        yield FeatureMap(output, _bytes_of(output.name, value))
    if result is not None and result.covariance is not None:
        yield covariance_map(main, result.covariance)


def covariance_map(main: Output, matrix: torch.Tensor) -> FeatureMap:
    """Return the covariance matrix of a feature map as its companion."""
    output = companion_output(main, COVARIANCE, tuple(matrix.shape), matrix.dtype)
    return FeatureMap(output, _bytes_of(output.name, matrix))


def _reduced(target: TapTarget, value: torch.Tensor, constants: Constants, guard: PassGuard) -> Reduced:
    tap = target.tap
    if not (tap.reductions or tap.cast):
        return Reduced(value)
    own = constants[target.tap_index] if constants else ()
    return reduce_value(value, tap.reductions, tap.channel_dim, own, guard.check)


def _bytes_of(name: str, value: torch.Tensor) -> Payload:
    """Return the values in row-major order as bytes on the host, without a copy where they are so already.

    They may be on their way: see `Transfers.to_host`.
    """
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise ServiceError(
            ErrorReason.NOT_A_TENSOR, f"'{name}' is a {kind} tensor; only dense ones can be returned"
        )
    return current().to_host(value.resolve_conj().resolve_neg())


def _aborted(reason: ErrorReason) -> ServiceError:
    what = "the deadline passed" if reason is ErrorReason.DEADLINE_EXCEEDED else "the call was cancelled"
    return ServiceError(reason, f"{what}; the pass was stopped")


def _out_of_memory(error: BaseException, needed_bytes: int) -> ServiceError:
    needed = f"; the pass needs about {needed_bytes:,} bytes" if needed_bytes else ""
    facts = {"needed_bytes": str(needed_bytes)} if needed_bytes else {}
    return ServiceError(
        ErrorReason.OUT_OF_MEMORY,
        f"the device has too little memory: {first_line(error)}{needed}; use a smaller batch, or ask for "
        "fewer or earlier taps",
        **facts,
    )
