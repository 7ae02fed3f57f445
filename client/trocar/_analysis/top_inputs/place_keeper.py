"""Place keeper: the places of the values in a running top-k, worked out while their batch is at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trocar._analysis.top_inputs.top_inputs import TopInput

if TYPE_CHECKING:
    from trocar._analysis.top_inputs.channel_top import ChannelTop
    from trocar._analysis.top_inputs.places import Place, ValueFrame


class PlaceKeeper:
    """Places by channel and sample; as many as the running top-k has values."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], Place | None] = {}

    def update(self, top: ChannelTop, first: int, frame: ValueFrame | None) -> set[int]:
        """Work out the places of a batch's values, and return the samples that the top-k has.

        Args:
            top: After the batch was added.
            first: The place of the batch's first sample in the data set.
            frame: The dimensions of the batch's values; None without positions.
        """
        kept: dict[tuple[int, int], Place | None] = {}
        samples: set[int] = set()
        for channel, (row, positions) in enumerate(
            zip(top.samples.tolist(), top.positions.tolist(), strict=True)
        ):
            for sample, position in zip(row, positions, strict=True):
                if sample < 0:
                    continue
                samples.add(sample)
                if frame is None:
                    continue
                key = (channel, sample)
                kept[key] = self._places[key] if sample < first else frame.place(position, sample - first)
        self._places = kept
        return samples

    def rows(
        self, top: ChannelTop, channels: Sequence[int], names: Mapping[int, str]
    ) -> tuple[tuple[TopInput, ...], ...]:
        """Return the entries of each channel."""
        return tuple(
            tuple(
                TopInput(channel, rank, value, sample, names[sample], self._places.get((place, sample)))
                for rank, (value, sample) in enumerate(zip(values, samples, strict=True), 1)
                if sample >= 0
            )
            for place, (channel, values, samples) in enumerate(
                zip(channels, top.values.tolist(), top.samples.tolist(), strict=True)
            )
        )
