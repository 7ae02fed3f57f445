"""Padding mask: which tokens of a padded batch are a sample's own.

    padding = Padding.of({"attention_mask": mask})
    padding.own("encoder.layer.3", value, layout).mask    # bool (batch, tokens); None without padding

# Note: [Padding]
Statistics, pools, Gram matrices and a top-k leave padding out: a sample's numbers are then those that it has
alone. Which dimension has the positions of a masked argument, and how they were made from these, is what the
value's layout says: a class token before them is a sample's own, frames of sound are as many as the samples
of the text alone would have given. Values of which nothing is known have the mask whose shape theirs begins
with. The sum, mean or
norm of an objective is over all elements that its reductions leave, padding among them, as it is without
reductions; only filling, which is no element of the value, does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MASKS = ("attention_mask", "decoder_attention_mask")
"""Arguments that are 1 where a position is a sample's own, (batch, positions)."""


class Layout(Protocol):
    """What the dimensions of a value mean; see `surgery.axes.layout`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each dimension."""
        ...

    @property
    def batch(self) -> int | None:
        """The dimension of the samples."""
        ...

    def masked_dims(self, masks: Mapping[str, torch.Tensor]) -> list[int]:
        """Return the dimensions with positions of which one of these masks tells."""
        ...

    def mask_of(self, dim: int, given: Mapping[str, torch.Tensor], size: int) -> torch.Tensor | None:
        """Return the mask of a dimension, (batch, positions); None where it is not known."""
        ...


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
        masks = {name: _mask_of(arguments.get(name)) for name in MASKS}
        return cls({name: mask for name, mask in masks.items() if mask is not None})

    def own(self, selector: str, value: torch.Tensor, layout: Layout | None) -> "Own | None":
        """Return which positions of a module's value are a sample's own; None where nothing is padding.

        Args:
            selector: Its name, for errors.
            value: The value.
            layout: What its dimensions mean; None where that is not known.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, some of its positions are padding, and which is not known.
        """
        if not self.masks:
            return None
        if layout is None or self._may_be_open(layout, value):
            masks = (mask for mask in self.masks.values() if mask.shape == value.shape[:2])
            mask = next(masks, None) if value.ndim == _UNKNOWN_RANK else None
            return None if mask is None else Own((0, 1), mask)
        dims = layout.masked_dims(self.masks)
        if not dims or layout.batch is None:  # the same for all samples
            return None
        together = torch.ones((), dtype=torch.bool)
        for number, dim in enumerate(dims):
            mask = layout.mask_of(dim, self.masks, value.shape[dim])
            if mask is None or mask.shape != (value.shape[layout.batch], value.shape[dim]):
                raise _not_known(selector, value, layout)
            mask = mask.reshape(len(mask), *[1] * number, -1, *[1] * (len(dims) - number - 1))
            together = together.to(mask.device) & mask
        return Own((layout.batch, *dims), together)

    def _may_be_open(self, layout: Layout, value: torch.Tensor) -> bool:
        """Whether a dimension of which nothing is known may have the positions of a mask, by its length."""
        lengths = {mask.shape[1] for mask in self.masks.values()}
        pairs = zip(layout.axes, value.shape, strict=True)
        return any(name == "?" and size in lengths for name, size in pairs)


@dataclass(frozen=True)
class Own:
    """Which positions of a value are a sample's own.

    Attributes:
        dims: Dimensions of the value: of the samples, then those with positions. Behind reductions in
            ascending order, and without those that an index dropped.
        mask: Bool, of these dimensions in this order.
    """

    dims: tuple[int, ...]
    mask: torch.Tensor

    @property
    def is_leading(self) -> bool:
        """Whether the mask's dimensions are the value's first ones, in order."""
        return self.dims == tuple(range(len(self.dims)))

    def elements(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value's own elements, with the dimensions of the mask as one, the first."""
        return value.movedim(self.dims, tuple(range(len(self.dims))))[self.mask]

    def parts(
        self, value: torch.Tensor, channel_dim: int | None, place: int, *, by_sample: bool
    ) -> list[torch.Tensor]:
        """Return the value's own elements, of each sample or of all in one.

        Args:
            value: The value.
            channel_dim: Its channels; None where it does not matter which elements are of one channel.
            place: The dimension of the channels in the parts.
            by_sample: Whether samples stay apart; they are then the first dimension.
        """
        if channel_dim in self.dims:
            return [value]
        others = [dim for dim in range(value.ndim) if dim not in (*self.dims, channel_dim)]
        last = [] if channel_dim is None else [channel_dim]
        ordered = value.permute(*self.dims, *others, *last)
        pairs = zip(ordered, self.mask, strict=True) if by_sample else ((ordered, self.mask),)
        return [_placed(part[kept], place if last else None) for part, kept in pairs]


def _placed(kept: torch.Tensor, channel_dim: int | None) -> torch.Tensor:
    """Return elements (..., channels) with the channels at a dimension, and one element in those before."""
    if channel_dim is None:
        return kept.reshape(1, -1)
    rows = kept.flatten(0, -2)
    if channel_dim < 2:
        return rows.T if channel_dim == 0 else rows.T[None]
    return rows.reshape(*[1] * (channel_dim - 1), *rows.shape)


NO_PADDING = Padding()
_UNKNOWN_RANK = 3


def _not_known(selector: str, value: torch.Tensor, layout: Layout) -> ServiceError:
    axes = ", ".join(name or "-" for name in layout.axes)
    return ServiceError(
        ErrorReason.REDUCTION_REJECTED,
        f"'{selector}' of shape {tuple(value.shape)} is ({axes}), and some of its positions are padding that "
        "cannot be told apart from the others, as of windows over padding on the left; count padding as well "
        "(in Python `padding=True`), or send the samples alone",
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
