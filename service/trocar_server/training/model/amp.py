"""Precision of the forward pass."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass and its loss: `torch.autocast` for `bf16`, nothing for `float32`.

    Weights, gradients and the optimizer stay in the model's own dtype.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
