"""Frechet distance between the features of two sets of images."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from trocar._analysis.moments import Floats, Moments
from trocar._base.delegation import explained
from trocar._base.tables import html_table, number_text


@dataclass(frozen=True)
class Fid:
    """The Frechet distance between two sets of images, in a model's features; see `Client.fid`.

    result = client.fid("inception_v3", "real/", "generated/", at="avgpool")
    result.distance
    print(result)                        # as a table
    """

    distance: float
    """The distance: `mean_term` + `covariance_term`. 0 for equal moments."""
    count_a: int
    """Images in the first set."""
    count_b: int
    """Images in the second set."""
    at: str
    """Where the features were taken."""
    mean_term: float
    """Squared Euclidean distance of the means."""
    covariance_term: float
    """What the covariances add."""
    channels: int
    """Length of a feature vector."""

    @property
    def is_singular(self) -> bool:
        """Whether a set has too few images for a covariance of full rank; the distance is then biased."""
        return min(self.count_a, self.count_b) <= self.channels

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(title) for title, _ in rows)
        lines = [f"{title:<{width}}  {value}" for title, value in rows]
        if self.is_singular:
            lines.append(
                "a set has no more images than channels: compare with distances of sets of this size only"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(("", "FID"), self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("Frechet distance", number_text(self.distance)),
            ("of the means", number_text(self.mean_term)),
            ("of the covariances", number_text(self.covariance_term)),
            ("images", f"{self.count_a:,} and {self.count_b:,}"),
            ("features", f"{self.channels:,} channels at {self.at}"),
        ]


def fid_of(a: Moments, b: Moments, at: str) -> Fid:
    """Compare the moments of two sets.

    Raises:
        ValueError: The feature vectors differ in length.
    """
    mean_term, covariance_term = _terms(a.mean, a.covariance, b.mean, b.covariance)
    distance = mean_term + covariance_term
    return Fid(distance, a.count, b.count, at, mean_term, covariance_term, len(a.mean))


@explained
def frechet_distance(mean_a: ArrayLike, cov_a: ArrayLike, mean_b: ArrayLike, cov_b: ArrayLike) -> float:
    """Return the squared Frechet distance between two normal distributions, as in FID.

        trocar.frechet_distance(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))

    |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2)), in float64 (Dowson and Landau 1982;
    Heusel et al. 2017). Singular covariances are fine: directions without variance are left out, and no
    offset is added to the diagonals.

    Args:
        mean_a: Of shape (channels,).
        cov_a: Of shape (channels, channels), symmetric, without negative eigenvalues.
        mean_b: Of shape (channels,).
        cov_b: Of shape (channels, channels).

    Raises:
        ValueError: The shapes do not fit, or something is NaN or infinite.
    """
    arrays = [np.asarray(value, np.float64) for value in (mean_a, cov_a, mean_b, cov_b)]
    return sum(_terms(*arrays))


def _terms(mean_a: Floats, cov_a: Floats, mean_b: Floats, cov_b: Floats) -> tuple[float, float]:
    """Return the parts of the distance that come from the means and from the covariances."""
    _check(mean_a, cov_a, mean_b, cov_b)
    difference = mean_a - mean_b
    # tr (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2). Taken from these, rounding stays
    # at the size of an epsilon; as roots of the eigenvalues of A^(1/2) B A^(1/2), a zero of a singular
    # covariance becomes the root of an epsilon, 1e-8, and there may be thousands of them.
    root_a, root_b = _root(cov_a), _root(cov_b)
    cross = np.linalg.svd(root_a.T @ root_b, compute_uv=False).sum() if root_a.size and root_b.size else 0.0
    covariance_term = np.trace(cov_a) + np.trace(cov_b) - 2 * cross
    return float(difference @ difference), max(float(covariance_term), 0.0)  # never negative but for rounding


def _root(covariance: Floats) -> Floats:
    """Return R of shape (channels, rank) with R R^T = covariance."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    kept = values > max(values[-1], 0.0) * len(values) * np.finfo(np.float64).eps
    root: Floats = vectors[:, kept] * np.sqrt(values[kept])
    return root


def _check(mean_a: Floats, cov_a: Floats, mean_b: Floats, cov_b: Floats) -> None:
    if mean_a.ndim != 1 or not mean_a.size or mean_a.shape != mean_b.shape:
        raise ValueError(f"the means must have one shape (channels,), not {mean_a.shape} and {mean_b.shape}")
    for name, covariance in (("cov_a", cov_a), ("cov_b", cov_b)):
        if covariance.shape != (mean_a.size, mean_a.size):
            raise ValueError(
                f"{name} has shape {covariance.shape}; {mean_a.size} channels need {(mean_a.size,) * 2}"
            )
    if not all(np.isfinite(value).all() for value in (mean_a, cov_a, mean_b, cov_b)):
        raise ValueError("a mean or covariance contains NaN or infinity")
