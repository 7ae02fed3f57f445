"""Representational similarity analysis: how alike feature maps arrange the same samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._analysis.moments import Floats
from trocar._analysis.similarity.matrix_table import entry, matrix_cells
from trocar._analysis.similarity.rdms import Compare, Distance, comparable, upper_triangle
from trocar._base.names import unknown_name
from trocar._base.tables import html_table
from trocar._base.text_tables import text_table
from trocar._result.plain_table import PlainTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Rsa:
    """Comparison of the dissimilarities of samples; see `Client.rsa`.

    rsa = client.rsa("resnet50", "photos/", taps=["layer1", "layer4"])
    rsa["layer1", "layer4"]              # Spearman's correlation of the two RDMs
    rsa.rdm("layer4")                    # (samples, samples)
    rsa.plot("rsa.png")
    """

    matrix: Floats
    """Of shape (rows, columns): -1 to 1, NaN where dissimilarities are all equal or not finite."""
    rows: tuple[str, ...]
    """Feature maps of the rows."""
    columns: tuple[str, ...]
    """Feature maps of the columns, then RDMs of your own."""
    model_id: str
    """The model of the rows."""
    other: str
    """The model of the columns."""
    distance: Distance
    """How samples differ."""
    compare: Compare
    """How two RDMs are compared."""
    rdms: Mapping[str, Floats] = field(repr=False)
    """Dissimilarities of samples by row, (samples, samples)."""
    column_rdms: Mapping[str, Floats] = field(repr=False)
    """Dissimilarities of samples by column."""

    def __getitem__(self, names: tuple[str, str]) -> float:
        """Return the number of a row and a column.

        Raises:
            KeyError: A name is unknown.
        """
        return entry(self.matrix, self.rows, self.columns, names)

    def rdm(self, name: str) -> Floats:
        """Return the dissimilarities of all pairs of samples, of a row or else a column.

        Raises:
            KeyError: A name is unknown.
        """
        for known in (self.rdms, self.column_rdms):
            if name in known:
                return known[name]
        raise unknown_name("RDM", name, [*self.rdms, *self.column_rdms])

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(next(iter(self.rdms.values())))

    @property
    def title(self) -> str:
        """What it is, in a line."""
        models = self.model_id if self.model_id == self.other else f"{self.model_id} and {self.other}"
        kind = f"{self.compare} of {self.distance} dissimilarities"
        return f"RSA, {kind}, {models}, {self.count:,} samples"

    def plot(self, path: str | os.PathLike[str] | None = None, *, rdms: bool = False) -> Figure:
        """Draw the matrix as a heat map, with the values if they fit.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            rdms: Whether to draw the RDMs of the rows instead, at most 12.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_matrix, draw_rdms, saved  # matplotlib is an extra

        if rdms:
            return saved(draw_rdms(self.rdms, self.title), path)
        return saved(draw_matrix(self), path)

    def to_pandas(self) -> Any:
        """Return the matrix as a pandas DataFrame, with the names of rows and columns.

        Raises:
            MissingExtraError: pandas is missing: pip install "trocar[pandas]".
        """
        frame = PlainTable(dict(zip(self.columns, self.matrix.T, strict=True))).to_pandas()
        frame.index = list(self.rows)
        return frame

    def __str__(self) -> str:
        head, rows, legend = matrix_cells(self.matrix, self.rows, self.columns)
        return "\n".join([self.title, text_table(head, rows, right=head[1:]), *legend])

    def __repr__(self) -> str:
        return f"<Rsa {len(self.rows)} x {len(self.columns)}: {self.title}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        head, rows, legend = matrix_cells(self.matrix, self.rows, self.columns)
        return html_table(head, rows, "; ".join([self.title, *legend]))


def compared(rows: Mapping[str, Floats], columns: Mapping[str, Floats], compare: Compare) -> Floats:
    """Return the comparison of each RDM of the rows with each of the columns."""
    left, right = (
        [comparable(upper_triangle(rdm), compare) for rdm in rdms.values()] for rdms in (rows, columns)
    )
    return np.array([[row @ column for column in right] for row in left], np.float64)
