"""Precision of the forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch


def autocasting(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the contexts of forward passes and their losses.

    `torch.autocast` for `bf16`, nothing for `float32`. Weights, gradients and the optimizer stay in the
    model's own dtype.
    """
    if precision == "bf16":
        return partial(torch.autocast, device.type, dtype=torch.bfloat16)
    return nullcontext
