"""Padding mask: which tokens of a padded batch are a sample's own.

    padding = Padding.of({"attention_mask": mask})
    padding.of_value("encoder.layer.3", value, layout)   # bool (batch, tokens), or None without padding

# Note: [Padding]
Statistics, pools, Gram matrices and a top-k leave padding out: a sample's numbers are then those that it has
alone. Which dimension has the positions of a masked argument, and how they were made from these, is what the
value's layout says: a class token before them is a sample's own, frames of sound are as many as the samples
of the text alone would have given. Values of which nothing is known have the mask whose shape theirs begins
with. The sum, mean or norm of an objective is over all elements that its reductions leave, padding among
them, as it is without reductions; only filling, which is no element of the value, does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_MASKS = ("attention_mask", "decoder_attention_mask")


class Layout(Protocol):
    """What the dimensions of a value mean; see `surgery.axes.layout`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each dimension."""

    @property
    def is_known(self) -> bool:
        """Whether every dimension is known."""

    @property
    def batch(self) -> int | None:
        """The dimension of the samples."""

    def masked_dims(self, masks: Mapping[str, torch.Tensor]) -> list[int]:
        """Return the dimensions with positions of which one of these masks tells."""

    def mask_of(self, dim: int, given: Mapping[str, torch.Tensor], size: int) -> torch.Tensor | None:
        """Return the mask of a dimension, (batch, positions); None where it is not known."""


@dataclass(frozen=True)
class Padding:
    """The masks of one pass.

    Attributes:
        masks: By the name of the argument, bool (batch, positions); without those that mask nothing.
    """

    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> "Padding":
        """Return the padding that the arguments of a forward tell of, by name."""
        masks = {name: _mask_of(arguments.get(name)) for name in _MASKS}
        return cls({name: mask for name, mask in masks.items() if mask is not None})

    def of_value(self, selector: str, value: torch.Tensor, layout: Layout | None) -> torch.Tensor | None:
        """Return the mask of a module's value; None where it has no tokens, or no padding.

        Args:
            selector: Its name, for errors.
            value: The value.
            layout: What its dimensions mean; None where that is not known.

        Returns:
            Bool, of the value's first two dimensions.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, some of its positions are padding, and which is not known.
        """
        if not self.masks:
            return None
        if layout is None or not layout.is_known:
            masks = (mask for mask in self.masks.values() if mask.shape == value.shape[:2])
            return next(masks, None) if value.ndim == _UNKNOWN_RANK else None
        dims = layout.masked_dims(self.masks)
        if not dims:
            return None
        if len(dims) == 1 and {layout.batch, dims[0]} == {0, 1}:
            mask = layout.mask_of(dims[0], self.masks, value.shape[dims[0]])
            if mask is not None and mask.shape == (value.shape[layout.batch or 0], value.shape[dims[0]]):
                return mask if dims[0] == 1 else mask.T
        raise _not_known(selector, value, layout)


NO_PADDING = Padding()
_UNKNOWN_RANK = 3


def _not_known(selector: str, value: torch.Tensor, layout: Layout) -> ServiceError:
    axes = ", ".join(name or "-" for name in layout.axes)
    return ServiceError(
        ErrorReason.REDUCTION_REJECTED,
        f"'{selector}' of shape {tuple(value.shape)} is ({axes}), and some of its positions are padding that "
        "can only be left out of (batch, tokens, channels); count padding as well (in Python "
        "`padding=True`), or send the samples alone",
    )


def _mask_of(argument: object) -> torch.Tensor | None:
    if not isinstance(argument, torch.Tensor) or argument.ndim != 2 or argument.is_meta:
        return None
    mask = argument != 0
    return None if bool(mask.all()) else mask


def unpadded(value: torch.Tensor, mask: torch.Tensor | None, *, by_sample: bool) -> list[torch.Tensor]:
    """Return the tokens of (batch, tokens, width) that are no padding: of each sample, or of all in one.

    Args:
        value: The value, also one that an index left without samples, tokens or width.
        mask: Its mask, of the value's first dimensions; the value itself is returned for None.
        by_sample: Whether samples, the first dimension, stay apart.

    Returns:
        Tensors of shape (1, kept tokens, width). Dimensions behind those of the mask keep their positions.
    """
    if mask is None:
        return [value]
    if by_sample:
        return [_kept(own, kept)[None] for own, kept in zip(value, mask, strict=True)]
    kept = _kept(value, mask)
    return [kept[None] if mask.ndim > 1 else kept]


def _kept(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what a mask keeps, its dimensions as one; of a mask without dimensions that one comes last."""
    kept = value[mask]
    return kept if mask.ndim else kept.movedim(0, -1)
