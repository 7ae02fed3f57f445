"""Forward pass and the processing of its values on the device. Owner thread only."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from types import MappingProxyType

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import Arguments, Collected, PassSpec, collect
from trocar_server.engine.host.deployment import input_rejected
from trocar_server.engine.request.plan import Payload
from trocar_server.engine.resolve.tap_outputs import COVARIANCE, Output, TapTarget, companion_output
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.engine.schedule.lease import Replica
from trocar_server.engine.transfer import this_thread
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import (
    CallsDifferError,
    PassAborted,
    PassGuard,
    StartMixedError,
    ValueMissingError,
    independent,
    named_arguments,
)
from trocar_server.tensors.reductions import CastValue, Reduced, cast_value, reduce_value
from trocar_server.tensors.reductions.padding import Own, Padding, unpadded
from trocar_server.tensors.stats import Accumulator, Scope, StatisticsResult, results

_NO_GRAPH: AbstractContextManager[None] = nullcontext()

Operands = Sequence[Sequence[torch.Tensor]]
"""Tensors sent with a request, for each tap."""


@dataclass(frozen=True)
class FeatureMap:
    """One collected value.

    Attributes:
        output: Its description.
        values: Its bytes in row-major order, or None when only statistics were wanted. Not to be read before
            the copies of its pass have arrived; in an `Extraction` from the engine they have.
        statistics: The requested statistics, or None.
    """

    output: Output
    values: Payload | None = None
    statistics: StatisticsResult | None = None
    cast: CastValue | None = None
    """How the values were cast, or None."""


@dataclass(frozen=True)
class PassResult:
    """Result of one pass: collected values, where it stopped and how long it took."""

    feature_maps: tuple[FeatureMap, ...]
    taken: Mapping[str, Accumulator]
    """By feature map, the accumulator of its statistics."""
    stopped_at: str | None
    compute_s: float
    byte_count: int
    """Bytes of all values."""
    objective: float | None = None
    has_drawn: bool = False
    """Whether it drew from torch's random generators, so that another pass would differ; checked only for
    models whose replies may be cached at all."""


def run_pass(
    replica: Replica,
    arguments: Arguments,
    targets: Sequence[TapTarget],
    pass_spec: PassSpec,
    guard: PassGuard,
    operands: Operands = (),
    *,
    in_inference_mode: bool = True,
) -> PassResult:
    """Run the model until the last needed call, then backward, and reduce the collected values.

    Args:
        replica: Leased by the caller.
        arguments: Positional and keyword arguments of the forward.
        targets: The values and gradients to collect.
        pass_spec: Edits, objective and start of the pass.
        guard: Aborts the pass.
        operands: For each tap, by position: the operands of its reductions.
        in_inference_mode: Whether a pass without gradients runs in it. See Note: [Inference mode] in
            `surgery.kept_tensors`.

    Raises:
        StartMixedError: A module after the start needs a value from before it.
        CallsDifferError: The request has to be resolved on a recording of its own data.
        StateWrittenError: The pass has to run again.
        ServiceError: `MODULE_NOT_CALLED` when the model did not call a tapped module on this input,
            `NOT_DIFFERENTIABLE` when a value got no gradient.
        Exception: Any error of the model; see `domain_errors`.
    """
    started = time.perf_counter()
    mode = torch.inference_mode() if in_inference_mode and pass_spec.scoring is None else torch.no_grad()
    has_graph = pass_spec.graph is not None
    with replica.passing() as module, replica.passing() if has_graph else _NO_GRAPH as graph_module, mode:
        collected = collect(module, arguments, pass_spec, guard, graph_module)
    with mode:
        if not in_inference_mode:  # the model may have derived them itself
            collected = replace(collected, values={k: v.detach() for k, v in collected.values.items()})
        if pass_spec.start is not None:
            _check_data(collected.values)
        values = _apart(collected.values, replica.module) if replica.is_live else collected.values
        given = named_arguments(replica.module, *arguments) if arguments[0] else arguments[1]
        return finish_pass(replace(collected, values=values), targets, guard, operands, started, given)


def finish_pass(
    collected: Collected,
    targets: Sequence[TapTarget],
    guard: PassGuard,
    operands: Operands,
    started: float,
    arguments: Mapping[str, object] = MappingProxyType({}),
) -> PassResult:
    """Reduce a pass's collected values and copy the requested ones to the host.

    The copies may still be running when this returns, and the next pass may begin: see `Transfers`.

    Args:
        collected: The collected values.
        targets: The requested values.
        guard: Aborts the reductions.
        operands: For each tap, by position: the operands of its reductions.
        started: When the pass began, as `time.perf_counter()` in seconds.
        arguments: Those of the forward by name, which tell of padding.

    Raises:
        ServiceError: As `run_pass` does for values.
    """
    values, padding = collected.values, None
    feature_maps: list[FeatureMap] = []
    taken: dict[str, Accumulator] = {}
    for target in targets:
        guard.check()
        if target.target.name not in values:
            if target.target.is_gradient and target.tap.selector.is_plural:
                continue  # a pattern names it, and the objective does not depend on it
            raise _not_collected(target)
        if target.tap.is_plain:
            output, value = target.outputs[0], values[target.target.name]
            if value.shape != output.shape or value.dtype is not output.dtype:
                output = Output(output.name, target, tuple(value.shape), value.dtype, target.tap.values)
            feature_maps.append(FeatureMap(output, _bytes_of(output.name, value)))
            continue
        padding = padding or Padding.of(arguments)
        found, accumulator = _reduced_maps(target, values[target.target.name], operands, guard, padding)
        feature_maps += found
        if accumulator is not None:
            taken[found[0].output.name] = accumulator
    if taken:
        feature_maps = list(_with_statistics(feature_maps, taken))
    transfers = this_thread.transfers
    if not transfers.is_synchronous:
        transfers.synchronize()  # so that errors and time are attributed to this pass
    compute_s, byte_count = time.perf_counter() - started, 0
    for found_map in feature_maps:
        byte_count += 0 if found_map.values is None else found_map.values.nbytes
    return PassResult(
        tuple(feature_maps), taken, collected.stopped_at, compute_s, byte_count, collected.objective
    )


def _apart(values: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy values that share memory with weights, which may change while the reply is being sent."""
    weights = {_storage(tensor) for tensor in chain(module.parameters(), module.buffers())}
    return {name: value.clone() if _storage(value) in weights else value for name, value in values.items()}


