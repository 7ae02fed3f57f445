"""Representational dissimilarity matrices (RDMs) of samples, and comparisons of two of them.

As in rsatoolbox (https://github.com/rsagroup/rsatoolbox, `rdm/calc.py` and `rdm/compare.py`), after
Kriegeskorte et al. 2008 (https://doi.org/10.3389/neuro.06.004.2008).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from trocar._analysis.feature_rows import FeatureRows
from trocar._analysis.moments import Floats
from trocar._base.tensors import Array, float_array, is_array
from trocar_api.value_words import not_one_of

Distance = Literal["correlation", "euclidean", "cosine"]
Compare = Literal["spearman", "pearson", "cosine"]

_ROUNDING = 1e-13
"""What rounding leaves of the distance of equal samples, relative to their lengths."""


def check_kinds(distance: str, compare: str) -> None:
    """Refuse an unknown distance or comparison.

    Raises:
        ValueError: It is none.
    """
    if distance not in get_args(Distance):
        raise ValueError(f"distance {not_one_of(distance, get_args(Distance))}")
    if compare not in get_args(Compare):
        raise ValueError(f"compare {not_one_of(compare, get_args(Compare))}")


def dissimilarities(rows: FeatureRows, distance: Distance) -> Floats:
    """Return the dissimilarity of each pair of samples, (samples, samples), in float64.

    "correlation" is 1 - Pearson's r of two samples' features, "cosine" 1 - their cosine, and "euclidean" the
    squared distance divided by the number of features. NaN where a sample's features do not vary (are zeros),
    or are not finite.
    """
    width = sum(block.shape[1] for block in rows.blocks())
    with np.errstate(all="ignore"):  # NaN and Inf in features are answers here
        if distance == "euclidean":
            products = _products(rows, "features")
            squares = np.diag(products)
            total = squares[:, None] + squares[None, :]
            result: Floats = _without_rounding(total - 2 * products, total) / width
        else:
            products = _products(rows, "samples" if distance == "correlation" else "")
            lengths = np.sqrt(np.diag(products))
            result = _without_rounding(1 - products / np.outer(lengths, lengths), 1.0)
    is_odd = ~np.isfinite(np.diag(result))
    result[is_odd] = result[:, is_odd] = np.nan
    np.fill_diagonal(result, np.where(is_odd, np.nan, 0.0))
    return result


def upper_triangle(rdm: Floats) -> Floats:
    """Return the dissimilarities of all pairs, row by row, as `scipy.spatial.distance.squareform` does."""
    return rdm[np.triu_indices(len(rdm), 1)]


def comparable(pairs: Floats, compare: Compare) -> Floats:
    """Return a unit vector whose inner product with another is the comparison; NaN where all pairs are equal.

    "spearman" is Pearson's r of the ranks, equal ones with their mean rank; "cosine" is not centred.
    """
    with np.errstate(all="ignore"):
        values = _ranks(pairs) if compare == "spearman" else pairs
        centred = values if compare == "cosine" else values - values.mean()
        length = np.linalg.norm(centred)
        if not length > 1e-14 * np.linalg.norm(values):  # all dissimilarities are equal
            return np.full_like(pairs, np.nan)
        return centred / length


def checked_rdm(name: str, rdm: object, count: int) -> Floats:
    """Return an RDM of a caller.

    Raises:
        TypeError: It is no array.
        ValueError: It is not a symmetric matrix of all samples, with zeros in its diagonal.
    """
    if not is_array(rdm):
        raise TypeError(f"the RDM {name!r} is {type(rdm).__name__}; give an array (samples, samples)")
    values: Array = float_array(rdm)
    if values.shape != (count, count):
        raise ValueError(f"the RDM {name!r} has shape {values.shape}; there are {count} samples")
    matrix = values.astype(np.float64)
    if not np.allclose(matrix, matrix.T, equal_nan=True) or np.abs(np.diag(matrix)).max() > 0:
        raise ValueError(
            f"the RDM {name!r} is not symmetric with zeros in its diagonal: give dissimilarities"
        )
    return matrix


def _products(rows: FeatureRows, centre: str) -> Floats:
    """Return the inner products of all samples.

    Args:
        rows: The features.
        centre: "features" subtracts the mean sample, which changes no distance and spares digits; "samples"
            subtracts each sample's own mean.
    """
    products, square_sums = np.zeros((rows.count, rows.count)), np.zeros(rows.count)
    sample_means = _sample_means(rows) if centre == "samples" else np.zeros((rows.count, 1))
    for block in rows.blocks():
        square_sums += np.add.reduce(block * block, axis=1)
        centred = block - (_mean_sample(block) if centre == "features" else sample_means)
        products += centred @ centred.T
    is_constant = (
        np.diag(products) <= square_sums * 1e-28
    )  # what rounding leaves of features that do not vary
    if centre == "samples":
        products[is_constant] = products[:, is_constant] = 0.0
    return products


def _sample_means(rows: FeatureRows) -> Floats:
    """Return the mean of each sample's features, (samples, 1)."""
    sums, width = np.zeros((rows.count, 1)), 0
    for block in rows.blocks():
        sums += block.sum(axis=1, keepdims=True)
        width += block.shape[1]
    return sums / max(width, 1)


def _mean_sample(block: Floats) -> Floats:
    """Return the mean over the samples; one that is not finite does not count."""
    is_finite = np.isfinite(block)
    means: Floats = np.where(is_finite, block, 0.0).sum(axis=0) / np.maximum(is_finite.sum(axis=0), 1)
    return means


def _without_rounding(values: Floats, scale: Floats | float) -> Floats:
    """Return dissimilarities with zeros where equal samples left rounding errors."""
    return np.where(np.abs(values) <= _ROUNDING * scale, 0.0, np.maximum(values, 0.0))


def _ranks(values: Floats) -> Floats:
    """Return ranks from 1, of equal values their mean, as `scipy.stats.rankdata`; NaN if any is."""
    if np.isnan(values).any():
        return np.full_like(values, np.nan)
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks
