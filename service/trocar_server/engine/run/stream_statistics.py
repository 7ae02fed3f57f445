"""Stream statistics over all batches, and checkpoints from which a broken stream resumes.

Everything here touches tensors: owner thread only.
"""

import copy
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import TapRequest
from trocar_server.engine.resolve.tap_outputs import COVARIANCE, Output, TapTarget
from trocar_server.engine.run.pass_result import FeatureMap, PassResult, covariance_map
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Target
from trocar_server.tensors.reductions import dtype_name
from trocar_server.tensors.stats import Accumulator, Scope, StatisticsResult, results

MAX_CHECKPOINT_BYTES = 1 << 30
"""The largest checkpoint that is accepted."""

# Far above 100,000 feature maps, more than any client accepts; parsed JSON needs many times its bytes.
_MAX_HEAD_BYTES = 16 << 20
_MAX_BATCHES, _MAX_CALLS, _MAX_SIZE = 1 << 53, 1 << 31, 1 << 62
_MAX_CHARACTERS, _MAX_RANK, _MAX_PICKS = 1 << 16, 64, 64
_DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Entry:
    """One feature map with its statistics so far."""

    output: Output
    accumulator: Accumulator
    channel_dim: int | None
    """As given to the accumulator; it cannot be derived from an output in a checkpoint."""


class StreamStatistics:
    """Statistics of scope all and channel over the batches of a stream.

        statistics = StreamStatistics(plan.taps)
        statistics.add(result)                     # after each pass
        statistics.feature_maps()

    Args:
        taps: Of the stream.
        checkpoint: Result of `checkpoint`, to resume from; empty for a new stream.
        computation: Identifies what the stream computes: its model, taps, edits and objective.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the checkpoint is damaged or belongs to another computation.
    """

    def __init__(self, taps: Sequence[TapRequest], checkpoint: bytes = b"", computation: str = "") -> None:
        self.batch_count = 0
        self.failed_count = 0
        self._computation = computation
        self._entries: dict[str, _Entry] = {}
        if checkpoint:
            self._resume(taps, checkpoint)

    def add(self, result: PassResult) -> tuple[FeatureMap, ...]:
        """Accumulate the statistics of one pass, all or none, and return its feature maps without them.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, a feature map has other channels than in earlier batches.
        """
        added = dict(self._entries)
        for feature_map in result.feature_maps:
            taken = result.taken.get(feature_map.output.name)
            if taken is not None and is_running(feature_map.output.source.tap):
                added[feature_map.output.name] = _with(
                    added.get(feature_map.output.name), feature_map.output, taken
                )
        self._entries = added
        return tuple(_without_statistics(result.feature_maps))

    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Return every feature map so far: statistics without values, and their companions."""
        entries = list(self._entries.values())
        outcome = results([entry.accumulator for entry in entries])
        return tuple(chain.from_iterable(map(_finished, entries, outcome)))

    def checkpoint(self) -> bytes:
        """Serialise the accumulators as bytes."""
        states = [entry.accumulator.state() for entry in self._entries.values()]
        head = {
            "counts": [self.batch_count, self.failed_count],
            "computation": self._computation,
            "entries": [_described(entry) for entry in self._entries.values()],
            "sizes": [len(state) for state in states],
        }
        encoded = json.dumps(head).encode()
        return struct.pack("<Q", len(encoded)) + encoded + b"".join(states)

    def _resume(self, taps: Sequence[TapRequest], checkpoint: bytes) -> None:
        head, states = _split(checkpoint)
        counts = _field(head, "counts", list)
        if len(counts) != 2 or not all(_is_number(count, _MAX_BATCHES) for count in counts):
            raise _damaged()
        if head.get("computation") != self._computation:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "the checkpoint belongs to another model, or to other weights, code or settings of it, to "
                "other taps, edits or numerics, or another objective; give the same, or start again without "
                "it",
            )
        self.batch_count, self.failed_count = counts
        for described, state in zip(_field(head, "entries", list), states, strict=True):
            output = _output(taps, described)
            tap = output.source.tap
            dim = described.get("channel_dim")
            if not (dim is None or _is_number(dim, _MAX_CALLS, -_MAX_CALLS)):
                raise _damaged()
            accumulator = Accumulator.from_state(tap.statistics, tap.scope, dim, tap.parameters, state)
            if not accumulator.fits(output.shape):
                raise _damaged()
            self._entries[output.name] = _Entry(output, accumulator, dim)


def is_running(tap: TapRequest) -> bool:
    """Whether a tap's statistics are accumulated over a stream; those per sample are sent with each batch."""
    return bool(tap.statistics) and tap.scope is not Scope.SAMPLE


