"""Rules of operators that compute: where rows are in their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trocar_server.surgery.rows.call import Call, Places, apart, met, moved
from trocar_server.surgery.rows.moving import Rule
from trocar_server.surgery.rows.place import MixedRowsError, Rows


def elementwise(call: Call) -> Places:
    """As in all tensors together, by NumPy's rules."""
    rows = met(_from_end(call, tensor, call.output_rank) for tensor in call.tensors)
    return rows if call.output_count == 1 else [rows] * call.output_count


def _from_end(call: Call, tensor: Any, rank: int) -> Rows | None:
    """Return where the rows of a tensor are in a result of some rank that it is broadcast to."""
    rows = call.rows(tensor)
    return rows if rows is None else moved(rows, rank - call.rank(tensor))


def reduction(call: Call) -> Places:
    """Without the dimensions that are summed over; with `keepdim` of one element."""
    tensor = call.tensors[0]
    if call.given("other"):
        return elementwise(call)
    dims, rows = call.dims(tensor), call.rows(tensor)
    apart(rows, dims)
    if rows is not None and not call.argument("keepdim", False):
        rows = moved(rows, -sum(dim < rows.dim for dim in dims))
    return rows if call.output_count == 1 else [rows] * call.output_count


def product(call: Call) -> Places:
    """Matrix products, of batches, too; and what is added to them."""
    is_added = call.name in ("addmm", "baddbmm", "addmv")
    left, right = call.tensors[-2:]
    places = [_of_left(call, left, call.rank(right)), _of_right(call, right, call.rank(left))]
    if is_added:
        places.append(_from_end(call, call.argument("self"), call.output_rank))
    return met(places)


def _of_left(call: Call, left: Any, other_rank: int) -> Rows | None:
    """Return where the rows of the left factor are in a product."""
    rows, rank = call.rows(left), call.rank(left)
    apart(rows, [rank - 1])
    is_vector = other_rank == 1
    return rows if rows is None else moved(rows, call.output_rank + is_vector - rank)


def _of_right(call: Call, right: Any, other_rank: int) -> Rows | None:
    """Return where the rows of the right factor are in a product."""
    rows, rank = call.rows(right), call.rank(right)
    apart(rows, [max(rank - 2, 0)])
    is_column, is_vector = rows is not None and rows.dim == rank - 1, other_rank == 1
    return rows if rows is None else moved(rows, call.output_rank + (is_vector and not is_column) - rank)


def linear(call: Call) -> Places:
    """A product with a weight."""
    call.check_constant("weight", "bias")
    rows, tensor = call.rows_of("input"), call.argument("input")
    return apart(rows, [call.rank(tensor) - 1])


def einsum(call: Call) -> Places:
    """Products by Einstein's convention."""
    terms, _, result = str(call.argument("equation")).replace(" ", "").partition("->")
    letters = terms.split(",")
    if not result or "." in terms or call.has_row_counts:
        raise MixedRowsError("its result or its first dimensions have no letters")
    places = []
    for term, tensor in zip(letters, call.tensors, strict=True):
        rows = call.rows(tensor)
        if rows is None:
            continue
        letter = term[rows.dim]
        if result.count(letter) != 1 or term.count(letter) != 1:
            raise MixedRowsError("it sums over rows")
        places.append(replace(rows, dim=result.index(letter)))
    return met(places)


def convolution(call: Call) -> Places:
    """Convolutions of samples in the first dimension."""
    call.check_constant("weight", "bias")
    tensor = call.argument("input")
    if call.rank(tensor) != call.rank(call.argument("weight")):
        raise MixedRowsError("it takes one sample")
    return apart(call.rows(tensor), range(1, call.rank(tensor)))


def embedding(call: Call) -> Places:
    """Rows of a table."""
    call.check_constant("weight")
    return call.rows_of("indices")


def layer_norm(call: Call) -> Places:
    """Norms over the last dimensions; other results are statistics with as many dimensions."""
    call.check_constant("weight", "bias")
    tensor, shape = call.argument("input"), call.argument("normalized_shape")
    rows = apart(call.rows(tensor), range(call.rank(tensor))[-len(shape) :])
    return rows if call.output_count == 1 else [rows] * call.output_count


def sample_norm(call: Call) -> Places:
    """Norms of each sample, in the first dimension."""
    call.check_constant("weight", "bias", "running_mean", "running_var")
    tensor = call.tensors[0]
    return apart(call.rows(tensor), range(1, call.rank(tensor)))


