"""Top inputs: the samples of a data set with the largest values of each channel, and where in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trocar._analysis.neighbours.neighbours import PictureSources
from trocar._analysis.sample_inputs import crop_of, sample_image
from trocar._analysis.top_inputs.places import Place
from trocar._base.names import shortened, unknown_name
from trocar._base.tables import MOST_ROWS, first_lines, html_table
from trocar._base.text_tables import text_table
from trocar._result.plain_table import PlainTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trocar._base.tensors import Array

By = Literal["max", "mean"]

WIDEN = 3.0
"""By how much a crop is wider than a cell, unless another factor is given."""
_HEAD = ("channel", "rank", "value", "sample", "where")
_MOST_NAME = 60


@dataclass(frozen=True)
class TopInput:
    """One sample with a large value of a channel."""

    channel: int
    rank: int
    """From 1, the sample with the largest value."""
    value: float
    """The largest value of the channel over the positions, or their mean."""
    index: int
    """The sample's place in the data set, from 0."""
    key: str
    """Its file, its text, or `sample 3`."""
    place: Place | None
    """Where the channel is largest; None for values without positions, or whose dimensions are not known."""

    def __str__(self) -> str:
        where = f", {self.place}" if self.place is not None else ""
        return f"{self.key} {self.value:.4g}{where}"


@dataclass(frozen=True, eq=False)
class TopInputs:
    """The samples that drive channels most; see `Client.top_inputs`.

    top = client.top_inputs("resnet50", "photos/", "layer4", channels=[31], k=9)
    top[31][0].key, top[31][0].value     # the sample with the largest value
    print(top)
    top.plot("channel-31.png")           # crops around the largest value
    """

    channels: tuple[int, ...]
    """In the order asked for."""
    rows: tuple[tuple[TopInput, ...], ...]
    """Of each channel, largest first."""
    model_id: str
    at: str
    """The feature map."""
    by: By
    """What is ranked: the largest value over the positions, or their mean."""
    count: int
    """How many samples the data set has."""
    nan_counts: Mapping[int, int] = field(default_factory=dict)
    """Samples left out because the channel is NaN in them, of channels with any."""
    sources: PictureSources = field(default_factory=PictureSources, repr=False)
    """Inputs for the picture."""

    def __len__(self) -> int:
        return len(self.channels)

    def __iter__(self) -> Iterator[tuple[TopInput, ...]]:
        return iter(self.rows)

    def __getitem__(self, channel: int) -> tuple[TopInput, ...]:
        """Return the samples of a channel, largest value first.

        Raises:
            KeyError: The channel was not asked for.
        """
        if channel not in self.channels:
            raise unknown_name("channel", channel, map(str, self.channels))
        return self.rows[self.channels.index(channel)]

    def crop(self, one: TopInput, *, widen: float = WIDEN) -> Array:
        """Return the part of a sample's picture around the largest value, (height, width, 3), 0 to 1.

        A feature map of 7 x 7 divides the picture that the model sees, after its resize and crop, into 7 x 7
        equal cells. The part is the cell of the position, `widen` times as wide and high, cut at the
        picture's edge and mapped back to the original image. Which pixels can reach the value, the receptive
        field, is usually more; it is not computed.

        Args:
            one: An entry of `rows`.
            widen: The factor; 1 is the cell alone.

        Raises:
            ValueError: The sample is no picture, or the position is not a cell of a grid.
            FileNotFoundError: The image is not there any more.
        """
        _check_widen(widen)
        value = self.sources.samples.get(one.index)
        image = None if value is None else sample_image(value, self.sources.preprocessing)
        if image is None:
            raise ValueError(f"{one.key} is no picture, or one that is on the server alone")
        if one.place is None or one.place.cell is None:
            raise ValueError(f"the largest value in {one.key} is at no cell of a grid over the picture")
        return crop_of(image, one.place.cell.box(widen))

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        channels: Sequence[int] | None = None,
        widen: float = WIDEN,
        whole: bool = False,
    ) -> Figure:
        """Draw a row for each channel, at most 16: crops of pictures, or texts with the token in brackets.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            channels: Some of the channels; all when None.
            widen: As for `crop`.
            whole: Whether to draw whole pictures, with a frame around the crop.

        Raises:
            KeyError: A channel was not asked for.
            ValueError: `widen` is not positive.
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import saved  # needs matplotlib, which is an extra
        from trocar._analysis.top_inputs.top_inputs_picture import draw_top_inputs

        _check_widen(widen)
        chosen = self.channels if channels is None else tuple(channels)
        rows = [self[channel] for channel in chosen]
        return saved(draw_top_inputs(self, rows, widen=widen, is_whole=whole), path)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each sample of each channel.

        Columns are channel, rank, value, index, key, position (as "3,5"), token.

        Raises:
            MissingExtraError: pandas is missing: pip install "trocar[pandas]".
        """
        return self._plain().to_pandas()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the same as a `.csv` or `.parquet` file.

        Raises:
            ValueError: The file's name ends in neither.
            MissingExtraError: pyarrow is missing, for Parquet: pip install "trocar[pandas]".
        """
        self._plain().save(path)

    @property
    def title(self) -> str:
        """What it is, in a line."""
        kind = "largest" if self.by == "max" else "largest mean"
        text = f"{kind} of {self.count:,} samples at {self.at} of {self.model_id}"
        if self.nan_counts:
            text += f"; NaN in {sum(self.nan_counts.values()):,} values, left out"
        return text

    def __str__(self) -> str:
        table = text_table(_HEAD, self._cells(), right=_HEAD[:3])
        return "\n".join([self.title, first_lines(table, MOST_ROWS)])

    def __repr__(self) -> str:
        return f"<TopInputs of {len(self)} channels: {self.title}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._cells(), self.title)

    def _entries(self) -> Iterator[TopInput]:
        return (one for row in self.rows for one in row)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                str(one.channel) if one.rank == 1 else "",
                str(one.rank),
                f"{one.value:.5g}",
                shortened(one.key, _MOST_NAME),
                str(one.place) if one.place is not None else "",
            )
            for one in self._entries()
        ]

    def _plain(self) -> PlainTable:
        entries = list(self._entries())
        places = [one.place for one in entries]
        return PlainTable(
            {
                "channel": np.array([one.channel for one in entries], np.int64),
                "rank": np.array([one.rank for one in entries], np.int64),
                "value": np.array([one.value for one in entries], np.float64),
                "index": np.array([one.index for one in entries], np.int64),
                "key": np.array([one.key for one in entries], object),
                "position": np.array(
                    [",".join(map(str, place.position)) if place else "" for place in places], object
                ),
                "token": np.array([place.token if place else "" for place in places], object),
            }
        )


def _check_widen(widen: float) -> None:
    if not 0 < widen < np.inf:
        raise ValueError(f"widen={widen!r} must be a positive number")