def _with(before: _Entry | None, output: Output, taken: Accumulator) -> _Entry:
    if before is None:
        return _Entry(_without_values(output), taken, output.source.statistics_dim)
    merged = copy.copy(before.accumulator)  # merging replaces its tensors and changes none in place
    merged.merge(taken)
    shape = before.output.shape
    if shape and output.shape:
        shape = (shape[0] + output.shape[0], *shape[1:])
    return replace(before, output=_without_values(before.output, shape), accumulator=merged)


def _without_values(output: Output, shape: tuple[int, ...] | None = None) -> Output:
    return Output(output.name, output.source, output.shape if shape is None else shape, output.dtype, False)


def _without_statistics(feature_maps: Sequence[FeatureMap]) -> Iterator[FeatureMap]:
    for feature_map in feature_maps:
        output = feature_map.output
        if not is_running(output.source.tap):
            yield feature_map
        elif not output.companion_of:
            yield FeatureMap(output, feature_map.values, None, feature_map.cast)
        elif output.name != f"{output.companion_of}.{COVARIANCE}":
            yield feature_map


def _finished(entry: _Entry, result: StatisticsResult) -> Iterator[FeatureMap]:
    yield FeatureMap(entry.output, None, result)
    if result.covariance is not None:
        yield covariance_map(entry.output, result.covariance)


def _described(entry: _Entry) -> dict[str, Any]:
    output = entry.output
    source, target = output.source, output.source.target
    return {
        "tap": source.tap_index,
        "name": output.name,
        "path": target.path,
        "type": source.type_name,
        "call": target.call,
        "port": target.port,
        "picks": target.picks,
        "shape": output.shape,
        "dtype": dtype_name(output.dtype) if output.dtype else "",
        "channel_dim": entry.channel_dim,
    }


def _output(taps: Sequence[TapRequest], described: Any) -> Output:
    """Rebuild a feature map's description from an untrusted checkpoint."""
    if not isinstance(described, dict):
        raise _damaged()
    index, call = _field(described, "tap", int), _field(described, "call", int)
    shape, picks = _field(described, "shape", list), _field(described, "picks", list)
    is_shape = len(shape) <= _MAX_RANK and all(_is_number(size, _MAX_SIZE) for size in shape)
    is_picks = len(picks) <= _MAX_PICKS and all(
        _is_text(step) or _is_number(step, _MAX_CALLS, -_MAX_CALLS) for step in picks
    )
    if not (0 <= index < len(taps) and is_running(taps[index]) and is_shape and is_picks):
        raise _damaged()
    name, path, port, type_name = (_field(described, key, str) for key in ("name", "path", "port", "type"))
    dtype = _DTYPES.get(_field(described, "dtype", str))
    if not (all(map(_is_text, (name, path, port, type_name))) and _is_number(call, _MAX_CALLS) and dtype):
        raise _damaged()
    leaf = Leaf(port, tuple(picks), "Tensor", tuple(shape), dtype)
    target = Target(name, path, call, port, tuple(picks), is_gradient=taps[index].selector.is_gradient)
    source = TapTarget(target, leaf, taps[index], type_name, index)
    return Output(name, source, tuple(shape), dtype, False)


def _is_number(value: object, end: int, start: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and start <= value < end


def _is_text(value: object) -> bool:
    """Whether it is text whose length and characters are valid in a reply."""
    is_short = isinstance(value, str) and len(value) <= _MAX_CHARACTERS
    return is_short and not any("\ud800" <= character <= "\udfff" for character in str(value))


def _split(checkpoint: bytes) -> tuple[dict[str, Any], list[bytes]]:
    start = 8
    try:
        (length,) = struct.unpack_from("<Q", checkpoint)
        if length > _MAX_HEAD_BYTES:
            raise _damaged()
        head = json.loads(checkpoint[start : start + length])
        sizes = _field(head, "sizes", list) if isinstance(head, dict) else [-1]
    except (struct.error, ValueError, RecursionError):
        raise _damaged() from None
    if not all(_is_number(size, MAX_CHECKPOINT_BYTES) for size in sizes):
        raise _damaged()
    start += length
    if start + sum(sizes) != len(checkpoint) or len(sizes) != len(_field(head, "entries", list)):
        raise _damaged()
    states = []
    for size in sizes:
        states.append(checkpoint[start : start + size])
        start += size
    return head, states


def _field(values: dict[str, Any], name: str, kind: type[Value]) -> Value:
    value = values.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _damaged()
    return value


def _damaged() -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        "the checkpoint is damaged or belongs to other taps; start again without it",
    )
