"""Statistics over many tensors, one at a time."""

from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.stats.groups import check_value, resolve_channel_dim, with_group_dim
from trocar_server.stats.statistic import Scope, Statistic, StatisticsResult
from trocar_server.stats.summary import Summary, needed_parts, summarize


class Accumulator:
    """Statistics of everything fed to it, as if it were one tensor.

        accumulator = Accumulator([Statistic.MEAN, Statistic.STD], Scope.CHANNEL)
        for batch in batches:
            accumulator.update(batch)
        accumulator.result().values[Statistic.STD]

    With `Scope.SAMPLE` the samples of later tensors come behind those of earlier ones. Tensors may
    differ in shape, as long as the channels are the same. All numbers are computed in float64 on
    the tensors' device; integers beyond 2**53 are rounded to it first. Memory does not grow with
    the elements, only with the groups. Not thread-safe.

    Args:
        statistics: What to compute. Duplicates count once.
        scope: What to take it over.
        channel_dim: Which dimension holds the channels, for `Scope.CHANNEL`; negative counts from
            the end. Default: see `default_channel_dim`.
    """

    def __init__(
        self, statistics: Sequence[Statistic], scope: Scope = Scope.ALL, channel_dim: int | None = None
    ) -> None:
        self._statistics = tuple(dict.fromkeys(statistics))
        self._parts = needed_parts(self._statistics)
        self._scope = scope
        self._wanted_channel_dim = channel_dim
        self._channel_dim: int | None = None
        self._summary: Summary | None = None

    @torch.no_grad()
    def update(self, value: torch.Tensor) -> None:
        """Take in one more tensor; it is neither kept nor changed.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the tensor is complex or not dense, has too few
                dimensions for the scope, or other channels than the ones before.
        """
        check_value(value)
        channel_dim = resolve_channel_dim(self._scope, value.ndim, self._wanted_channel_dim)
        view, group_dim = with_group_dim(value, self._scope, channel_dim)
        self._add(summarize(view, group_dim, self._parts), channel_dim)

    @torch.no_grad()
    def merge(self, other: "Accumulator") -> None:
        """Take in everything that was fed to `other`, which stays as it is.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the two differ in statistics, scope or channels.
        """
        if (self._statistics, self._scope) != (other._statistics, other._scope):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "accumulators of other statistics or scope cannot be merged; make both alike",
            )
        if other._summary is not None:
            self._add(other._summary, other._channel_dim)

    @torch.no_grad()
    def result(self) -> StatisticsResult:
        """Return the statistics of everything so far, with one transfer from the device."""
        summary = self._summary or self._of_nothing()
        values = [summary.finish(statistic) for statistic in self._statistics]
        numbers = torch.stack(values).tolist() if values else []
        by_statistic = dict(zip(self._statistics, numbers, strict=True))
        return StatisticsResult(self._scope, self._channel_dim, by_statistic)

    def _add(self, summary: Summary, channel_dim: int | None) -> None:
        if self._summary is None:
            self._summary, self._channel_dim = summary, channel_dim
            return
        summary = summary.to(self._summary.count.device)
        if self._scope is Scope.SAMPLE:
            self._summary = self._summary.concatenate(summary)
            return
        before, now = len(self._summary.count), len(summary.count)
        if (self._channel_dim, before) != (channel_dim, now):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{now} channels in dimension {channel_dim} after {before} in dimension "
                f"{self._channel_dim}; use one accumulator for each",
            )
        self._summary = self._summary.merge(summary)

    def _of_nothing(self) -> Summary:
        groups = 1 if self._scope is Scope.ALL else 0
        return summarize(torch.empty(groups, 0), 0, self._parts)


def reduce(
    value: torch.Tensor, statistics: Sequence[Statistic], scope: Scope, channel_dim: int | None = None
) -> StatisticsResult:
    """Return statistics of one tensor of any real dtype, on any device; see `Accumulator`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the tensor is complex or not dense, or has no dimension
            for this scope or `channel_dim`.
    """
    accumulator = Accumulator(statistics, scope, channel_dim)
    accumulator.update(value)
    return accumulator.result()
