"""Linear fits in closed form: ridge regression, differences of means, principal components."""

import numpy as np

from trocar_server.directions.direction_request import Ints, rejected
from trocar_server.directions.logistic import Linear
from trocar_server.directions.rows import MEMORY_BYTES, Floats, Rows


def fit_ridge(rows: Rows, targets: Floats, l2: float) -> Linear:
    """Fit one vector to numbers: scikit-learn's `Ridge(alpha=l2)`.

    Raises:
        ServiceError: `DIRECTION_REJECTED`, neither samples nor channels fit in memory.
    """
    mean, _ = rows.moments(np.ones(rows.count))
    centred, offset = rows.centred(mean), float(targets.mean())
    residuals = targets - offset
    if rows.count < rows.channel_count and rows.fits_in_memory:
        values = centred.array()
        gram = values @ values.T
        gram[np.diag_indices_from(gram)] += l2
        vector: Floats = values.T @ np.linalg.solve(gram, residuals)
    else:
        covariance, product = _gram(centred, residuals)
        covariance[np.diag_indices_from(covariance)] += l2
        vector = np.linalg.solve(covariance, product).astype(np.float64)
    return Linear(vector[None], np.array([offset - vector @ mean]))


def fit_mean_difference(rows: Rows, labels: Ints) -> Linear:
    """Return the mean of class 1 minus that of class 0; the bias puts 0 halfway between them."""
    sums = np.zeros((2, rows.channel_count))
    for at, values in rows.blocks():
        for label in (0, 1):
            sums[label] += values[labels[at] == label].sum(0)
    means = sums / np.bincount(labels, minlength=2)[:, None]
    vector = means[1] - means[0]
    return Linear(vector[None], np.array([-vector @ means.mean(0)]))


def fit_components(rows: Rows, count: int) -> tuple[Linear, float]:
    """Return principal components, orthonormal, by falling variance, and their share of it.

    Signs are those of scikit-learn: of each vector the element with the largest absolute value is positive.

    Raises:
        ServiceError: `DIRECTION_REJECTED`, there are fewer components, no variance, or too much of both.
    """
    if count > rows.channel_count:
        raise rejected(f"{count} components of {rows.channel_count} channels; ask for at most as many")
    mean, variances = rows.moments(np.ones(rows.count))
    if not variances.sum() > 0:
        raise rejected("all samples have the same value there, so no direction has a variance")
    centred = rows.centred(mean)
    if rows.fits_in_memory:
        _, lengths, vectors = np.linalg.svd(centred.array(), full_matrices=False)
        shares = np.square(lengths)
    else:
        covariance, _ = _gram(centred, np.zeros(rows.count))
        eigenvalues, eigenvectors = np.linalg.eigh(covariance)
        shares, vectors = np.clip(eigenvalues[::-1], 0, None), eigenvectors.T[::-1]
    vectors = vectors[:count]
    largest = vectors[np.arange(count), np.abs(vectors).argmax(1)]
    vectors = vectors * np.where(largest < 0, -1.0, 1.0)[:, None]
    return Linear(vectors, -vectors @ mean), float(shares[:count].sum() / shares.sum())


def _gram(rows: Rows, targets: Floats) -> tuple[Floats, Floats]:
    """Return the sums of x x^T and of target * x."""
    count = rows.channel_count
    if 8 * count**2 > MEMORY_BYTES:
        raise rejected(
            f"{rows.count:,} samples of {count:,} channels: one of the two has to be smaller; choose "
            "channels, or give fewer samples"
        )
    covariance, product = np.zeros((count, count)), np.zeros(count)
    for at, values in rows.blocks():
        covariance += values.T @ values
        product += targets[at] @ values
    return covariance, product
