"""Functions that may make a NaN or an infinity of moderate numbers: graphs for OpenVINO report these.

# Note: [What appears inside a pass]
A logarithm of a negative number is NaN, and the ReLU behind it makes 0 of it in OpenVINO (2026.4), so that
the values of the pass do not show it. So every function that is not known to keep moderate finite numbers
finite is watched: the graph has a number that is NaN as soon as one of their results is not finite. Sums and
products are not watched, which would cost time and break the fusion of convolutions: for their overflow see
Note: [Values that are not finite] in `engine.compiled.finite`. A model that uses an infinity itself, as masks
of attention do, has infinities where they are meant: its sums are watched for NaN then. Models with weights
that are not finite are not converted.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_SAME_ELEMENTS = """
    view view_as reshape reshape_as permute transpose t T mT movedim moveaxis swapaxes swapdims flatten
    unflatten squeeze unsqueeze expand expand_as contiguous clone detach chunk split split_with_sizes cat
    concat stack hstack vstack dstack tensor_split unbind narrow select __getitem__ index_select flip roll
    rot90 pad repeat repeat_interleave tile to float double half bfloat16 type type_as __get__
    pixel_shuffle pixel_unshuffle channel_shuffle unfold fold diagonal tril triu identity dropout
    dropout1d dropout2d dropout3d alpha_dropout feature_dropout native_channel_shuffle broadcast_to
    broadcast_tensors meshgrid where masked_fill masked_fill_ scatter index_put __setitem__ copy_
    atleast_1d atleast_2d atleast_3d embedding relu relu_ relu6 leaky_relu leaky_relu_ prelu elu elu_ selu
    celu silu mish gelu sigmoid sigmoid_ tanh tanh_ softplus softsign tanhshrink hardshrink softshrink
    logsigmoid hardtanh hardtanh_ hardswish hardsigmoid threshold glu clamp clamp_ clamp_min clamp_max
    clip max min amax amin aminmax maximum minimum sort topk cummax cummin median max_pool1d max_pool2d
    max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    max_pool2d_with_indices boolean_dispatch fn floor ceil round trunc sign sgn frac sin cos erf erfc atan
    interpolate upsample grid_sample affine_grid zeros_like ones_like one_hot zeros ones full full_like
    eye arange linspace tensor as_tensor empty empty_like new_zeros new_ones new_full new_empty new_tensor
    zero_ fill_
"""
_SUMS = """
    add add_ __add__ __radd__ __iadd__ sub sub_ subtract __sub__ __rsub__ rsub __isub__ mul mul_ multiply
    __mul__ __rmul__ __imul__ neg negative __neg__ abs absolute __abs__ square addcmul lerp dot matmul
    __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum tensordot outer linear bilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d sum mean cumsum diff
    layer_norm batch_norm group_norm instance_norm rms_norm local_response_norm normalize lstm gru
    rnn_tanh rnn_relu
"""
_SUMMING = frozenset(_SUMS.split())
_KEEPING = frozenset(_SAME_ELEMENTS.split()) | _SUMMING
_WEIGHING = frozenset({"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"})
"""Finite, unless a mask of infinities leaves nothing."""
_DIVISIONS = frozenset({"__truediv__", "__itruediv__", "div", "div_", "divide", "true_divide"})
_POWERS = frozenset({"__pow__", "__ipow__", "pow", "pow_"})


class NotFinite:
    """The watched outputs of one traced pass.

    Attributes:
        sums: For each watched output a number that is NaN where any of its own is not finite.
    """

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self._has_infinities = False

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> None:
        """Watch the result of a function, if it may not be finite."""
        name = getattr(func, "__name__", "")
        numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        self._has_infinities = self._has_infinities or any(map(math.isinf, numbers))
        is_safe = _keeps_finite(name, args, kwargs) or (name in _WEIGHING and not self._has_infinities)
        if not is_safe or any(map(math.isnan, numbers)):
            self.sums += [(tensor * 0).sum().float() for tensor in _floats(result)]
        elif self._has_infinities and name in _SUMMING:
            self.sums += [torch.where(tensor.isnan().any(), math.nan, 0.0) for tensor in _floats(result)]


def check_weights(model: nn.Module) -> None:
    """Refuse a model with weights that are not finite.

    Raises:
        ValueError: It has such a weight.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"'{name}' is not finite")


def _keeps_finite(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _KEEPING:
        return True
    other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("exponent"))
    if not isinstance(other, int | float):
        return False
    if name in _DIVISIONS:
        return other != 0
    return name in _POWERS and other >= 0 and float(other).is_integer()


def _floats(result: object) -> Iterator[torch.Tensor]:
    """Yield the float tensors of a function's result."""
    if isinstance(result, torch.Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _floats(part)
