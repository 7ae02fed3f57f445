"""Direction request: what is fitted to which samples, checked before any value exists."""

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum, unique
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.directions.folds import Folds, group_folds, plain_folds, stratified_folds
from trocar_server.errors import ServiceError

Ints: TypeAlias = NDArray[np.int64]

MAX_SAMPLES = 1 << 24
MAX_CLASSES, MAX_FOLDS, MAX_COMPONENTS = 1000, 100, 1024
_NO_INTS: Ints = np.empty(0, np.int64)
_NO_FLOATS: NDArray[np.float64] = np.empty(0, np.float64)


@unique
class DirectionKind(StrEnum):
    """How a direction is fitted."""

    LOGISTIC = "logistic"
    """Logistic regression with an L2 penalty."""
    RIDGE = "ridge"
    """Linear regression with an L2 penalty."""
    MEAN_DIFFERENCE = "mean_difference"
    """The mean of the second class minus that of the first."""
    PCA = "pca"
    """The principal components."""

    @property
    def has_classes(self) -> bool:
        """Whether samples have classes."""
        return self in (DirectionKind.LOGISTIC, DirectionKind.MEAN_DIFFERENCE)


@dataclass(frozen=True, eq=False)
class DirectionRequest:
    """A request; it is checked when it is made.

    Attributes:
        name: The name of the directions.
        kind: How they are fitted.
        sample_count: Samples in all batches.
        labels: The class of each sample.
        classes: The names of the classes.
        targets: The number of each sample, for ridge.
        fold_count: The number of folds; 0 for none.
        groups: The group of each sample; empty for none.
        given_folds: The fold of each sample; empty for those of `fold_count`.
        l2: The factor of the squared norm of the vectors.
        class_weights: The weight of each class; empty for 1.
        is_balanced: Whether all classes count equally instead.
        is_standardized: Whether channels are divided by their standard deviation for the fit.
        component_count: The number of components, for PCA.
        is_replacing: Whether stored directions of this name may be replaced.

    Raises:
        ServiceError: `DIRECTION_REJECTED`, in words; `INVALID_ARGUMENT` for a number that is out of range.
    """

    name: str
    kind: DirectionKind
    sample_count: int
    labels: Ints = field(default_factory=lambda: _NO_INTS)
    classes: tuple[str, ...] = ()
    targets: NDArray[np.float64] = field(default_factory=lambda: _NO_FLOATS)
    fold_count: int = 0
    groups: Ints = field(default_factory=lambda: _NO_INTS)
    given_folds: Ints = field(default_factory=lambda: _NO_INTS)
    l2: float = 1.0
    class_weights: tuple[float, ...] = ()
    is_balanced: bool = False
    is_standardized: bool = False
    component_count: int = 1
    is_replacing: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        if self.kind.has_classes:
            self._check_classes()
        if self.kind is DirectionKind.RIDGE and not np.ptp(self.targets) > 0:
            raise rejected("all targets are equal; a direction needs numbers that differ")
        if self.kind is DirectionKind.PCA and self.component_count > self.sample_count - 1:
            raise rejected(
                f"{self.component_count} components of {self.sample_count} samples; these have at most "
                f"{self.sample_count - 1}, as their mean is taken away; ask for fewer, or give more samples"
            )
        self._check_folds()

    @cached_property
    def folds(self) -> Folds:
        """The fold of each sample, from 0; empty without folds."""
        if self.given_folds.size:
            return self.given_folds
        if not self.fold_count:
            return _NO_INTS
        if self.groups.size:
            return group_folds(self.groups, self.fold_count)
        if self.kind.has_classes:
            return stratified_folds(self.labels, self.fold_count)
        return plain_folds(self.sample_count, self.fold_count)

    def _check_numbers(self) -> None:
        ranges = (
            ("sample_count", self.sample_count, 1, MAX_SAMPLES),
            ("component_count", self.component_count, 1, MAX_COMPONENTS),
            ("fold_count", self.fold_count, 0, MAX_FOLDS),
            ("l2", self.l2, np.nextafter(0, 1), 1e300),
        )
        for name, number, low, high in ranges:
            if not low <= number <= high:
                raise _invalid(f"{name} is {number}; {low:g} to {high:,} are allowed")
        if self.fold_count == 1:
            raise _invalid("one fold has nothing to be fitted to; give 2 or more, or 0 for none")
        if self.class_weights and not all(0 < weight < 1e300 for weight in self.class_weights):
            raise _invalid("class weights are above 0")
        if self.targets.size and not np.isfinite(self.targets).all():
            raise _invalid("a target is NaN or infinite")

    def _check_lengths(self) -> None:
        count = self.sample_count
        wanted = {
            "labels": (self.labels, self.kind.has_classes),
            "targets": (self.targets, self.kind is DirectionKind.RIDGE),
        }
        for name, (given, is_needed) in wanted.items():
            if is_needed and len(given) != count:
                raise rejected(f"{len(given)} {name} for {count} samples; give one for each")
            if not is_needed and len(given):
                raise _invalid(f"{self.kind} has no {name}")
        for name, given in (("groups", self.groups), ("folds", self.given_folds)):
            if len(given) not in (0, count):
                raise rejected(f"{len(given)} {name} for {count} samples; give one for each")
        if self.class_weights and len(self.class_weights) != len(self.classes):
            raise rejected(
                f"{len(self.class_weights)} weights for {len(self.classes)} classes; give one for each"
            )

    def _check_classes(self) -> None:
        labels, count = self.labels, len(self.classes)
        if not 1 <= count <= MAX_CLASSES or labels.min() < 0 or labels.max() >= count:
            raise _invalid(f"labels are indices of the classes, of which there are 2 to {MAX_CLASSES:,}")
        counts = np.bincount(labels, minlength=count)
        if (counts > 0).sum() < 2:
            raise rejected(
                f"all {self.sample_count} samples are of one class, '{self.classes[int(counts.argmax())]}'; "
                "a direction needs samples of two classes"
            )
        if not counts.all():
            raise rejected(
                f"no sample is of class '{self.classes[int(counts.argmin())]}'; leave the class out"
            )
        if self.kind is DirectionKind.MEAN_DIFFERENCE and count != 2:
            raise rejected(
                f"a difference of means has two classes, and these are {count}; use kind='logistic', or give "
                "the samples of two classes"
            )
        if count > self.sample_count:
            raise rejected(
                f"{count} directions of {self.sample_count} samples; give more samples than classes"
            )

    def _check_folds(self) -> None:
        self._check_groups()
        if not self.folds.size:
            return
        if self.kind is DirectionKind.PCA:
            raise _invalid("pca has no labels, and so no scores on other samples; leave folds out")
        for fold in np.unique(self.folds):
            inside = self.folds != fold
            if not inside.any():
                raise rejected(f"all samples are in fold {fold}; give at least two folds")
            if self.kind.has_classes and len(np.unique(self.labels[inside])) < len(self.classes):
                missing = set(range(len(self.classes))) - set(self.labels[inside].tolist())
                raise rejected(
                    f"without fold {fold} no sample of class '{self.classes[min(missing)]}' is left to fit "
                    "to; use fewer folds, or other groups"
                )

    def _check_groups(self) -> None:
        """Refuse groups that are in several folds, and fewer groups than folds."""
        if self.given_folds.size:
            if self.given_folds.min() < 0:
                raise _invalid("folds count from 0")
            leaks = defaultdict(set)
            for group, fold in zip(self.groups.tolist(), self.given_folds.tolist(), strict=False):
                leaks[group].add(fold)
            leaking = next((group for group, folds in leaks.items() if len(folds) > 1), None)
            if leaking is not None:
                raise rejected(
                    f"group {leaking} is in folds {', '.join(map(str, sorted(leaks[leaking])))}: a fold "
                    "would be scored on samples of a group that it was fitted to; put each group in one fold"
                )
            return
        if self.groups.size and self.fold_count > (count := len(np.unique(self.groups))):
            raise rejected(f"{self.fold_count} folds of {count} groups; use at most as many folds as groups")
        if not self.fold_count:
            return
        if self.kind.has_classes and not self.groups.size:
            counts = np.bincount(self.labels)
            if counts.min() < self.fold_count:
                raise rejected(
                    f"{self.fold_count} folds, but class '{self.classes[int(counts.argmin())]}' has "
                    f"{counts.min()} samples; use fewer folds, or give more samples"
                )
        if self.fold_count > self.sample_count:
            raise rejected(f"{self.fold_count} folds of {self.sample_count} samples; use fewer folds")


def rejected(problem: str) -> ServiceError:
    """Error for data to which nothing can be fitted."""
    return ServiceError(ErrorReason.DIRECTION_REJECTED, problem)


def _invalid(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
