"""Peak channel: the channel with the largest value."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats.accumulator_state import Unpacked, damaged
from trocar_server.tensors.stats.groups import BLOCK_ELEMENTS, Grouped
from trocar_server.tensors.stats.parts import Part
from trocar_server.tensors.stats.statistic import Scope, Statistic
from trocar_server.tensors.stats.summary import summarize
from trocar_server.tensors.stats.topic import Topic


@dataclass(frozen=True)
class ChannelPeaks:
    """The largest value of each channel, over everything."""

    high: torch.Tensor
    """Of shape (channels,), float64; NaN where a channel has any, -Inf where it has no elements."""

    is_empty: bool
    """Whether there were no elements at all."""

    def merge(self, other: "ChannelPeaks") -> "ChannelPeaks":
        """Merge with the peaks of the same channels over other elements.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, there are other channels.
        """
        if len(self.high) != len(other.high):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"argmax_channel of {len(other.high)} channels after {len(self.high)}; "
                "use one accumulator for each",
            )
        return ChannelPeaks(torch.maximum(self.high, other.high), self.is_empty and other.is_empty)

    def to(self, device: torch.device) -> "ChannelPeaks":
        """Return this on `device`."""
        return ChannelPeaks(self.high.to(device), self.is_empty)

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the channel, of shape (1,); NaN without elements."""
        del statistic  # there is only one
        return _argmax(self.high[None], self.is_empty)


@dataclass(frozen=True)
class SamplePeaks:
    """The peak channel of each sample."""

    channel: torch.Tensor
    """Of shape (samples,), float64; NaN where a sample has no elements."""

    def concatenate(self, other: "SamplePeaks") -> "SamplePeaks":
        """Append the samples of `other`."""
        return SamplePeaks(torch.cat([self.channel, other.channel]))

    def to(self, device: torch.device) -> "SamplePeaks":
        """Return this on `device`."""
        return SamplePeaks(self.channel.to(device))

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the channels, of shape (samples,)."""
        del statistic  # there is only one
        return self.channel


def topic(scope: Scope) -> Topic[ChannelPeaks] | Topic[SamplePeaks]:
    """Return the topic of peak channels, over everything or per sample."""
    if scope is Scope.SAMPLE:
        return Topic(_measure_samples, SamplePeaks.concatenate)
    return Topic(_measure_all, ChannelPeaks.merge, _pack, _unpack)


def _measure_all(grouped: Grouped) -> ChannelPeaks:
    return ChannelPeaks(_peaks(grouped.value, grouped.channel_dim), grouped.value.numel() == 0)


def _measure_samples(grouped: Grouped) -> SamplePeaks:
    peaks = _sample_peaks(grouped.value, grouped.channel_dim or 1)
    return SamplePeaks(_argmax(peaks, grouped.value.numel() == 0))


def _sample_peaks(value: torch.Tensor, channel_dim: int) -> torch.Tensor:
    """Return the largest value of each channel of each sample, of shape (samples, channels)."""
    if value.numel() == 0:
        return value.new_empty(value.shape[0], value.shape[channel_dim], dtype=torch.float64)
    if value.numel() <= BLOCK_ELEMENTS:
        rows = value.to(torch.float64).movedim(channel_dim, 1)
        return rows.reshape(*rows.shape[:2], -1).amax(2)
    if len(value) == 1:
        return _peaks(value, channel_dim)[None]
    step = max(1, BLOCK_ELEMENTS * len(value) // value.numel())
    return torch.cat([_sample_peaks(piece, channel_dim) for piece in value.split(step)])


def _peaks(value: torch.Tensor, channel_dim: int | None) -> torch.Tensor:
    return summarize(value, channel_dim or 0, (Part.HIGH,)).parts[Part.HIGH][0]


def _argmax(peaks: torch.Tensor, is_empty: bool) -> torch.Tensor:
    if is_empty or peaks.shape[1] == 0:
        return peaks.new_full((len(peaks),), torch.nan)
    return peaks.argmax(1).to(torch.float64)


def _pack(accumulated: ChannelPeaks) -> Mapping[str, torch.Tensor]:
    return {"peaks.high": accumulated.high}


def _unpack(state: Unpacked, groups: int, count: int) -> ChannelPeaks:
    del groups  # the only one
    high = state.tensor("peaks.high", (None,), torch.float64)
    if count and not len(high):
        raise damaged("elements without channels")
    return ChannelPeaks(high, count == 0)