def batch_norm(call: Call) -> Places:
    """Batch norms that use kept statistics; statistics of the batch depend on all rows."""
    if call.argument("training", False) or call.argument("running_mean") is None:
        raise MixedRowsError("it normalises by the mean of all rows")
    call.check_constant("weight", "bias", "running_mean", "running_var")
    rows = apart(call.rows(call.tensors[0]), [1])
    return rows if call.output_count == 1 else [rows, *[None] * (call.output_count - 1)]


def window(call: Call) -> Places:
    """Pools and resizing along the last dimensions."""
    tensor = call.tensors[0]
    rank = next(number for number in (1, 2, 3) if f"{number}d" in call.name)
    if any(call.rows(other) is not None for other in call.tensors[1:]):
        raise MixedRowsError("its sizes depend on the rows")
    rows = apart(call.rows(tensor), range(call.rank(tensor))[-rank:])
    return rows if call.output_count == 1 else [rows] * call.output_count


def shuffle(call: Call) -> Places:
    """Channels to positions, and back."""
    tensor = call.tensors[0]
    return apart(call.rows(tensor), range(call.rank(tensor))[-3:])


def attention(call: Call) -> Places:
    """Attention of queries to keys and values, without dropout."""
    if call.argument("dropout_p", 0.0):
        raise MixedRowsError("it draws random numbers")
    names = [name for name in ("query", "key", "value", "attn_mask", "attn_bias") if call.given(name)]
    tensors = [call.argument(name) for name in names]
    places = [_from_end(call, tensor, call.output_rank) for tensor in tensors]
    rows = apart(met(places), range(call.output_rank)[-2:])
    return rows if call.output_count == 1 else [rows, *[None] * (call.output_count - 1)]


def recurrent(call: Call) -> Places:
    """Recurrent layers of samples that are padded, not packed: the sequence, then the states."""
    if call.func._overloadname != "input" or (call.argument("train") and call.argument("dropout")):
        raise MixedRowsError("it takes packed sequences, or draws random numbers")
    params, hidden = call.argument("params"), call.argument("hx")
    if any(call.rows(tensor) is not None for tensor in params):
        raise MixedRowsError("its weights depend on the rows")
    own = 0 if call.argument("batch_first") else 1
    rows = apart(call.rows_of("input"), {0, 1, 2} - {own})
    states = hidden if isinstance(hidden, Sequence) else [hidden]
    state = apart(met(map(call.rows, states)), [0, 2])
    if rows is None or replace(rows, dim=1) != met([replace(rows, dim=1), state]):
        raise MixedRowsError("it starts from the states of other rows")
    return [rows, *[replace(rows, dim=1)] * (call.output_count - 1)]


def sampled(call: Call) -> Places:
    """Positions of each image, the first dimension, given by a grid."""
    return apart(met(map(call.rows, call.tensors)), range(1, call.output_rank))


def complex_view(call: Call) -> Places:
    """Pairs of numbers in a last dimension, and back."""
    tensor = call.tensors[0]
    return apart(call.rows(tensor), [call.rank(tensor) - 1] if call.name == "view_as_complex" else [])


def _names(text: str) -> list[str]:
    return text.split()


_REDUCTIONS = (
    "mean sum amax amin var std var_mean std_mean max min logsumexp norm linalg_vector_norm prod any all "
    "argmax argmin nansum aminmax"
)
_POOLS = (
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
    "max_pool1d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d"
)
_SIZES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
_ATTENTION = (
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)
_ELEMENTWISE = (
    "where masked_fill fill copy lerp addcmul addcdiv type_as expand_as __and__ __or__ __xor__ hardswish "
    "gelu silu mish"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_names(_ELEMENTWISE), elementwise),
    **dict.fromkeys(_names(_REDUCTIONS), reduction),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "matmul"), product),
    "linear": linear,
    "einsum": einsum,
    **dict.fromkeys(
        _names(
            "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d"
        ),
        convolution,
    ),
    "embedding": embedding,
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), sample_norm),
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"), batch_norm),
    **dict.fromkeys((*_names(_POOLS), *_names(_SIZES)), window),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), shuffle),
    **dict.fromkeys(_names(_ATTENTION), attention),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), sampled),
    **dict.fromkeys(("view_as_real", "view_as_complex"), complex_view),
}
