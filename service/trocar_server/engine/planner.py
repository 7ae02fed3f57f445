"""Checking what is asked for against a model before anything is computed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.plan import SENDABLE, TapRequest
from trocar_server.errors import ServiceError
from trocar_server.stats import Scope
from trocar_server.stats.groups import resolve_channel_dim
from trocar_server.surgery import Leaf, Recording, Target, resolve

_NUMBER_BYTES = 8

# They travel in the one message that describes the reply, of which our client takes 16 MiB.
_MAX_STATISTICS_BYTES = 12 << 20


@dataclass(frozen=True)
class TapTarget:
    """One value that a pass will collect, and what is wanted of it."""

    target: Target
    leaf: Leaf
    tap: TapRequest
    type_name: str

    def outputs(self) -> "tuple[Output, ...]":
        """Return what the reply will have of it."""
        return (Output(self.target.name, self, self.leaf.shape or (), self.leaf.dtype, self.tap.values),)

    @property
    def value_bytes(self) -> int:
        """Bytes of its values in the reply."""
        return sum(output.byte_count for output in self.outputs())

    @property
    def statistics_bytes(self) -> int:
        """Bytes of its numbers per sample or channel; one over everything counts no more than its name.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it has no dimension for the scope.
        """
        tap, shape = self.tap, self.leaf.shape
        if not tap.statistics or shape is None:
            return 0
        channel_dim = self._channel_dim(len(shape))
        if tap.scope is Scope.ALL:
            return 0
        return shape[channel_dim or 0] * len(tap.statistics) * _NUMBER_BYTES

    def _channel_dim(self, rank: int) -> int | None:
        try:
            return resolve_channel_dim(self.tap.scope, rank, self.tap.channel_dim)
        except ServiceError as error:
            name = self.target.name
            raise ServiceError(error.reason, f"'{name}': {error.message}", name=name) from None


@dataclass(frozen=True)
class Output:
    """One feature map of a reply, without its values.

    Attributes:
        name: Unique in the reply.
        source: What it was collected for.
        shape: Its shape; a plan knows it before the pass, except where a model looks at its data.
        dtype: Its dtype.
        has_values: Whether its values are sent.
        companion_of: The name of the feature map that it accompanies; empty for one that was tapped.
    """

    name: str
    source: TapTarget
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    has_values: bool
    companion_of: str = ""

    @property
    def byte_count(self) -> int:
        """Bytes of its values in the reply."""
        return math.prod(self.shape) * self.dtype.itemsize if self.has_values and self.dtype else 0


@dataclass(frozen=True)
class Resolved:
    """What a plan's taps became for inputs of one form.

    Attributes:
        targets: The feature maps of the reply, in order.
        expansions: The names that each tap became, in the order of the request.
        byte_count: Bytes of all values wanted.
    """

    targets: tuple[TapTarget, ...]
    expansions: tuple[tuple[str, ...], ...]
    byte_count: int


def resolve_taps(taps: Sequence[TapRequest], recording: Recording, max_reply_bytes: int) -> Resolved:
    """Resolve every tap and check the size of the reply.

    Raises:
        ServiceError: A selector's error, `DUPLICATE_NAME`, `INVALID_ARGUMENT` for an alias of
            several values or a statistic's scope that does not fit, or `REPLY_TOO_LARGE`.
    """
    found = resolve((tap.selector for tap in taps), recording)
    expansions = [
        [
            TapTarget(_named(target, tap, len(values)), leaf, tap, recording.modules[target.path].type_name)
            for target, leaf in values
        ]
        for tap, values in zip(taps, found, strict=True)
    ]
    targets = tuple(_unique(target for targets in expansions for target in targets))
    _check_dtypes(targets)
    byte_count = _checked_byte_count(targets, max_reply_bytes)
    names = tuple(tuple(target.target.name for target in targets) for targets in expansions)
    return Resolved(targets, names, byte_count)


def _check_dtypes(targets: Sequence[TapTarget]) -> None:
    for target in targets:
        if target.tap.values and target.leaf.dtype not in SENDABLE:
            dtype = str(target.leaf.dtype).removeprefix("torch.")
            raise ServiceError(
                ErrorReason.NOT_A_TENSOR,
                f"the values of '{target.target.name}' are {dtype}, which cannot be sent; "
                "ask for statistics alone",
            )


def _checked_byte_count(targets: Sequence[TapTarget], max_reply_bytes: int) -> int:
    """Return the bytes of all values, if there is room for them and for the statistics."""
    byte_count = sum(target.value_bytes for target in targets)
    statistics_bytes = sum(target.statistics_bytes for target in targets)
    if byte_count + statistics_bytes > max_reply_bytes:
        raise _too_large(byte_count + statistics_bytes, max_reply_bytes, targets)
    if statistics_bytes > _MAX_STATISTICS_BYTES:
        raise _too_many_numbers(statistics_bytes)
    return byte_count


def _named(target: Target, tap: TapRequest, count: int) -> Target:
    if not tap.alias:
        return target
    if count > 1:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"alias '{tap.alias}' names one value, but '{tap.selector.text}' stands for {count}; "
            "add a call index or a pick, or leave the alias out",
            selector=tap.selector.text,
        )
    return replace(target, name=tap.alias)


def _unique(targets: Iterable[TapTarget]) -> Iterator[TapTarget]:
    """Drop a value asked for twice in the same way; refuse one name for two things."""
    seen: dict[str, TapTarget] = {}
    for target in targets:
        name = target.target.name
        if name not in seen:
            seen[name] = target
            yield target
            continue
        first = seen[name]
        if first.target != target.target or _wants(first.tap) != _wants(target.tap):
            raise ServiceError(
                ErrorReason.DUPLICATE_NAME,
                f"two feature maps would be named '{name}'; give one of them an alias",
                name=name,
            )


def _wants(tap: TapRequest) -> tuple[object, ...]:
    return tap.values, tap.statistics, tap.scope, tap.channel_dim


def check_byte_count(byte_count: int, limit: int) -> None:
    """Refuse a reply that turned out larger than its recording said.

    Raises:
        ServiceError: `REPLY_TOO_LARGE`.
    """
    if byte_count > limit:
        raise ServiceError(
            ErrorReason.REPLY_TOO_LARGE,
            f"the feature maps are {byte_count:,} bytes, the limit is {limit:,}; ask for fewer taps "
            "or a smaller batch, or for statistics without values",
            byte_count=str(byte_count),
            limit=str(limit),
        )


def _too_large(byte_count: int, limit: int, targets: Iterable[TapTarget]) -> ServiceError:
    sizes = {target.target.name: target.value_bytes + target.statistics_bytes for target in targets}
    largest = max(sizes, key=sizes.__getitem__)
    return ServiceError(
        ErrorReason.REPLY_TOO_LARGE,
        f"the feature maps would be {byte_count:,} bytes, the limit is {limit:,}; the largest is "
        f"'{largest}' with {sizes[largest]:,}. Nothing was computed. Ask for fewer taps "
        "or a smaller batch, or for statistics without values",
        byte_count=str(byte_count),
        limit=str(limit),
    )


def _too_many_numbers(byte_count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.REPLY_TOO_LARGE,
        f"the statistics would be {byte_count:,} bytes, the limit is {_MAX_STATISTICS_BYTES:,}. Nothing was "
        "computed. Ask for fewer taps or statistics, or for scope 'all'",
        byte_count=str(byte_count),
        limit=str(_MAX_STATISTICS_BYTES),
    )
