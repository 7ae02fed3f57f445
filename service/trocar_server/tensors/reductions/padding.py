"""Padding mask: which tokens of a padded batch are a sample's own.

    padding = Padding.of({"attention_mask": mask})
    padding.of_value("encoder.layer.3", value)   # bool (batch, tokens), or None where nothing is padding

# Note: [Padding]
Statistics, pools, Gram matrices and a top-k leave padding out: a sample's numbers are then those that it has
alone. A value has tokens where it is (batch, tokens, width) with the batch and the tokens of the mask. Values
of a decoder that has inputs of its own, and of what follows it, have its mask, and those of a vision tower
have none, whatever their shape. The sum, mean or norm of an objective is over all elements that its
reductions leave, padding among them, as it is without reductions; only filling, which is no element of the
value, does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_TOKEN_RANK = 3


@dataclass(frozen=True)
class Padding:
    """The attention masks of one pass.

    Attributes:
        mask: Of `attention_mask`, bool (batch, tokens); None without padding.
        decoder_mask: Of `decoder_attention_mask`.
        has_decoder: Whether the decoder has inputs of its own.
    """

    mask: torch.Tensor | None = None
    decoder_mask: torch.Tensor | None = None
    has_decoder: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> "Padding":
        """Return the padding that the arguments of a forward tell of, by name."""
        return cls(
            _mask_of(arguments.get("attention_mask")),
            _mask_of(arguments.get("decoder_attention_mask")),
            any(name.startswith("decoder_") for name in arguments),
        )

    def of_value(self, selector: str, value: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a module's value; None where it has no tokens, or no padding."""
        mask = self.decoder_mask if self.has_decoder and _is_of_decoder(selector) else self.mask
        if mask is None or value.ndim != _TOKEN_RANK or "vision" in selector:
            return None
        return mask if value.shape[:2] == mask.shape else None


NO_PADDING = Padding()


def _is_of_decoder(selector: str) -> bool:
    """Whether a value is of the decoder, by its names, or of what comes after it: a head, the output."""
    is_of_encoder = "encoder" in selector or selector.partition("/")[2].startswith("in")
    return "decoder" in selector or not is_of_encoder


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
