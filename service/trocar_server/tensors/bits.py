"""Equality of tensors in every bit: NaN equals itself, and -0.0 is not 0.0."""

import torch


def same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors with data have one shape, one dtype and the same bits."""
    is_alike = value.shape == other.shape and value.dtype == other.dtype
    return is_alike and torch.equal(_bytes(value), _bytes(other))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
