"""Dtypes by name: torch's, for code that describes tensors and makes none."""

from typing import TypeAlias

import torch

Dtype: TypeAlias = torch.dtype

DTYPES: dict[str, Dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
"""By name, for example `float32`."""

TORCH_VERSION: str = torch.__version__
