"""Results of a pass: its values are reduced on the device and copied to the host. Owner thread only."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import Collected
from trocar_server.engine.request.plan import Payload
from trocar_server.engine.resolve.tap_outputs import COVARIANCE, Output, TapTarget, companion_output
from trocar_server.engine.transfer import this_thread
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, independent
from trocar_server.tensors.reductions import CastValue, Head, Reduced, cast_value, reduce_value
from trocar_server.tensors.reductions.padding import Own, Padding, unpadded
from trocar_server.tensors.stats import Accumulator, Scope, StatisticsResult, results

Heads = Callable[[TapTarget], Head | None]
"""What reads a value as tokens."""
NO_HEADS: Heads = lambda _: None  # noqa: E731
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
    token_texts: Mapping[int, str] = field(default_factory=dict)
    """Of the ids of a lens: the texts of these tokens."""

    @property
    def read_tokens(self) -> frozenset[int]:
        """The ids of a lens; empty of other feature maps."""
        is_of_lens = self.output.companion_of and self.output.source.tap.reads_tokens
        if not is_of_lens or self.values is None or self.output.dtype is not torch.int64:
            return frozenset()
        return frozenset(np.unique(self.values.view(np.int64)).tolist())


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


def finish_pass(
    collected: Collected,
    targets: Sequence[TapTarget],
    guard: PassGuard,
    operands: Operands,
    started: float,
    arguments: Callable[[], Mapping[str, object]] = dict,
    heads: Heads = NO_HEADS,
) -> PassResult:
    """Reduce a pass's collected values and copy the requested ones to the host.

    The copies may still be running when this returns, and the next pass may begin: see `Transfers`.

    Args:
        collected: The collected values.
        targets: The requested values.
        guard: Aborts the reductions.
        operands: For each tap, by position: the operands of its reductions.
        started: When the pass began, as `time.perf_counter()` in seconds.
        arguments: Returns those of the forward by name, which tell of padding.
        heads: Returns what reads a value as tokens, for lenses.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, the model did not call a tapped module on this input;
            `NOT_DIFFERENTIABLE`, a value got no gradient; an error of a reduction.
    """
    values, padding = collected.values, None
    feature_maps: list[FeatureMap] = []
    taken: dict[str, Accumulator] = {}
    for target in targets:
        guard.check()
        if target.target.name not in values:
            if target.target.is_gradient and target.tap.selector.is_plural:
                continue  # a pattern names it, and the objective does not depend on it
            raise not_collected(target)
        if target.tap.is_plain:
            output, value = target.outputs[0], values[target.target.name]
            if value.shape != output.shape or value.dtype is not output.dtype:
                output = Output(output.name, target, tuple(value.shape), value.dtype, target.tap.values)
            feature_maps.append(FeatureMap(output, _bytes_of(output.name, value)))
            continue
        padding = padding or Padding.of(arguments())
        head, value = heads(target), values[target.target.name]
        outcome, accumulator = _reduced_maps(target, value, operands, guard, padding, head)
        feature_maps += outcome
        if accumulator is not None:
            taken[outcome[0].output.name] = accumulator
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


def not_collected(target: TapTarget) -> ServiceError:
    """Error for a value that the pass did not compute."""
    name = target.target.name
    if target.target.is_gradient:
        return independent([name])
    return ServiceError(
        ErrorReason.MODULE_NOT_CALLED,
        f"'{name}' was not called in this pass: which modules run depends on the data",
    )


def _reduced_maps(
    target: TapTarget,
    value: torch.Tensor,
    operands: Operands,
    guard: PassGuard,
    padding: Padding,
    head: Head | None,
) -> tuple[list[FeatureMap], Accumulator | None]:
    """Reduce one value on the device and copy the requested parts to the host."""
    name, tap = target.target.name, target.tap
    with target.named_errors():
        own = _own(target, value, padding) if tap.reductions or tap.statistics else None
        reduced = _reduced(target, value, operands, guard, own, head)
        taken = _taken(target, reduced, own)
        cast = None
        if tap.cast and tap.cast.applies_to(reduced.value.dtype):
            cast = cast_value(reduced.value, tap.cast, reduced.channel_dim)
    sent = cast.value if cast else reduced.value
    main = Output(name, target, tuple(sent.shape), sent.dtype, tap.values)
    outcome = [FeatureMap(main, _bytes_of(name, sent) if tap.values else None, cast=cast)]
    companions = reduced.companions if tap.values else {}
    return [*outcome, *_companions(main, companions)], taken


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
    outcome = dict(zip(taken, results(list(taken.values())), strict=True))
    mains = {entry.output.name: entry.output for entry in feature_maps}
    for entry, following in zip_longest(feature_maps, feature_maps[1:]):
        main = entry.output.companion_of or entry.output.name
        result = outcome.get(main)
        yield entry if entry.output.companion_of else replace(entry, statistics=result)
        is_last = following is None or not following.output.companion_of
        if is_last and result is not None and result.covariance is not None:
            yield covariance_map(mains[main], result.covariance)


def covariance_map(main: Output, matrix: torch.Tensor) -> FeatureMap:
    """Return the covariance matrix of a feature map as its companion."""
    output = companion_output(main, COVARIANCE, tuple(matrix.shape), matrix.dtype)
    return FeatureMap(output, _bytes_of(output.name, matrix))


def _reduced(
    target: TapTarget,
    value: torch.Tensor,
    operands: Operands,
    guard: PassGuard,
    own: Own | None,
    head: Head | None,
) -> Reduced:
    tap = target.tap
    if not (tap.reductions or tap.cast):
        return Reduced(value)
    tensors = operands[target.tap_index] if operands else ()
    samples = target.samples_dim
    return reduce_value(value, tap.reductions, tap.channel_dim, tensors, guard.check, own, samples, head)


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
