"""Dead channels: their absolute maximum over all inputs does not exceed a threshold."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trocar._base.names import unknown_name
from trocar._base.tables import html_table
from trocar._base.tensors import Array
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from trocar._request.statistic_options import StatisticName
    from trocar._result.feature_maps import FeatureMapInfo
    from trocar._result.statistics import Statistics

DEAD_STATISTICS: tuple[StatisticName, ...] = ("absmax", "nan_count")
"""What has to be asked for."""

_HEAD = ("feature map", "type", "channels", "dead", "share", "NaN", "dead channels")
_SHOWN_INDICES = 8


@dataclass(frozen=True)
class DeadRow:
    """The channels of one feature map."""

    name: str
    """The feature map's name."""
    type: str
    """The module's class name."""
    channels: int
    """How many channels it has."""
    dead: tuple[int, ...]
    """Channels whose absolute maximum is at most the threshold."""
    nan: tuple[int, ...]
    """Channels with a NaN in them; these are never counted as dead."""

    @property
    def share(self) -> float:
        """Dead channels as a share of all, 0 to 1."""
        return len(self.dead) / self.channels if self.channels else 0.0


@dataclass(frozen=True)
class DeadChannels:
    """Dead channels by feature map, in execution order; see `Client.dead_channels`.

    report = client.dead_channels("resnet50", "photos/", taps="**:ReLU")
    report["layer1.0.relu@0"].dead       # (3, 17, 40)
    print(report)                        # the feature maps with dead or NaN channels
    """

    rows: tuple[DeadRow, ...]
    """One for each feature map, those without dead channels too."""
    threshold: float
    """Channels whose absolute maximum is at most this count as dead."""
    model_id: str
    """The model that computed them."""

    def __getitem__(self, name: str) -> DeadRow:
        """Return the row of a feature map.

        Raises:
            KeyError: There is none of this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name("feature map", name, [row.name for row in self.rows])

    @property
    def channel_count(self) -> int:
        """Channels of all feature maps."""
        return sum(row.channels for row in self.rows)

    @property
    def dead_count(self) -> int:
        """Dead channels of all feature maps."""
        return sum(len(row.dead) for row in self.rows)

    @property
    def nan_count(self) -> int:
        """Channels with NaN of all feature maps."""
        return sum(len(row.nan) for row in self.rows)

    def plot(self, path: str | os.PathLike[str] | None = None, *, all_rows: bool = False) -> Figure:
        """Draw the share of dead channels of every feature map as bars.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            all_rows: Whether to draw all rows, in execution order; otherwise at most the 30 most relevant.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_dead, saved  # needs matplotlib, which is an extra

        return saved(draw_dead(self, all_rows=all_rows), path)

    def __str__(self) -> str:
        shown = self._shown()
        right = ("channels", "dead", "share", "NaN")
        return "\n".join([*([text_table(_HEAD, shown, right)] if shown else []), self._summary()])

    def __repr__(self) -> str:
        return f"<DeadChannels of {self.model_id}: {self._summary()}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._shown(), self._summary())

    def _shown(self) -> list[tuple[str, ...]]:
        return [
            (
                row.name,
                row.type,
                str(row.channels),
                str(len(row.dead)),
                f"{row.share:.1%}",
                str(len(row.nan) or ""),
                _indices(row.dead),
            )
            for row in self.rows
            if row.dead or row.nan
        ]

    def _summary(self) -> str:
        where = f"{self.channel_count:,} channels of {len(self.rows)} feature maps"
        text = f"{self.dead_count:,} of {where} are dead"
        if self.threshold:
            text += f" (absolute maximum at most {self.threshold:g})"
        return f"{text}; {self.nan_count:,} hold NaN" if self.nan_count else text


def check_threshold(threshold: float) -> float:
    """Return it.

    Raises:
        ValueError: It is negative, NaN or infinite.
    """
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"threshold={threshold!r} must be 0 or a positive number")
    return float(threshold)


def dead_channels_of(
    statistics: Mapping[str, Statistics],
    info: Mapping[str, FeatureMapInfo],
    threshold: float,
    model_id: str,
) -> DeadChannels:
    """Read the report from running statistics over channels; maps of rank 0 and 1 have no channels."""
    rows = [
        _row(info[name], np.atleast_1d(entry.absmax), np.atleast_1d(entry.nan_count), threshold)
        for name, entry in statistics.items()
        if name in info and len(info[name].shape) >= 2
    ]
    return DeadChannels(tuple(rows), threshold, model_id)


def _row(info: FeatureMapInfo, absmax: Array, nan_count: Array, threshold: float) -> DeadRow:
    is_nan = nan_count > 0
    is_dead = ~is_nan & (absmax <= threshold)  # no channel of a module without values, whose maximum is NaN
    return DeadRow(info.name, info.type, absmax.size, _positions(is_dead), _positions(is_nan))


def _positions(mask: Array) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _indices(positions: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, positions[:_SHOWN_INDICES]))
    return f"{shown}, ..." if len(positions) > _SHOWN_INDICES else shown
