"""Dimension of classes: where the value of a loss has them, and values with them where torch takes them.

    dims = ClassDims(layout_of)
    dims.of(spec, 4)                    # 3 for scores (batch, rows, columns, classes)
    dims.value(spec, value)             # (batch, classes, rows, columns)

The value's layout says it. Where nothing is known, see Note: [The dimension of classes].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from trocar_server.surgery.axes.layout import Layout, class_dim_of, samples_dim_of
from trocar_server.tensors.losses import CLASS_WEIGHTS, LOSSES
from trocar_server.training.spec.trainer_spec import LossSpec

Size = TypeVar("Size")

POSITIONS = 3
"""The rank from which on a value has positions beside samples and classes; below it nothing is moved."""
_PER_CLASS = (CLASS_WEIGHTS, "pos_weight")
"""Options of losses of single elements that are lists along the classes."""


class ClassDims:
    """Where values have their classes.

    Args:
        layout_of: Returns what the dimensions of the value of a selector mean; None where that is not known.
        of_texts: Whether the model reads texts; see Note: [Divergence of tokens].
    """

    def __init__(self, layout_of: Callable[[str], Layout | None], *, of_texts: bool = False) -> None:
        self._layout_of, self._of_texts = layout_of, of_texts

    def known(self, selector: str, rank: int) -> int | None:
        """Return the dimension of a value's classes, with its samples first; None where it is not known."""
        if rank < POSITIONS:
            return None
        layout = self._layout_of(selector)
        classes, samples = class_dim_of(layout, rank), samples_dim_of(layout) or 0
        return None if classes is None else classes + (classes < samples)

    def samples_first(self, selector: str, value: Tensor) -> Tensor:
        """Return a value with its samples in the first dimension, as targets have them."""
        dim = (samples_dim_of(self._layout_of(selector)) or 0) if value.ndim >= POSITIONS else 0
        return value.movedim(dim, 0) if 0 < dim < value.ndim else value

    def has_samples_first(self, selector: str, rank: int) -> bool:
        """Whether a value has its samples in the first dimension."""
        return rank < POSITIONS or samples_dim_of(self._layout_of(selector)) == 0

    def of(self, spec: LossSpec, rank: int) -> int:
        """Return the dimension of the classes of a loss's value of this rank, samples first."""
        known = self.known(spec.selector, rank) if _is_along_classes(spec) else None
        return self.usual(spec, rank) if known is None else known

    def usual(self, spec: LossSpec, rank: int) -> int:
        """Return the dimension where the loss's function takes the classes."""
        is_divergence = self._of_texts and spec.name == "kl_div" and rank == POSITIONS
        return rank - 1 if LOSSES[spec.name].of_tokens or is_divergence else min(1, rank - 1)

    def value(self, spec: LossSpec, value: Tensor) -> Tensor:
        """Return a value as the loss's function takes it."""
        if not _is_along_classes(spec):
            return value
        return self.target(spec, self.samples_first(spec.selector, value))

    def target(self, spec: LossSpec, target: Tensor) -> Tensor:
        """Return a target of the value's shape, samples first, as the loss's function takes it."""
        dim, usual = self.of(spec, target.ndim), self.usual(spec, target.ndim)
        return target if dim == usual else target.movedim(dim, usual)

    def shape(self, spec: LossSpec, shape: Sequence[Size]) -> tuple[Size, ...]:
        """Return the shape of a target of a shape as the loss's function takes it."""
        rest = list(shape)
        dim, usual = self.of(spec, len(rest)), self.usual(spec, len(rest))
        if dim != usual:
            rest.insert(usual, rest.pop(dim))
        return tuple(rest)


def _is_along_classes(spec: LossSpec) -> bool:
    has_lists = any(isinstance(spec.options.get(name), list) for name in _PER_CLASS)
    return LOSSES[spec.name].takes_indices or spec.name == "kl_div" or has_lists
