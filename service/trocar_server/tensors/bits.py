"""Equality of tensors in every bit: NaN equals itself, and -0.0 is not 0.0."""

import torch

from trocar_server.storage.tensor_bytes import bytes_of


def same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors with data have one shape, one dtype and the same bits."""
    is_alike = value.shape == other.shape and value.dtype == other.dtype
    return is_alike and torch.equal(*(bytes_of(one.resolve_conj().resolve_neg()) for one in (value, other)))