def _storage(value: torch.Tensor) -> int | None:
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else None


@contextmanager
def domain_errors(
    hosted: HostedModel, needed_bytes: int = 0, *, passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert errors of torch, a model or a guard inside the context to domain errors.

    Args:
        hosted: The model.
        needed_bytes: Estimated memory of the pass, for the out-of-memory message; 0 if unknown.
        passes: Exceptions that are not converted.

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
            f"'{missing.args[0]}' was not computed for these inputs: which modules run depends on the data",
        )
    except Exception as error:
        if isinstance(error, (CallsDifferError, *passes)):
            raise
        is_memory = is_out_of_memory(error)
        problem = _out_of_memory(error, needed_bytes) if is_memory else input_rejected(hosted, error)
    # Raised here, and not above, where it would keep the frames of the failed pass, and so its values, alive.
    raise problem


def _check_data(values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        if value.is_meta:  # computed beside the start, from values before it
            raise StartMixedError(name)


def _not_collected(target: TapTarget) -> ServiceError:
    """Error for a value that the pass did not compute."""
    name = target.target.name
    if target.target.is_gradient:
        return independent([name])
    return ServiceError(
        ErrorReason.MODULE_NOT_CALLED,
        f"'{name}' was not called in this pass: which modules run depends on the data",
    )


def _reduced_maps(
    target: TapTarget, value: torch.Tensor, operands: Operands, guard: PassGuard, padding: Padding
) -> tuple[list[FeatureMap], Accumulator | None]:
    """Reduce one value on the device and copy the requested parts to the host."""
    name, tap = target.target.name, target.tap
    with target.named_errors():
        own = _own(target, value, padding) if tap.reductions or tap.statistics else None
        reduced = _reduced(target, value, operands, guard, own)
        taken = _taken(target, reduced, own)
        cast = None
        if tap.cast and tap.cast.applies_to(reduced.value.dtype):
            cast = cast_value(reduced.value, tap.cast, reduced.channel_dim)
    sent = cast.value if cast else reduced.value
    main = Output(name, target, tuple(sent.shape), sent.dtype, tap.values)
    found = [FeatureMap(main, _bytes_of(name, sent) if tap.values else None, cast=cast)]
    companions = reduced.companions if tap.values else {}
    return [*found, *_companions(main, companions)], taken


def _taken(target: TapTarget, reduced: Reduced, own: Own | None) -> Accumulator | None:
    if not target.tap.statistics:
        return None
    accumulator, by_sample = target.accumulator(), target.tap.scope is Scope.SAMPLE
    own = reduced.own if target.tap.reductions else own
    if own is None or own.is_leading:
        mask = None if own is None or target.channels_needed in own.dims else own.mask
        parts = unpadded(target.samples_first(reduced.value), mask, by_sample=by_sample)
    else:
        dim, place = target.channels_needed, target.statistics_dim
        parts = own.parts(reduced.value, dim, (dim or 0) if place is None else place, by_sample=by_sample)
    for part in parts:
        accumulator.update(part)
    return accumulator


def _own(target: TapTarget, value: torch.Tensor, padding: Padding) -> Own | None:
    """Return which positions of a value are a sample's own; None where all count."""
    is_of_pass = target.target.kind == "module" and target.target.parameter is None
    if target.tap.includes_padding or not is_of_pass:
        return None
    return padding.own(target.target.name, value, target.target.layout)


def _companions(main: Output, values: Mapping[str, torch.Tensor]) -> Iterator[FeatureMap]:
    for role, value in values.items():
        output = companion_output(main, role, tuple(value.shape), value.dtype)
        yield FeatureMap(output, _bytes_of(output.name, value))


def _with_statistics(
    feature_maps: Sequence[FeatureMap], taken: Mapping[str, Accumulator]
) -> Iterator[FeatureMap]:
    """Yield the feature maps of a pass with their statistics; covariances after their other companions."""
    found = dict(zip(taken, results(list(taken.values())), strict=True))
    mains = {entry.output.name: entry.output for entry in feature_maps}
    for entry, following in zip_longest(feature_maps, feature_maps[1:]):
        main = entry.output.companion_of or entry.output.name
        result = found.get(main)
        yield entry if entry.output.companion_of else replace(entry, statistics=result)
        is_last = following is None or not following.output.companion_of
        if is_last and result is not None and result.covariance is not None:
            yield covariance_map(mains[main], result.covariance)


def covariance_map(main: Output, matrix: torch.Tensor) -> FeatureMap:
    """Return the covariance matrix of a feature map as its companion."""
    output = companion_output(main, COVARIANCE, tuple(matrix.shape), matrix.dtype)
    return FeatureMap(output, _bytes_of(output.name, matrix))


def _reduced(
    target: TapTarget, value: torch.Tensor, operands: Operands, guard: PassGuard, own: Own | None
) -> Reduced:
    tap = target.tap
    if not (tap.reductions or tap.cast):
        return Reduced(value)
    tensors = operands[target.tap_index] if operands else ()
    return reduce_value(value, tap.reductions, tap.channel_dim, tensors, guard.check, own, target.samples_dim)


def _bytes_of(name: str, value: torch.Tensor) -> Payload:
    """Return the values in row-major order as bytes on the host, without a copy where they are that already.

    The copy may still be running: see `Transfers.to_host`.
    """
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantised" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise ServiceError(
            ErrorReason.NOT_A_TENSOR, f"'{name}' is a {kind} tensor; only dense ones can be returned"
        )
    return this_thread.transfers.to_host(value.resolve_conj().resolve_neg())


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
