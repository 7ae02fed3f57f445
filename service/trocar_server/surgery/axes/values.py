"""Rules of operators that compute: products, convolutions, pools, norms, reductions, attention."""

from __future__ import annotations

from collections.abc import Sequence

from trocar_server.surgery.axes.axis import (
    Axis,
    Dim,
    Dims,
    Kind,
    Step,
    is_fixed,
    kinds_of,
    made,
    size_of,
    whole,
)
from trocar_server.surgery.axes.combining import broadcast, combined
from trocar_server.surgery.axes.operation import Operation, dims_of, fixed, unknown
from trocar_server.surgery.axes.shapes import Rule, changed, constant, elementwise, same

_SPATIAL = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}
"""Names of dimensions that a convolution or pool goes along, where the inputs have none."""


def weighted(contracted: Sequence[Dim], size: int) -> Dim:
    """Return the dimension that a weight makes by a sum over other ones.

    Positions that a weight mixes with each other alone stay positions; anything else becomes channels.
    """
    if size == 1:
        return ()
    kinds = set().union(*map(kinds_of, contracted)) if contracted else set()
    if kinds and kinds <= {Kind.NAMED, Kind.JOINED}:
        axis = next(digit.axis.real for dim in contracted for digit in dim)
        name = axis.name or "tokens"
        return whole(Axis(Kind.NAMED, size, name, source=axis, step=Step("mixed")))
    return made(Kind.CHANNELS, size)


def _contracted(dims: Sequence[Dim]) -> None:
    """Note that a weight sums over a dimension: an unknown one is channels."""
    for dim in dims:
        for digit in dim:
            if digit.kind is Kind.UNKNOWN and digit.is_whole:
                digit.axis.become(Axis(Kind.CHANNELS, digit.axis.real.size))


def product(op: Operation) -> Sequence[Dims]:
    """Matrix products, of batches, too; and what is added to them."""
    is_added = op.name in ("addmm", "baddbmm", "addmv")
    tensors = [tensor for tensor in op.inputs if tensor.dim()]
    left, right = tensors[1:3] if is_added and len(tensors) > 2 else tensors[:2]
    a, b, shape = dims_of(left), dims_of(right), op.outputs[0].shape
    if all(is_fixed(dim) for dim in (*a, *b)):
        return [fixed(shape)]
    rows, over, across, columns = a[:-1], a[-1], b[-2 if right.dim() > 1 else -1], b[-1:]
    columns = columns if right.dim() > 1 else ()
    are_weights = [all(is_fixed(dim) for dim in dims) for dims in (a, b)]
    op.mix(over, across)
    result = list(rows)
    if right.dim() > 2:
        result[: right.dim() - 2] = broadcast([a[:-2], b[:-2]], shape[: right.dim() - 2])
    if are_weights[1]:
        _contracted([over])
        columns = tuple(weighted([over], size_of(dim)) for dim in columns)
    elif are_weights[0] and result:
        _contracted([across])
        result[-1] = weighted([across], size_of(rows[-1]))
    return [(*result, *columns)]


def dot(op: Operation) -> Sequence[Dims]:
    """A sum over everything."""
    return [()] * len(op.outputs)


def convolution(op: Operation) -> Sequence[Dims]:
    """Convolutions: positions by windows, channels from a weight."""
    value, weight, output = op.argument("input"), op.argument("weight"), op.outputs[0]
    rank = weight.dim() - 2
    dims = dims_of(value)
    _contracted([dims[-rank - 1]])
    name_positions(dims[-rank:], rank)
    op.mix(*dims[-rank:])
    strides, paddings = _each(op.argument("stride"), rank), _each(op.argument("padding"), rank)
    dilations, is_transposed = _each(op.argument("dilation"), rank), bool(op.argument("transposed"))
    positions = []
    for place in range(rank):
        kernel, size = weight.shape[place + 2], output.shape[place - rank]
        numbers = (kernel, strides[place], paddings[place], dilations[place])
        positions.append(resized(dims[place - rank], size, numbers, is_transposed=is_transposed))
    channels = made(Kind.CHANNELS, output.shape[-rank - 1])
    return [(*dims[: -rank - 1], channels, *positions)]


