"""PCA: principal components of channels, fitted to moments."""

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trocar._analysis.moments import Floats, Moments
from trocar._base.replacement import replacement, safetensors_path
from trocar._base.tables import html_table, number_text
from trocar._base.tensors import Array, usual_channel_dim
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ARRAYS = ("components", "mean", "explained_variance", "explained_variance_ratio", "singular_values")
_METADATA = "trocar.pca"


@dataclass(frozen=True, eq=False)
class Pca:
    """Principal components of the channels of a feature map; see `Client.fit_pca`.

    pca = client.fit_pca("resnet50", "photos/", at="layer3", k=16)
    scores = pca.transform(maps["layer3"])       # (batch, height, width, 16)
    pca.save("layer3-pca.safetensors")
    """

    components: Floats
    """Of shape (k, channels): orthonormal rows, by falling variance; the largest loading is positive."""
    mean: Floats
    """Of shape (channels,)."""
    explained_variance: Floats
    """Variance along each component (divided by n - 1), of shape (k,)."""
    explained_variance_ratio: Floats
    """Its share of the variance of all channels; NaN where there is no variance."""
    singular_values: Floats
    """Singular values of the centred data, of shape (k,)."""
    count: int
    """How many vectors of channels there were: samples times positions."""
    at: str = ""
    """Where they were taken."""
    model_id: str = ""
    """The model that computed them."""
    channel_dim: int | None = None
    """The dimension of the channels there, from 0; None where it is not known."""

    def transform(self, values: Array, channel_dim: int | None = None) -> Floats:
        """Return the scores: centred channels times components, in the last dimension.

        Args:
            values: A feature map, for example (batch, channels, height, width) or (batch, tokens, width).
            channel_dim: Dimension of the channels; by default where they were when it was fitted, if there
                are as many, else the last dimension of rank 3, otherwise 1.

        Raises:
            ValueError: That dimension has another size than `mean`.
        """
        if channel_dim is None:
            channel_dim = usual_channel_dim(values.ndim)
            if self.channel_dim is not None and values.shape[self.channel_dim :][:1] == self.mean.shape:
                channel_dim = self.channel_dim
        if not -values.ndim <= channel_dim < values.ndim or values.shape[channel_dim] != self.mean.size:
            raise ValueError(
                f"values of shape {values.shape} have no {self.mean.size} channels in dimension {channel_dim}"
            )
        channels_last = np.moveaxis(np.asarray(values, np.float64), channel_dim, -1)
        return (channels_last - self.mean) @ self.components.T

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file.

        Args:
            path: The file; an existing one is replaced once the new one is complete, which gets its mode.

        Raises:
            OSError: The file cannot be written; an existing one is as it was.
            ValueError: The file's name does not end in `.safetensors`.
        """
        about = {
            "count": self.count,
            "at": self.at,
            "model_id": self.model_id,
            "channel_dim": self.channel_dim,
        }
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        with replacement(safetensors_path(path)) as partial:
            save_file(arrays, partial, metadata={_METADATA: json.dumps(about)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Pca":
        """Load a file written by `save`.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file was not written by `save`.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})[_METADATA])
                return cls(**{name: file.get_tensor(name) for name in _ARRAYS}, **about)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is not a file written by Pca.save") from error

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draw the share of the variance of each component, and their sum.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_pca, saved  # needs matplotlib, which is an extra

        return saved(draw_pca(self), path)

    def __str__(self) -> str:
        return f"{self._title()}\n{text_table(_HEAD, self._rows(), right=_HEAD)}"

    def __repr__(self) -> str:
        return f"<Pca of {self._title()}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._rows(), self._title())

    def _title(self) -> str:
        k, channels = self.components.shape
        where = f" at {self.at}" if self.at else ""
        return f"{k} components of {channels:,} channels{where}, fitted to {self.count:,} vectors"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        shares = self.explained_variance_ratio
        columns = zip(self.explained_variance, shares, np.cumsum(shares), strict=True)
        return [
            (str(index), number_text(variance), f"{share:.2%}", f"{total:.2%}")
            for index, (variance, share, total) in enumerate(columns)
        ]


_HEAD = ("component", "variance", "share", "sum")


def check_component_count(k: object) -> int:
    """Return k.

    Raises:
        ValueError: It must be a positive integer.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"k={k!r} must be a positive integer of components")
    return int(k)


def fit(moments: Moments, k: int, at: str = "", model_id: str = "") -> Pca:
    """Find the k directions of largest variance, by eigendecomposition of the covariance in float64.

    Signs are those of `svd_flip` in scikit-learn: of each component's loadings the one with the largest
    absolute value is positive.

    Raises:
        ValueError: There are fewer channels or fewer vectors than components.
    """
    most = min(moments.count, moments.mean.size)
    if k > most:
        raise ValueError(
            f"k={k}, but {moments.count} vectors of {moments.mean.size} channels have {most} components"
        )
    covariance = (moments.covariance + moments.covariance.T) / 2
    values, vectors = np.linalg.eigh(covariance)
    variance = np.clip(values[::-1][:k], 0.0, None)  # below zero by rounding only
    components = np.ascontiguousarray(vectors[:, ::-1].T[:k])
    largest = components[np.arange(k), np.abs(components).argmax(axis=1)]
    components *= np.where(largest < 0, -1.0, 1.0)[:, None]
    total = float(np.trace(covariance))
    share = variance / total if total > 0 else np.full(k, np.nan)
    singular = np.sqrt(variance * (moments.count - 1))
    dim = moments.channel_dim
    return Pca(components, moments.mean, variance, share, singular, moments.count, at, model_id, dim)
