"""Padding mask: which tokens of a padded batch are a sample's own.

    padding = Padding.of({"attention_mask": mask})
    padding.of_value("encoder.layer.3", value)   # bool (batch, tokens), or None where nothing is padding

# Note: [Padding]
Statistics, pools and Gram matrices leave padding out: a sample's numbers are then those that it has alone. A
value has tokens where it is (batch, tokens, width) with the batch and the tokens of the mask. Values of a
decoder that has inputs of its own have its mask, and those of a vision tower have none, whatever their shape.
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
    def of(cls, keywords: Mapping[str, object]) -> "Padding":
        """Return the padding that the keyword arguments of a forward tell of."""
        return cls(
            _mask_of(keywords.get("attention_mask")),
            _mask_of(keywords.get("decoder_attention_mask")),
            any(name.startswith("decoder_") for name in keywords),
        )

    def of_value(self, path: str, value: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a module's value; None where it has no tokens, or no padding."""
        names = path.split(".")
        is_decoder = self.has_decoder and any("decoder" in name for name in names)
        mask = self.decoder_mask if is_decoder else self.mask
        if mask is None or value.ndim != _TOKEN_RANK or any("vision" in name for name in names):
            return None
        return mask if value.shape[:2] == mask.shape else None


NO_PADDING = Padding()


def _mask_of(argument: object) -> torch.Tensor | None:
    if not isinstance(argument, torch.Tensor) or argument.ndim != 2 or argument.is_meta:
        return None
    mask = argument != 0
    return None if bool(mask.all()) else mask


def unpadded(value: torch.Tensor, mask: torch.Tensor | None, *, by_sample: bool) -> list[torch.Tensor]:
    """Return the tokens of (batch, tokens, width) that are no padding: of each sample, or of all in one.

    Args:
        value: The value.
        mask: Its mask; the value itself is returned for None.
        by_sample: Whether samples stay apart.

    Returns:
        Tensors of shape (1, kept tokens, width).
    """
    if mask is None:
        return [value]
    if by_sample:
        return [own[kept][None] for own, kept in zip(value, mask, strict=True)]
    return [value[mask][None]]