def resized(dim: Dim, size: int, window: tuple[int, int, int, int], *, is_transposed: bool = False) -> Dim:
    """Return a dimension of windows (kernel, stride, padding, dilation)."""
    if is_transposed:
        return changed(dim, size, Step("mixed"))
    kernel, stride, _, dilation = window
    is_same = size == size_of(dim) and stride == 1 and (kernel - 1) * dilation <= 2 * window[2]
    return dim if is_same else changed(dim, size, Step("window", window))


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def name_positions(dims: Dims, rank: int) -> None:
    """Name unknown dimensions that a window goes along."""
    for dim, name in zip(dims, _SPATIAL[rank], strict=True):
        for digit in dim:
            if digit.kind is Kind.UNKNOWN and digit.is_whole:
                digit.axis.become(Axis(Kind.NAMED, digit.axis.real.size, name))


def pool(op: Operation) -> Sequence[Dims]:
    """Pools along the last dimensions."""
    rank = next(number for number in (1, 2, 3) if f"{number}d" in op.name)
    dims = dims_of(op.inputs[0])
    name_positions(dims[-rank:], rank)
    op.mix(*dims[-rank:])
    kernels = op.argument("kernel_size")
    result = []
    for output in op.outputs:
        positions = []
        for place in range(rank):
            size = output.shape[place - rank]
            if kernels is None:  # adaptive
                positions.append(_adaptive(dims[place - rank], size))
                continue
            kernel = _each(kernels, rank)[place]
            stride = (_each(op.argument("stride") or kernels, rank))[place]
            padding = _each(op.argument("padding", 0), rank)[place]
            dilation = _each(op.argument("dilation", 1) or 1, rank)[place]
            positions.append(resized(dims[place - rank], size, (kernel, stride, padding, dilation)))
        result.append((*dims[:-rank], *positions))
    return result


def _adaptive(dim: Dim, size: int) -> Dim:
    return dim if size == size_of(dim) else changed(dim, size, Step("mixed"))


def upsample(op: Operation) -> Sequence[Dims]:
    """Other lengths of the last dimensions, with positions in between."""
    dims, output = dims_of(op.inputs[0]), op.outputs[0]
    rank = next((number for number in (1, 2, 3) if f"{number}d" in op.name), 2)
    name_positions(dims[-rank:], rank)
    positions = [_adaptive(dims[place - rank], output.shape[place - rank]) for place in range(rank)]
    return [(*dims[:-rank], *positions)]


def embedding(op: Operation) -> Sequence[Dims]:
    """Rows of a table."""
    indices = dims_of(op.argument("indices"))
    if all(is_fixed(dim) for dim in indices):
        return [fixed(op.outputs[0].shape)]
    for dim in indices:
        for digit in dim:
            if digit.kind is Kind.UNKNOWN and digit.is_whole:
                digit.axis.become(Axis(Kind.NAMED, digit.axis.real.size, "tokens"))
    return [(*indices, made(Kind.CHANNELS, op.outputs[0].shape[-1]))]


def attention(op: Operation) -> Sequence[Dims]:
    """Attention of queries to keys and values."""
    query, value = op.dims("query"), op.dims("value")
    op.mix(value[-2])
    return [(*query[:-1], value[-1]), *(unknown(output.shape) for output in op.outputs[1:])]


def first_as_input(op: Operation) -> Sequence[Dims]:
    """The first result as the first tensor, as of a whole attention or encoder layer; others are unknown."""
    dims = dims_of(op.inputs[0])
    return [
        dims if number == 0 and output.dim() == len(dims) else unknown(output.shape)
        for number, output in enumerate(op.outputs)
    ]


def reduction(op: Operation) -> Sequence[Dims]:
    """Without the dimensions that are summed over; with `keepdim` of one element."""
    dims, places = dims_of(op.inputs[0]), op.dim_list()
    op.mix(*(dims[place] for place in places))
    keeps = bool(op.argument("keepdim", False))
    kept = tuple(
        () if place in places else dim for place, dim in enumerate(dims) if keeps or place not in places
    )
    return [kept] * len(op.outputs)


def norm(op: Operation) -> Sequence[Dims]:
    """Norms: the value is as the input, and others are its statistics."""
    if op.name.startswith(("native_batch_norm", "_native_batch_norm", "cudnn_batch_norm", "batch_norm")):
        _contracted(dims_of(op.inputs[0])[1:2])
    return first_as_input(op)


