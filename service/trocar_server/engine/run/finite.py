"""Finite values: what a compiled pass takes and returns is finite and not huge; eager computes the rest.

# Note: [Values that are not finite]
Other kernels treat NaN otherwise: OpenVINO's ReLU makes 0 of it, its maxima skip it. Folded weights and sums
in another order overflow elsewhere. So the eager pass computes

1. calls whose inputs have NaN, an infinity, or a number above `LARGEST`: found before they are merged,
2. calls whose values are not finite: found in the rows of each call,
3. calls in whose pass a NaN or an infinity appears that the values need not show: reported by the graph, see
   Note: [What appears inside a pass] in `backends.not_finite`.

A trial runs the eager pass on its batch scaled to the largest inputs, where no value may come near the limit
of its dtype: what is within the limit does not overflow inside.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = 1e6
"""The largest number of an input for which a compiled pass is used; 256 for float16, which ends at 65504."""

_LARGEST_OF_HALF = 256.0
_NEAR_OVERFLOW = 1e30


def largest_input(dtype: torch.dtype) -> float:
    """Return the largest number of an input of a floating dtype for which a compiled pass is used."""
    return _LARGEST_OF_HALF if dtype is torch.float16 else LARGEST


def are_within(inputs: Iterable[torch.Tensor]) -> bool:
    """Whether all numbers of float inputs are finite, and small enough for a compiled pass."""
    return all(_is_within(each, largest_input(each.dtype)) for each in inputs)


def are_finite(values: Iterable[torch.Tensor]) -> bool:
    """Whether dense float tensors have neither NaN nor infinities."""
    return all(_is_within(each, torch.finfo(torch.float64).max) for each in values)


def _is_within(tensor: torch.Tensor, largest: float) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout is not torch.strided:
        return True
    lowest, highest = torch.aminmax(tensor)  # NaN where any number is; a tenth of the time of `isfinite`
    return -largest <= lowest.item() and highest.item() <= largest


def scaled(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of finite inputs, float ones scaled to the largest that a compiled pass is used for."""
    return [_scaled(each) if each.is_floating_point() and each.numel() else each.clone() for each in inputs]


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda and not tensor.frac().any():  # perhaps indices: a wrong one ends all use of the device
        return tensor.clone()
    limit, largest = largest_input(tensor.dtype), float(tensor.abs().max())
    if largest == 0.0:
        return torch.full_like(tensor, limit)
    return (tensor.double() * (limit / largest)).to(tensor.dtype)


class OverflowWatch(TorchDispatchMode):
    """Notes whether an operation inside the context comes near an overflow, or makes a NaN.

    Attributes:
        has_overflowed: Whether one did. An infinity below zero does not count: masks have it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # of torch
        self.has_overflowed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        if not self.has_overflowed and not _makes_no_values(func):
            self.has_overflowed = any(map(_is_near_overflow, tree_leaves(result)))
        return result


def _makes_no_values(func: Any) -> bool:
    """Whether an operation only makes views, or memory that nobody has written to yet."""
    return bool(func.is_view or func.__name__.startswith(("empty", "new_empty")))


def _is_near_overflow(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    limit: float = min(_NEAR_OVERFLOW, torch.finfo(value.dtype).max / 2)
    highest: float = torch.aminmax(value).max.item()
    return not highest <= limit
