"""Accumulator: statistics over many tensors, one at a time."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Self

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats.accumulator_state import MAX_COUNT, Unpacked, damaged, pack
from trocar_server.tensors.stats.groups import Grouped, group, group_nothing
from trocar_server.tensors.stats.statistic import (
    NO_PARAMETERS,
    Scope,
    Statistic,
    StatisticParameters,
    StatisticsResult,
)
from trocar_server.tensors.stats.statistic_requests import check_request, check_resumable
from trocar_server.tensors.stats.topics import SUMMARY, topics_for

_MAX_RANK = 64
"""The most dimensions that torch's tensors can have."""


class Accumulator:
    """Statistics of everything fed to it, as if it were one tensor.

        accumulator = Accumulator([Statistic.MEAN, Statistic.STD], Scope.CHANNEL)
        for batch in batches:
            accumulator.update(batch)
        accumulator.result().values[Statistic.STD]

    With `Scope.SAMPLE` the samples of later tensors follow those of earlier ones. Tensors may
    differ in shape, as long as the channels are the same. All numbers are computed in float64 on
    the tensors' device; integers beyond 2**53 are rounded to it first. Memory does not grow with
    the elements, only with the groups: quantiles keep up to `sketch.HELD_ELEMENTS`, a covariance
    a matrix of the channels. A rejected tensor changes nothing. Not thread-safe.

    Args:
        statistics: The statistics. Duplicates count once.
        scope: The elements that one number is taken over.
        channel_dim: The channel dimension, for `Scope.CHANNEL` and `Statistic.ARGMAX_CHANNEL`; negative
        counts from the end. Default: see `default_channel_dim`.
        parameters: Parameters of quantiles and histograms.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a statistic does not go with the scope or the parameters.
    """

    def __init__(
        self,
        statistics: Sequence[Statistic],
        scope: Scope = Scope.ALL,
        channel_dim: int | None = None,
        parameters: StatisticParameters = NO_PARAMETERS,
    ) -> None:
        check_request(statistics, scope, parameters)
        self._statistics = tuple(dict.fromkeys(statistics))
        self._scope = scope
        self._wanted_channel_dim = channel_dim
        self._parameters = parameters
        self._topics = topics_for(self._statistics, scope, parameters)
        self._channel_dim: int | None = None
        self._group_count = 1 if scope is Scope.ALL else 0
        self._element_count = 0
        self._accumulated: dict[Statistic, Any] | None = None  # as the topics make and take it

    @torch.no_grad()
    def update(self, value: torch.Tensor) -> None:
        """Accumulate one more tensor; it is neither kept nor changed.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the tensor is complex or not dense, has too few
                dimensions for the scope, or other channels than the ones before; `REDUCTION_REJECTED`,
                it has too many channels for a covariance or for quantiles.
        """
        has_peaks = Statistic.ARGMAX_CHANNEL in self._statistics
        grouped = group(value, self._scope, self._wanted_channel_dim, has_peaks=has_peaks)
        channel_dim = grouped.channel_dim if self._scope is Scope.CHANNEL else None
        group_count = grouped.view.shape[grouped.group_dim]
        self._check_channels(group_count, channel_dim)
        elements = grouped.view.numel() // max(group_count, 1)
        self._add(self._measure(grouped), group_count, elements, channel_dim)

    @torch.no_grad()
    def merge(self, other: "Accumulator") -> None:
        """Merge with the elements fed to `other`, which is not changed.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the two differ in statistics, scope, parameters or
                channels; `REDUCTION_REJECTED`, as in `update`.
        """
        if self._request != other._request:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "accumulators with different statistics, scope or parameters cannot be merged; create "
                "both with the same",
            )
        if other._accumulated is not None:
            self._check_channels(other._group_count, other._channel_dim)
            self._add(other._accumulated, other._group_count, other._element_count, other._channel_dim)

    @torch.no_grad()
    def result(self) -> StatisticsResult:
        """Return the statistics of everything so far."""
        (outcome,) = results([self])
        return outcome

    def _numbers(self) -> dict[Statistic, torch.Tensor]:
        """Return every statistic but a covariance, one-dimensional, float64, on the device."""
        accumulated = self._present
        numeric = (s for s in self._statistics if s is not Statistic.COVARIANCE)
        return {s: accumulated.get(s, accumulated[SUMMARY]).finish(s).reshape(-1) for s in numeric}

    @property
    def _present(self) -> dict[Statistic, Any]:
        if self._accumulated is None:
            return self._measure(group_nothing(self._scope))
        return self._accumulated

    def _result(self, numbers: Mapping[Statistic, list[float]]) -> StatisticsResult:
        accumulated = self._present
        values: dict[Statistic, list[float]] = {s: [] for s in self._statistics}
        values |= numbers
        matrix = accumulated.get(Statistic.COVARIANCE)
        return StatisticsResult(
            self._scope,
            self._channel_dim,
            values,
            edges=accumulated[Statistic.HISTOGRAM].edges if Statistic.HISTOGRAM in accumulated else (),
            rank_error=accumulated[Statistic.QUANTILES].rank_error
            if Statistic.QUANTILES in accumulated
            else 0.0,
            covariance=None if matrix is None else matrix.finish(Statistic.COVARIANCE).cpu(),
        )

    @torch.no_grad()
    def state(self) -> bytes:
        """Serialise the accumulator, to resume exactly here with `from_state`.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the scope is sample, which has no state.
        """
        check_resumable(self._scope)
        if self._accumulated is None:
            return pack(repr(self._request), {})
        channel_dim = -1 if self._channel_dim is None else self._channel_dim
        counts = torch.full((self._group_count,), self._element_count)
        tensors = {"counts": counts, "channel_dim": torch.tensor([channel_dim])}
        for statistic, topic in self._topics.items():
            tensors.update(topic.pack(self._accumulated[statistic]))
        return pack(repr(self._request), tensors)

    @classmethod
    @torch.no_grad()
    def from_state(
        cls,
        statistics: Sequence[Statistic],
        scope: Scope,
        channel_dim: int | None,
        parameters: StatisticParameters,
        state: bytes,
    ) -> Self:
        """Return an accumulator that resumes from a state.

        The state is untrusted: one that does not fit is rejected, and memory is bounded by its size. Valid
        but invented numbers give invented statistics.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the scope is sample, or the state is damaged or belongs to
                other statistics; `REDUCTION_REJECTED`, it has too many channels.
        """
        check_resumable(scope)
        accumulator = cls(statistics, scope, channel_dim, parameters)
        unpacked = Unpacked(repr(accumulator._request), state)
        if not unpacked.is_empty:
            accumulator._resume(unpacked)
        if not unpacked.is_empty:
            raise damaged("it has unexpected entries")
        return accumulator

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether values of a shape have the channels of what was accumulated, if that has any."""
        if self._accumulated is None or not self._channel_dim:
            return True
        return self._channel_dim < len(shape) and shape[self._channel_dim] == self._group_count

    @property
    def _request(self) -> tuple[object, ...]:
        statistics = tuple(str(statistic) for statistic in self._statistics)
        parameters = self._parameters
        numbers = (parameters.quantiles, parameters.edges, parameters.most_bins)
        return statistics, str(self._scope), self._wanted_channel_dim, *numbers

    def _measure(self, grouped: Grouped) -> dict[Statistic, Any]:
        return {statistic: topic.measure(grouped) for statistic, topic in self._topics.items()}

    def _check_channels(self, group_count: int, channel_dim: int | None) -> None:
        if self._accumulated is None or self._scope is not Scope.CHANNEL:
            return
        if (self._channel_dim, self._group_count) != (channel_dim, group_count):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{group_count} channels in dimension {channel_dim} after {self._group_count} in dimension "
                f"{self._channel_dim}; use one accumulator for each",
            )

    def _add(
        self, new: dict[Statistic, Any], group_count: int, element_count: int, channel_dim: int | None
    ) -> None:
        """Merge the parts of other elements, atomically."""
        if self._accumulated is None:
            self._accumulated, self._channel_dim = new, channel_dim
            self._group_count, self._element_count = group_count, element_count
            return
        device = new[SUMMARY].count.device
        self._accumulated = {
            statistic: topic.combine(self._accumulated[statistic].to(device), new[statistic])
            for statistic, topic in self._topics.items()
        }
        if self._scope is Scope.SAMPLE:
            self._group_count += group_count
        else:
            self._element_count += element_count

    def _resume(self, state: Unpacked) -> None:
        counts = state.integers("counts", None, 0, MAX_COUNT)
        (channel_dim,) = state.integers("channel_dim", 1, -1, _MAX_RANK)
        groups, count = len(counts), max(counts, default=0)
        if any(other != count for other in counts) or groups * count > MAX_COUNT:
            raise damaged("its element counts are inconsistent")
        wanted = self._wanted_channel_dim
        if self._scope is Scope.ALL and (groups, channel_dim) != (1, -1):
            raise damaged("its groups do not match the scope")
        is_other = wanted is not None and wanted >= 0 and wanted != channel_dim
        if self._scope is Scope.CHANNEL and (channel_dim < 0 or is_other):
            raise damaged("its channels do not match the request")
        self._accumulated = {
            statistic: topic.unpack(state, groups, count) for statistic, topic in self._topics.items()
        }
        self._channel_dim = channel_dim if self._scope is Scope.CHANNEL else None
        self._group_count, self._element_count = groups, count


@torch.no_grad()
def results(accumulators: Sequence[Accumulator]) -> list[StatisticsResult]:
    """Return the statistics of several accumulators, with one transfer from each device for all numbers."""
    outcome = [accumulator._numbers() for accumulator in accumulators]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for numbers in outcome:
        for part in numbers.values():
            by_device.setdefault(part.device, []).append(part)
    flat = {device: iter(torch.cat(parts).tolist()) for device, parts in by_device.items()}
    taken = [
        {s: list(islice(flat[part.device], len(part))) for s, part in numbers.items()} for numbers in outcome
    ]
    return [accumulator._result(numbers) for accumulator, numbers in zip(accumulators, taken, strict=True)]


def reduce(
    value: torch.Tensor,
    statistics: Sequence[Statistic],
    scope: Scope,
    channel_dim: int | None = None,
    parameters: StatisticParameters = NO_PARAMETERS,
) -> StatisticsResult:
    """Return statistics of one tensor of any real dtype, on any device; see `Accumulator`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the tensor is complex or not dense, or has no dimension
            for this scope or `channel_dim`, or a statistic does not go with the scope or the
            parameters; `REDUCTION_REJECTED`, it has too many channels for a covariance or for quantiles.
    """
    accumulator = Accumulator(statistics, scope, channel_dim, parameters)
    accumulator.update(value)
    return accumulator.result()