def ranked(op: Operation) -> Sequence[Dims]:
    """The largest of a dimension, or some of it: `topk` and `sort`."""
    place, dims = op.dim_argument(default=-1), op.dims()
    op.mix(dims[place])
    return [
        (*dims[:place], made(Kind.FIXED, output.shape[place]), *dims[place + 1 :]) for output in op.outputs
    ]


def scattered(op: Operation) -> Sequence[Dims]:
    """Values written to places of a tensor."""
    place, dims, given = op.dim_argument(), op.dims(), dims_of(op.argument("index"))
    result = [
        dim if other == place or size_of(dim) != size_of(own) else combined([dim, own], size_of(dim))
        for other, (dim, own) in enumerate(zip(dims, given, strict=True))
    ]
    return [tuple(result)]


def as_complex(op: Operation) -> Sequence[Dims]:
    """Pairs of numbers in a last dimension, and back."""
    dims = dims_of(op.inputs[0])
    return [(*dims, made(Kind.FIXED, 2)) if op.name == "view_as_real" else dims[:-1]]


def along(op: Operation) -> Sequence[Dims]:
    """As the first tensor, whose positions along one dimension depend on each other."""
    dims = op.dims()
    if dims and op.argument("dim") is not None:
        op.mix(dims[op.dim_argument()])
    return [dims] * len(op.outputs)


def _names(text: str) -> list[str]:
    return text.split()


_POINTWISE = _names(
    "clone _to_copy to copy alias detach lift lift_fresh contiguous native_dropout dropout where "
    "bernoulli masked_fill fill zero resolve_conj resolve_neg _conj complex real imag view_as addcmul "
    "addcdiv lerp empty_like zeros_like ones_like full_like rand_like randn_like normal uniform prelu "
    "_prelu_kernel bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not isin hardswish "
    "hardtanh hardsigmoid leaky_relu elu gelu silu mish softplus softshrink hardshrink threshold "
    "log_sigmoid_forward relu6 celu selu rrelu bernoulli nan_to_num clamp clamp_min clamp_max round "
    "floor_divide fmod remainder pow rsub polar angle glu_backward searchsorted bucketize"
)
_ALONG = _names(
    "_softmax _safe_softmax _log_softmax softmax log_softmax cumsum cumprod cummax logcumsumexp tril triu "
    "index_put _index_put_impl index_add index_copy index_fill masked_scatter slice_scatter "
    "select_scatter"
)
_REDUCTIONS = _names(
    "mean sum amax amin var std var_mean std_mean max min logsumexp norm linalg_vector_norm prod any all "
    "argmax argmin median nansum aminmax"
)
_POOLS = _names(
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
    "max_pool1d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d"
)
_NORMS = _names(
    "native_layer_norm layer_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training cudnn_batch_norm batch_norm native_group_norm group_norm "
    "_fused_rms_norm rms_norm instance_norm local_response_norm"
)
_ATTENTION = _names(
    "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable "
    "_scaled_dot_product_attention_math_for_mps"
)
_UPSAMPLES = _names(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)


def strided(op: Operation) -> Sequence[Dims]:
    """The same memory with other strides: known where the lengths are those before."""
    dims, shape = dims_of(op.inputs[0]), op.outputs[0].shape
    return [dims if op.inputs[0].shape == shape else unknown(shape)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("as_strided", "as_strided_copy", "resize_as"), strided),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), constant),
    **dict.fromkeys(_POINTWISE, elementwise),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "matmul"), product),
    "dot": dot,
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), convolution),
    **dict.fromkeys(_POOLS, pool),
    **dict.fromkeys(_UPSAMPLES, upsample),
    "embedding": embedding,
    **dict.fromkeys(_ATTENTION, attention),
    **dict.fromkeys(("_native_multi_head_attention", "_transformer_encoder_layer_fwd"), first_as_input),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_NORMS, norm),
    **dict.fromkeys(("topk", "sort", "argsort", "kthvalue", "mode"), ranked),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "set", "resize"), same),
    **dict.fromkeys(("view_as_real", "view_as_complex"), as_complex),
}
