"""Neighbours: the samples of a data set nearest to a query."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._analysis.moments import Floats
from trocar._analysis.neighbours.metrics import Metric
from trocar._base.names import few, shortened
from trocar._base.tables import MOST_ROWS, first_lines, html_table
from trocar._base.text_tables import text_table
from trocar._result.plain_table import PlainTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from trocar._base.types import Preprocessing

MOST_QUERIES_SHOWN = 12
"""Queries that a picture shows."""
_MOST_NAME = 60


@dataclass(frozen=True)
class Neighbour:
    """One sample near a query."""

    index: int
    """Its place in the data set, from 0."""
    key: str
    """Its file, its text, its key in the features' folder, or `sample 3`."""
    distance: float
    """By the metric; of "dot" the inner product, which is the larger the nearer."""

    def __str__(self) -> str:
        return f"{self.key} {self.distance:.4g}"


@dataclass(frozen=True)
class PictureSources:
    """Inputs that a picture shows."""

    samples: Mapping[int, Any] = field(default_factory=dict)
    """Of neighbours, by their index."""
    queries: tuple[Any, ...] = ()
    preprocessing: Preprocessing | None = None
    """The model's own."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The k nearest samples to each query; see `Client.nearest` and `Features.nearest`.

    near = client.nearest("resnet50", "photos/", "avgpool", "cat.jpg", k=5)
    near[0]                              # the neighbours of the first query, nearest first
    near.indices                         # (queries, 5)
    print(near)
    near.plot("near.png")
    """

    indices: NDArray[np.int64]
    """Places in the data set, nearest first, of shape (queries, k)."""
    distances: Floats
    """Of the same shape: 1 - cosine, Euclidean distances, or inner products where `metric` is "dot"."""
    keys: tuple[tuple[str, ...], ...]
    """The samples by key, of each query."""
    queries: tuple[str, ...]
    """Names of the queries."""
    metric: Metric
    at: str
    """The feature map."""
    count: int
    """How many samples the data set has."""
    left_out: tuple[str, ...] = ()
    """Samples with NaN or infinities in their features, which have no distance."""
    sources: PictureSources = field(default_factory=PictureSources, repr=False)
    """Inputs for the picture."""

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, query: int) -> tuple[Neighbour, ...]:
        """Return the neighbours of a query, nearest first.

        Raises:
            IndexError: There is no such query.
        """
        rows = zip(self.indices[query], self.keys[query], self.distances[query], strict=True)
        return tuple(Neighbour(int(index), key, float(distance)) for index, key, distance in rows)

    def __iter__(self) -> Iterator[tuple[Neighbour, ...]]:
        return (self[query] for query in range(len(self)))

    @property
    def title(self) -> str:
        """What it is, in a line."""
        names = {"cosine": "cosine distance", "euclidean": "Euclidean distance", "dot": "inner product"}
        text = f"nearest of {self.count:,} samples at {self.at}, {names[self.metric]}"
        if self.left_out:
            text += f"; {len(self.left_out):,} left out, not finite: {few(self.left_out)}"
        return text

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        images: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    ) -> Figure:
        """Draw the neighbours: a row for each query, at most 12, with its k samples.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            images: Where the pictures of samples are, for neighbours from a folder of features: the folder in
                which the keys are paths, or a mapping from keys to images. Without it a panel has the key.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.neighbours.neighbours_picture import draw_neighbours
        from trocar._analysis.pictures import saved  # needs matplotlib, which is an extra

        return saved(draw_neighbours(self, images), path)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each neighbour: query, rank, index, key, distance.

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

    def __str__(self) -> str:
        head = ("query", "rank", "index", "sample", "distance")
        return "\n".join(
            [self.title, first_lines(text_table(head, self._cells(), right=head[1:3]), MOST_ROWS)]
        )

    def __repr__(self) -> str:
        return f"<Neighbours {self.indices.shape[0]} x {self.indices.shape[1]}: {self.title}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(("query", "rank", "index", "sample", "distance"), self._cells(), self.title)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                shortened(name, _MOST_NAME) if not rank else "",
                str(rank + 1),
                str(one.index),
                shortened(one.key, _MOST_NAME),
                f"{one.distance:.5g}",
            )
            for name, near in zip(self.queries, self, strict=True)
            for rank, one in enumerate(near)
        ]

    def _plain(self) -> PlainTable:
        count, k = self.indices.shape
        return PlainTable(
            {
                "query": np.repeat(np.array(self.queries, object), k),
                "rank": np.tile(np.arange(1, k + 1), count),
                "index": self.indices.reshape(-1),
                "key": np.array([key for keys in self.keys for key in keys], object),
                "distance": self.distances.reshape(-1),
            }
        )
