"""The bytes of a tensor, as a flat tensor.

    bytes_of(torch.ones(2, 3)).shape      # (24,)

torch calls a dimension of one element contiguous whatever its stride is, and refuses to view such a tensor as
bytes: one sample's `value[:, 0]` of (1, 8) has shape (1,) and stride 8 (torch 2.14).
"""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a strided tensor in row-major order, as uint8; a copy where they are not."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
