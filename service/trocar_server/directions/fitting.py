"""Fit of one place: its direction, with the scores of folds.

direction = fit_place(request, values, "layer3", check)

Everything is float64 and off the thread that calls torch.
"""

import hashlib
from dataclasses import replace
from functools import partial

import numpy as np

from trocar_server.directions.blas_threads import one_blas_thread
from trocar_server.directions.direction import About, Direction
from trocar_server.directions.direction_request import DirectionKind, DirectionRequest, rejected
from trocar_server.directions.linear_fits import fit_components, fit_mean_difference, fit_ridge
from trocar_server.directions.logistic import Check, Linear, fit_logistic
from trocar_server.directions.pooled_values import PooledValues
from trocar_server.directions.rows import Floats, Rows
from trocar_server.directions.scores import accuracy, area_under_curve, determination

_SCORE_NAMES = {
    DirectionKind.LOGISTIC: "accuracy",
    DirectionKind.MEAN_DIFFERENCE: "accuracy",
    DirectionKind.RIDGE: "r2",
    DirectionKind.PCA: "explained_variance_ratio",
}


def fit_place(
    request: DirectionRequest, values: PooledValues, place: str, check: Check = lambda: None
) -> Direction:
    """Fit a direction to the pooled values of a place.

    Args:
        request: What is fitted.
        values: The values of all samples.
        place: The place.
        check: Called between passes over the values; raises to stop.

    Raises:
        ServiceError: `DIRECTION_REJECTED`, values are NaN or infinite, or all equal.
    """
    with one_blas_thread():
        return _fit_place(request, values, place, check)


def _fit_place(request: DirectionRequest, values: PooledValues, place: str, check: Check) -> Direction:
    mean_norm, digest = _facts(request, values, place)
    rows = Rows.of(partial(values.blocks, place), request.sample_count, values.width(place) - 1)
    about = About(
        request.kind.value,
        place,
        classes=list(request.classes) if request.kind.has_classes else [],
        mean_norm=mean_norm,
        sample_count=request.sample_count,
        data_digest=digest,
        score_name=_SCORE_NAMES[request.kind],
    )
    if request.kind is DirectionKind.PCA:
        fitted, share = fit_components(rows, request.component_count)
        about = replace(about, score=share)
    else:
        fitted = _fitted(request, rows, check)
        about = _scored(about, request, rows, fitted, check)
    scale = rows.products(fitted.vectors).std(0)
    return Direction(fitted.vectors, fitted.bias, replace(about, scale=[float(each) for each in scale]))


def _facts(request: DirectionRequest, values: PooledValues, place: str) -> tuple[float, str]:
    """Return the mean norm, and the digest of values and labels."""
    digest, total = hashlib.sha256(), 0.0
    for given in (request.labels, request.targets):
        digest.update(np.ascontiguousarray(given).tobytes())
    for block in values.blocks(place):
        if not np.isfinite(block).all():
            raise rejected(
                f"values at '{place}' are NaN or infinite, for example of a sample without tokens; leave "
                "the place or the samples out"
            )
        digest.update(block[:, :-1].astype("<f4").tobytes())
        total += float(block[:, -1].sum())
    return total / request.sample_count, digest.hexdigest()


def _scored(about: About, request: DirectionRequest, rows: Rows, whole: Linear, check: Check) -> About:
    """Return what is known, with the scores of the folds; their fits begin with that to all samples."""
    folds = request.folds
    scores: list[float] = []
    areas: list[float | None] = []
    for fold in np.unique(folds) if folds.size else ():
        outside = folds == fold
        fitted = _fitted(request, rows.only(~outside), check, whole)
        outcome = rows.only(outside).products(fitted.vectors) + fitted.bias
        if request.kind is DirectionKind.RIDGE:
            share = determination(outcome, request.targets[outside])
            scores += [] if share is None else [share]
            continue
        scores.append(accuracy(outcome, request.labels[outside]))
        if len(request.classes) == 2:
            areas.append(area_under_curve(outcome, request.labels[outside]))
    known = [area for area in areas if area is not None]
    return replace(
        about,
        fold_scores=scores,
        score=float(np.mean(scores)) if scores else None,
        auc=float(np.mean(known)) if known else None,
    )


def _fitted(request: DirectionRequest, rows: Rows, check: Check, guess: Linear | None = None) -> Linear:
    """Fit to the samples that count; the result is for values as they are."""
    check()
    if request.kind is DirectionKind.MEAN_DIFFERENCE:
        return fit_mean_difference(rows, request.labels[rows.keep])
    shift, factor = np.zeros(rows.channel_count), np.ones(rows.channel_count)
    if request.is_standardized:
        shift, variance = rows.moments(np.ones(rows.count))
        deviation = np.sqrt(variance)
        # A channel that is constant up to rounding has no scale, as in scikit-learn's StandardScaler.
        is_constant = variance <= rows.count * np.finfo(np.float64).eps * variance + np.square(
            rows.count * shift * np.finfo(np.float64).eps
        )
        factor = 1 / np.where(is_constant, 1.0, deviation)
    scaled = rows.scaled(shift, factor).held()
    if request.kind is DirectionKind.RIDGE:
        fitted = fit_ridge(scaled, request.targets[rows.keep], request.l2)
    else:
        labels = request.labels[rows.keep]
        weights = _weights(request, labels)
        if guess is not None:
            guess = replace(guess, vectors=guess.vectors / factor, bias=guess.bias + guess.vectors @ shift)
        count = len(request.classes)
        fitted = fit_logistic(scaled, labels, count, weights, request.l2, check, guess)
    vectors = fitted.vectors * factor
    return Linear(vectors, fitted.bias - vectors @ shift, fitted.conditioner)


def _weights(request: DirectionRequest, labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """Return the weight of each sample."""
    if request.is_balanced:
        counts = np.bincount(labels, minlength=len(request.classes))
        return (len(labels) / (len(request.classes) * counts))[labels]
    if request.class_weights:
        return np.array(request.class_weights)[labels]
    return np.ones(len(labels))
