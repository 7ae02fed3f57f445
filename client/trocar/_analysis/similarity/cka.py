"""Linear centred kernel alignment between the features of modules, over the same samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trocar._analysis.feature_rows import FeatureRows
from trocar._analysis.moments import Floats
from trocar._analysis.similarity.matrix_table import entry, matrix_cells
from trocar._analysis.similarity.rdms import Distance, dissimilarities
from trocar._base.tables import html_table
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from trocar._base.tensors import Array


@dataclass(frozen=True, eq=False)
class Cka:
    """Linear CKA between feature maps; see `Client.cka`.

    cka = client.cka("resnet50", "photos/", taps=["layer1", "layer2", "layer3", "layer4"])
    cka["layer1", "layer4"]              # 1.0 for the same up to rotation and scale
    print(cka)
    cka.plot("cka.png")
    """

    matrix: Floats
    """Of shape (rows, columns): 0 to 1, NaN where a feature map does not vary or is not finite. The debiased
    estimate can be below 0."""
    rows: tuple[str, ...]
    """Feature maps of the rows."""
    columns: tuple[str, ...]
    """Feature maps of the columns: the same, those of `other_taps`, or those of the other model."""
    model_id: str
    """The model of the rows."""
    other: str
    """The model of the columns."""
    count: int
    """How many samples."""
    debiased: bool = False
    """Whether it is the debiased estimate."""

    def __getitem__(self, names: tuple[str, str]) -> float:
        """Return the number of a row and a column.

        Raises:
            KeyError: A name is unknown.
        """
        return entry(self.matrix, self.rows, self.columns, names)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the matrix as a heat map, with the values if they fit.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_matrix, saved  # needs matplotlib, which is an extra

        return saved(draw_matrix(self), path)

    @property
    def title(self) -> str:
        """What it is, in a line."""
        kind = "debiased linear CKA" if self.debiased else "linear CKA"
        models = self.model_id if self.model_id == self.other else f"{self.model_id} and {self.other}"
        return f"{kind}, {models}, {self.count:,} samples"

    def __str__(self) -> str:
        head, rows, legend = matrix_cells(self.matrix, self.rows, self.columns)
        return "\n".join([self.title, text_table(head, rows, right=head[1:]), *legend])

    def __repr__(self) -> str:
        return f"<Cka {len(self.rows)} x {len(self.columns)}: {self.title}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        head, rows, legend = matrix_cells(self.matrix, self.rows, self.columns)
        return html_table(head, rows, "; ".join([self.title, *legend]))


class FeatureCollector:
    """Stores the features of all samples, by feature map, until their Gram matrices are computed.

    Close it, or the temporary files stay open.
    """

    def __init__(self) -> None:
        self._rows: dict[str, FeatureRows] = {}

    def __enter__(self) -> FeatureCollector:
        return self

    def __exit__(self, *error: object) -> None:
        for rows in self._rows.values():
            rows.close()

    @property
    def count(self) -> int:
        """Number of samples."""
        return max((rows.count for rows in self._rows.values()), default=0)

    def add(self, maps: Mapping[str, Array]) -> None:
        """Add the next batch.

        Raises:
            ValueError: The feature maps do not have one row for each sample, or differ between batches.
        """
        lengths = {name: values.shape[0] if values.ndim else 0 for name, values in maps.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the feature maps do not have one row for each sample: {lengths}")
        if self._rows and maps.keys() != self._rows.keys():
            raise ValueError("the feature maps of this batch differ from earlier batches'")
        for name, values in maps.items():
            if name not in self._rows:
                self._rows[name] = FeatureRows(name)
            self._rows[name].append(values)

    def aligned(self, debiased: bool) -> dict[str, Floats]:
        """Return a unit vector of samples^2 numbers for each feature map; their products are the CKA.

        Raises:
            ValueError: There are too few samples.
        """
        least = 4 if debiased else 2
        if self.count < least:
            kind = "debiased CKA" if debiased else "CKA"
            raise ValueError(f"{kind} needs at least {least} samples, received {self.count}")
        return {name: _unit(gram(rows), debiased) for name, rows in self._rows.items()}

    def dissimilarities(self, distance: Distance) -> dict[str, Floats]:
        """Return the dissimilarities of the samples, (samples, samples), for each feature map.

        Raises:
            ValueError: There are fewer than 3 samples: their pairs cannot be correlated.
        """
        if self.count < 3:
            raise ValueError(f"RSA needs at least 3 samples, received {self.count}")
        return {name: dissimilarities(rows, distance) for name, rows in self._rows.items()}


def alignment(rows: Sequence[Floats], columns: Sequence[Floats]) -> Floats:
    """Return the CKA of every row with every column, from their unit vectors.

    CKA(X, Y) = <K, L> / (|K| |L|) with the centred Gram matrices K of X and L of Y and Frobenius norms
    (Kornblith et al. 2019, equation 4); U-centred ones give the debiased estimate (Song et al. 2012,
    Nguyen et al. 2021).
    """
    return np.array([[row @ column for column in columns] for row in rows], np.float64)


def gram(rows: FeatureRows) -> Floats:
    """Return the inner products of the centred features of all samples, (samples, samples), in float64.

    Centred before the products are taken: an offset far above the differences would leave nothing of them.
    """
    products, square_sum = np.zeros((rows.count, rows.count)), 0.0
    with np.errstate(all="ignore"):  # NaN and Inf in features are answers here
        for block in rows.blocks():
            square_sum += float(np.einsum("ij,ij->", block, block))
            centred = block - block.mean(axis=0)
            products += centred @ centred.T
    if np.trace(products) <= square_sum * 1e-29:  # what rounding leaves of features that do not vary
        products[:] = 0.0
    return products


def _unit(products: Floats, debiased: bool) -> Floats:
    """Centre a Gram matrix and divide it by its norm; NaN where it is zero or not finite."""
    with np.errstate(all="ignore"):
        products /= np.abs(products).max()  # the norm squares them once more
        vector = (_u_centred(products) if debiased else products).reshape(-1)
        return vector / np.linalg.norm(vector)


def _u_centred(products: Floats) -> Floats:
    """Centre a Gram matrix so that products with another are unbiased estimates of HSIC.

    Szekely and Rizzo 2014, definition 2; the same number as HSIC_1 of Song et al. 2012, equation 5.
    """
    count = len(products)
    np.fill_diagonal(products, 0.0)
    means = products.sum(axis=0) / (count - 2)
    products -= means[:, None] + means[None, :]
    products += means.sum() / (count - 1)
    np.fill_diagonal(products, 0.0)
    return products
