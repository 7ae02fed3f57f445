"""Fits of directions: labels, groups and folds of a caller as a message."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from trocar._base.tensors import Array, as_numpy, is_array
from trocar_api.stored_names import is_stored_name
from trocar_api.v1 import direction_pb2 as pb
from trocar_api.value_words import not_one_of

DirectionKind: TypeAlias = Literal["logistic", "ridge", "mean_difference", "pca"]
ClassWeight: TypeAlias = Literal["balanced"] | Mapping[Any, float]

KINDS: dict[str, pb.DirectionKind.ValueType] = {
    "logistic": pb.DIRECTION_KIND_LOGISTIC,
    "ridge": pb.DIRECTION_KIND_RIDGE,
    "mean_difference": pb.DIRECTION_KIND_MEAN_DIFFERENCE,
    "pca": pb.DIRECTION_KIND_PCA,
    "given": pb.DIRECTION_KIND_GIVEN,
}
"""Wire kind by name."""

_FITTED = tuple(kind for kind in KINDS if kind != "given")
_WITH_CLASSES = ("logistic", "mean_difference")
_WITH_PENALTY = ("logistic", "ridge")


def check_direction_name(name: str) -> str:
    """Return the name of directions as it is.

    Raises:
        ValueError: It cannot be one.
    """
    if not is_stored_name(name):
        raise ValueError(
            f"{name!r} cannot be the name of a direction: small letters, digits and `._-`, 63 at most"
        )
    return name


def check_kind(kind: str) -> None:
    """Refuse a kind that does not exist.

    Raises:
        ValueError: It does not.
    """
    if kind not in _FITTED:
        raise ValueError(f"kind {not_one_of(kind, _FITTED)}")


def needs_labels(kind: str) -> bool:
    """Whether samples need labels."""
    return kind != "pca"


def direction_fit(  # noqa: PLR0913 - the options of one call
    *,
    name: str | None,
    kind: str,
    sample_count: int,
    labels: object,
    folds: int | Sequence[int],
    groups: object,
    l2: float,
    class_weight: ClassWeight | None,
    standardize: bool | None,
    k: int,
    replace: bool,
) -> pb.DirectionFit:
    """Build the description of a fit; see `Client.fit_direction` for the arguments.

    Raises:
        TypeError: Labels, groups or folds are of the wrong type.
        ValueError: They are as many as the samples in no case, or an option has no meaning with others.
    """
    check_kind(kind)
    message = pb.DirectionFit(
        name=check_direction_name(name or f"{kind.replace('_', '-')}-{secrets.token_hex(4)}"),
        kind=KINDS[kind],
        sample_count=sample_count,
        is_replacing=replace,
    )
    is_stored = sample_count == 0  # the server has the samples, and their labels
    if is_stored:
        _check_stored(labels, groups, folds, class_weight)
        message.is_balanced = class_weight == "balanced"
    elif kind in _WITH_CLASSES:
        _fill_classes(message, _column("labels", labels, sample_count), class_weight)
    elif class_weight is not None:
        raise ValueError(f"class_weight is for logistic; leave it out of {kind}")
    if kind == "ridge" and not is_stored:
        message.targets.extend(_numbers(_column("labels", labels, sample_count)))
    if kind == "pca":
        message.component_count = k
        if labels is not None:
            raise ValueError("pca has no labels; leave them out, or use another kind")
    elif k != 1:
        raise ValueError("k is for pca, the number of components")
    if kind in _WITH_PENALTY:
        message.l2 = l2
        message.is_standardized = standardize is None or standardize
    elif standardize:
        raise ValueError(f"standardize is for logistic and ridge; leave it out of {kind}")
    _fill_folds(message, folds, groups, sample_count, has_folds=needs_labels(kind))
    return message


def _check_stored(labels: object, groups: object, folds: object, class_weight: object) -> None:
    """Refuse what a data set on the server has itself, or what would need its samples here.

    Raises:
        ValueError: It is given.
    """
    if labels is not None or groups is not None or not isinstance(folds, (int, np.integer)):
        raise ValueError(
            "a data set on the server has its labels; leave labels, groups and folds by sample out"
        )
    if class_weight not in (None, "balanced"):
        raise ValueError("class_weight of a data set on the server is 'balanced' or None")


def _fill_classes(message: pb.DirectionFit, labels: Array, class_weight: ClassWeight | None) -> None:
    classes, indices = np.unique(labels, return_inverse=True)
    message.classes.extend(str(each) for each in classes.tolist())
    message.labels.extend(indices.reshape(-1).tolist())
    if class_weight is None:
        return
    if message.kind != KINDS["logistic"]:
        raise ValueError("class_weight is for logistic; means weight all samples of a class equally")
    if class_weight == "balanced":
        message.is_balanced = True
        return
    if not isinstance(class_weight, Mapping):
        raise TypeError(f"class_weight is {class_weight!r}; give 'balanced' or a weight for each class")
    missing = [each for each in classes.tolist() if each not in class_weight]
    if missing:
        raise ValueError(f"class_weight has no weight for class {missing[0]!r}")
    message.class_weights.extend(float(class_weight[each]) for each in classes.tolist())


def _fill_folds(
    message: pb.DirectionFit,
    folds: int | Sequence[int],
    groups: object,
    sample_count: int,
    *,
    has_folds: bool,
) -> None:
    if groups is not None:
        _, indices = np.unique(_column("groups", groups, sample_count), return_inverse=True)
        message.groups.extend(indices.reshape(-1).tolist())
    if not has_folds:
        return
    if isinstance(folds, (int, np.integer)) and not isinstance(folds, bool):
        message.fold_count = int(folds)
        return
    given = _column("folds", folds, sample_count)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError("folds is a number of folds, or the fold of each sample as an integer")
    message.folds.extend(given.tolist())


def _column(name: str, values: object, sample_count: int) -> Array:
    """Return one value for each sample.

    Raises:
        TypeError: They are no list.
        ValueError: There are fewer or more than samples.
    """
    if values is None:
        raise ValueError(f"{name} are missing; give one for each sample")
    if isinstance(values, (str, bytes)) or not (is_array(values) or isinstance(values, Sequence)):
        raise TypeError(f"{name} is {values!r:.60}; give a list or an array with one for each sample")
    array = as_numpy(values) if is_array(values) else np.array(values)
    if array.ndim != 1:
        raise ValueError(f"{name} have the shape {array.shape}; give one for each sample")
    if len(array) != sample_count:
        raise ValueError(f"{len(array):,} {name} for {sample_count:,} samples; give one for each")
    return array


def _numbers(values: Array) -> list[float]:
    try:
        return [float(each) for each in values.tolist()]
    except (TypeError, ValueError):
        raise TypeError("the labels of ridge are numbers; for classes use kind='logistic'") from None
