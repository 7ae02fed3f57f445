"""Tap outputs: the feature maps that a tap makes of one value, known before the pass."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import TapRequest
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Target
from trocar_server.surgery.axes.layout import samples_dim_of
from trocar_server.surgery.axes.token_grid import TokenGrid
from trocar_server.tensors.reductions import (
    CastSignature,
    Lens,
    Readout,
    Reduced,
    cast_signature,
    reduced_signature,
)
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, number_count
from trocar_server.tensors.stats.groups import resolve_channel_dim
from trocar_server.tensors.stats.statistic import default_channel_dim

COVARIANCE = "covariance"
"""The role of the covariance matrix beside its feature map."""

_NUMBER_BYTES = 8


@dataclass(frozen=True)
class TapTarget:
    """One value that a pass will collect, with its tap.

    The tap has the channel dimension that the value's layout tells, unless the request says another one.
    """

    target: Target
    leaf: Leaf
    tap: TapRequest
    type_name: str
    tap_index: int = 0
    """The position of the tap in the request."""
    grids: tuple[TokenGrid, ...] = ()
    """The patches of pictures along its dimensions."""

    @cached_property
    def reduced(self) -> Reduced:
        """The result of the tap's reductions, without data.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, they do not fit the value.
        """
        shape, dtype = self.leaf.shape or (), self.leaf.dtype or torch.float32
        with self.named_errors():
            return reduced_signature(
                shape, dtype, self.tap.reductions, self.tap.channel_dim, self.samples_dim
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each dimension of the value; none where nothing is known, and after reductions.

        A lens or readout alone leaves all but the last.
        """
        layout, reductions = self.target.layout, self.tap.reductions
        if layout is None or not reductions:
            return () if layout is None else layout.axes
        first, *others = reductions
        if others or not isinstance(first, Lens | Readout):
            return ()
        read = len(layout.axes) - 1 if isinstance(first, Lens) else self._channel_dim
        return (*(axis for place, axis in enumerate(layout.axes) if place != read), "")

    @property
    def _channel_dim(self) -> int:
        """The dimension of the channels that was chosen or is known; the usual one otherwise."""
        rank, dim = len(self.leaf.shape or ()), self.tap.channel_dim
        return (default_channel_dim(rank) if dim is None else dim) % max(rank, 1)

    @property
    def samples_dim(self) -> int | None:
        """The dimension of the samples; the first one where that is not known, None without one."""
        return samples_dim_of(self.target.layout)

    @cached_property
    def outputs(self) -> "tuple[Output, ...]":
        """Its feature maps in the reply: the value, then its companions.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, reductions or cast do not fit the value.
        """
        name, wants_values = self.target.name, self.tap.values
        if not (self.tap.reductions or self.tap.cast):
            main = Output(name, self, self.leaf.shape or (), self.leaf.dtype, wants_values)
            return (main, *self._covariance(main))
        value = self.reduced.value
        main = Output(name, self, tuple(value.shape), self.cast_signature.dtype, wants_values)
        companions = self.reduced.companions if wants_values else {}
        others = (companion_output(main, role, tuple(t.shape), t.dtype) for role, t in companions.items())
        return (main, *others, *self._covariance(main))

    def _covariance(self, main: "Output") -> "Iterator[Output]":
        if Statistic.COVARIANCE in self.tap.statistics:
            with self.named_errors():
                dim = resolve_channel_dim(self.tap.scope, len(main.shape), self.statistics_dim)
            size = main.shape[dim or 0]
            yield companion_output(main, COVARIANCE, (size, size), torch.float64)

    @property
    def byte_count(self) -> int:
        """Bytes of its values in the reply."""
        return sum(output.byte_count for output in self.outputs)

    @property
    def number_bytes(self) -> int:
        """Upper bound of the bytes of its statistics and scales; scope all counts no more than its name.

        Raises:
            ServiceError: It has no dimension for the scope or the channels, or too many channels.
        """
        tap, shape = self.tap, self.outputs[0].shape
        scales = (
            self.cast_signature.scale_count * _NUMBER_BYTES if tap.cast and tap.cast.is_per_channel else 0
        )
        if not tap.statistics or self.leaf.shape is None:
            return scales
        free = len(tap.statistics) if tap.scope is Scope.ALL else 0
        with self.named_errors():
            numbers = number_count(
                tap.statistics, tap.scope, self.measured(shape), self.statistics_dim, tap.parameters
            )
        return max(numbers - free, 0) * _NUMBER_BYTES + scales

    @property
    def channels_needed(self) -> int | None:
        """The dimension of the channels, where the statistics tell channels apart; else None."""
        tap = self.tap
        if tap.scope is not Scope.CHANNEL and Statistic.ARGMAX_CHANNEL not in tap.statistics:
            return None
        if tap.reductions:
            return self.reduced.channel_dim
        return self._channel_dim

    def measured(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape as statistics see it: those over samples have these first."""
        dim = self._moved_dim
        return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else shape

    def samples_first(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value, or its mask, as statistics see it."""
        return value.movedim(self._moved_dim, 0) if self._moved_dim else value

    @property
    def _moved_dim(self) -> int:
        """The dimension of samples that statistics need first; 0 where nothing moves."""
        if self.tap.scope is not Scope.SAMPLE:
            return 0
        return (self.reduced.samples_dim if self.tap.reductions else self.samples_dim) or 0

    def accumulator(self) -> Accumulator:
        """Return the accumulator of its values: over one pass, or over many.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the reductions left no dimension for the scope.
        """
        tap = self.tap
        return Accumulator(tap.statistics, tap.scope, self.statistics_dim, tap.parameters)

    @property
    def statistics_dim(self) -> int | None:
        """The channel dimension for statistics; None for the default of the rank.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, there is no dimension for the scope.
        """
        if not self.tap.reductions:
            if self.tap.scope is Scope.SAMPLE and self.samples_dim is None:
                raise _no_samples(self.target)
            return self._behind_samples(self.tap.channel_dim)
        is_lost = {
            Scope.CHANNEL: self.reduced.channel_dim is None,
            Scope.SAMPLE: self.reduced.samples_dim is None,
            Scope.ALL: False,
        }
        if is_lost[self.tap.scope]:
            raise ServiceError(
                ErrorReason.REDUCTION_REJECTED,
                f"the reductions leave no dimension for statistics over '{self.tap.scope}'; use over='all'",
            )
        return self._behind_samples(self.reduced.channel_dim)

    def _behind_samples(self, dim: int | None) -> int | None:
        """Return where a dimension is once the samples are first, if statistics need that."""
        return dim if dim is None or dim < 0 or dim >= self._moved_dim else dim + 1

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Add the value's name to errors."""
        try:
            yield
        except ServiceError as error:
            name = self.target.name
            details = {**error.details, "name": name}
            raise ServiceError(error.reason, f"'{name}': {error.message}", **details) from None

    @cached_property
    def cast_signature(self) -> CastSignature:
        """Dtype and bytes after the tap's cast; without one of the reduced value.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the cast does not fit the value.
        """
        value, cast = self.reduced.value, self.tap.cast
        if cast is None or not cast.applies_to(value.dtype):
            return CastSignature(value.dtype, value.nbytes, 0, 0)
        with self.named_errors():
            return cast_signature(value.shape, value.dtype, cast, self.reduced.channel_dim)


@dataclass(frozen=True)
class Output:
    """One feature map of a reply, without its values.

    Attributes:
        name: Unique in the reply.
        source: The tap target that it was collected for.
        shape: Its shape; known before the pass, except where a model reads its data.
        dtype: The dtype of its values as they are sent.
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


def _no_samples(target: Target) -> ServiceError:
    axes = ", ".join(name or "-" for name in (() if target.layout is None else target.layout.axes))
    return ServiceError(
        ErrorReason.REDUCTION_REJECTED,
        f"no dimension of the value has samples: it is ({axes}), the same for all samples; use over='all' or "
        "over='channel'",
    )


def companion_output(main: Output, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Output:
    """Describe the companion of a feature map, for example the indices of a top-k."""
    return Output(f"{main.name}.{role}", main.source, shape, dtype, True, main.name)
