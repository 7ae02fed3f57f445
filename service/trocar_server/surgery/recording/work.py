"""Work of a pass: the multiply-adds of its operators, by their shapes.

Counted are matrix products, convolutions and attention: what takes the time of nearly every model that takes
long. Everything else counts as nothing, so the number is a lower bound. It needs no data: sizes may be
symbols, see Note: [Symbolic recording].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _elements(shape: Sequence[Any]) -> Any:
    """Return the number of elements; `math.prod` and `numel` would make an int of a symbol."""
    count: Any = 1
    for size in shape:
        count = count * size
    return count


def _product(args: Sequence[Any], result: Any) -> Any:
    return _elements(result.shape) * args[-1].shape[-2]


def _added_product(args: Sequence[Any], result: Any) -> Any:
    return _elements(result.shape) * args[1].shape[-1]


def _convolution(args: Sequence[Any], result: Any) -> Any:
    inputs, weight, is_transposed = args[0], args[1], args[6]
    # Each element of the larger side meets the weight of one filter.
    side = inputs.shape if is_transposed else result.shape
    return _elements(side) * _elements(weight.shape[1:])


def _attention(args: Sequence[Any], result: Any) -> Any:
    queries, keys, values = args[0].shape, args[1].shape, args[2].shape
    return _elements(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


_COUNTS: Mapping[Any, Callable[[Sequence[Any], Any], Any]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _added_product,
    _aten.baddbmm.default: _added_product,
    _aten.convolution.default: _convolution,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention.default: _attention,
    _aten._scaled_dot_product_efficient_attention.default: _attention,
}


def multiply_adds(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return the multiply-adds of one operator; 0 for those that are not counted.

    Args:
        func: The operator.
        args: Its positional arguments.
        result: Its return value.
    """
    count = _COUNTS.get(func)
    return 0 if count is None else count(args, result)
