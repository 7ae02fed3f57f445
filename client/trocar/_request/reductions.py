"""Reductions of values on the server before they are sent."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as as_integer
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import numpy as np

from trocar._base.delegation import explained
from trocar._base.tensors import Array, WireTensor, as_numpy, to_wire
from trocar._request.positions import (
    IndexExpression,
    Positions,
    TextSpans,
    listed_spans,
    position_list,
    span,
    wire_index,
    wire_spans,
)
from trocar_api.enums import numbers
from trocar_api.v1 import reduction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_api.value_words import not_one_of

AXES = numbers(pb.Axis)
"""Wire axis by name."""

PoolKind = Literal["avg", "max", "gem", "cls", "last"]

TokenName = Literal["cls", "last", "system", "user", "assistant"]
"""Tokens by name: the first and the last one of each sample, or those of a chat's role."""

Tokens: TypeAlias = Positions | TextSpans | TokenName
"""Which tokens of (batch, tokens, width)."""

ROLES = ("system", "user", "assistant")
"""Roles of a chat that stand for the spans of their messages."""

POOL_KINDS = numbers(pb.PoolKind)
"""Wire pool kind by name."""

CastName = Literal["float16", "bfloat16", "int8", "int8_per_channel"]

CASTS: dict[str, pb.Cast] = {
    "float16": pb.Cast(dtype=tensor_pb2.DTYPE_FLOAT16),
    "bfloat16": pb.Cast(dtype=tensor_pb2.DTYPE_BFLOAT16),
    "int8": pb.Cast(dtype=tensor_pb2.DTYPE_INT8),
    "int8_per_channel": pb.Cast(dtype=tensor_pb2.DTYPE_INT8, is_per_channel=True),
}
"""Wire cast by name."""


@dataclass(frozen=True)
class Reduction:
    """One reduction on the server; made by `index`, `channels`, `pool` and similar functions."""

    message: pb.Reduction
    """As it goes to the server."""
    tensors: tuple[WireTensor, ...] = ()
    """Arrays that go with it, in order: components and mean of `pca`."""

    def __hash__(self) -> int:
        return hash(self.message.SerializeToString(deterministic=True))  # messages have no hash

    def __repr__(self) -> str:
        return f"Reduction({' '.join(str(self.message).split())})"

    def to_wire(self) -> pb.Reduction:
        """Return the reduction as a message."""
        return self.message

    def payloads(self) -> list[memoryview]:
        """Return the bytes of its arrays, in order."""
        return [tensor.payload for tensor in self.tensors]


@explained
def index(expression: IndexExpression) -> Reduction:
    """Index the value as NumPy's basic indexing does.

        trocar.index(np.s_[:, :8, ...])
        trocar.index(np.s_[:, 0])       # an integer drops its dimension

    Args:
        expression: Integers, slices with a positive step and at most one ellipsis, as `numpy.s_` returns
            them, starting at the first dimension. At most 16.

    Raises:
        TypeError: Anything else is in it: a mask, a list, None.
        ValueError: A slice has a step below 1, or there are two ellipses.
    """
    return Reduction(pb.Reduction(index=wire_index(expression)))


@explained
def channels(positions: Positions) -> Reduction:
    """Take some channels: the last dimension of rank 3, otherwise dimension 1, or the tap's `channel_dim`.

        trocar.channels([3, 17, -1])
        trocar.channels(slice(0, 8))

    Args:
        positions: One, several, or a slice that can be counted without knowing the size: `slice(2, 8)`,
            `slice(-8, None)`. Negative positions count from the end. The result has this order; positions may
            repeat; the dimension is kept. 1 to 65,536 positions, and each must exist.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none or too many, or the slice cannot be counted.
    """
    return _take("channels", positions)


@explained
def tokens(positions: Tokens) -> Reduction:
    """Take some tokens of (batch, tokens, width).

        trocar.tokens([0, -1])
        trocar.tokens(trocar.span("Paris"))
        trocar.tokens("assistant")

    Args:
        positions: As for `channels`; "cls" or "last", each sample's first or last token that is not padding,
            as in `trocar.pool`; a `span` of the text, or a list with one span for each text; "system", "user"
            or "assistant", short for `span(role=...)`. With spans, each sample has its own number of tokens:
            shorter samples are filled up with zeros, which statistics and pools ignore and `maps.samples`
            removes; `maps.info[name].token_positions` tells the tokens.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none or too many, the slice cannot be counted, or no tokens have this name.
    """
    if isinstance(positions, str):
        if positions in ("cls", "last"):
            return pool(cast(PoolKind, positions))
        if positions not in ROLES:
            words = not_one_of(positions, ("cls", "last", *ROLES))
            raise ValueError(f"tokens {words}; words of the text are trocar.span({positions!r})")
        positions = span(role=positions)
    spans = listed_spans(positions)
    if not spans:
        return _take("tokens", cast(Positions, positions))
    return Reduction(pb.Reduction(spans=wire_spans(spans)))


@explained
def samples(positions: Positions) -> Reduction:
    """Take some samples of the batch, dimension 0; see `channels` for the positions."""
    return _take("samples", positions)


@explained
def crop(top: int, left: int, height: int, width: int) -> Reduction:
    """Take a rectangle of the last two dimensions, within which it must lie.

    Raises:
        ValueError: It starts below 0, or height or width is below 1.
    """
    if min(top, left) < 0 or min(height, width) < 1:
        raise ValueError("a crop starts at 0 or above and has at least one row and one column")
    return Reduction(pb.Reduction(crop=pb.CropReduction(top=top, left=left, height=height, width=width)))


@explained
def pool(kind: PoolKind, size: int | Sequence[int] | None = None, power: float = 3.0) -> Reduction:
    """Pool the positions, which are all dimensions except samples and channels.

        trocar.pool("avg")              # (batch, channels, height, width) -> (batch, channels)
        trocar.pool("max", (2, 2))      # -> (batch, channels, 2, 2), adaptive
        trocar.pool("cls")              # (batch, tokens, width) -> (batch, width)

    Args:
        kind: "avg", "max", "gem" (`mean(max(x, 1e-6) ** power) ** (1 / power)`) "cls", the first token, or
            "last", the last one. Padding is ignored; `tap(padding=True)` includes it.
        size: The resulting size, one number for each pooled dimension or one for all, as in torch's
            `adaptive_avg_pool2d`. None drops the pooled dimensions.
        power: The power of "gem", above 0.

    Raises:
        ValueError: An unknown kind, or a size or power that is out of range or has no meaning.
    """
    if kind not in POOL_KINDS:
        raise ValueError(f"the kind of a pool {not_one_of(kind, POOL_KINDS)}")
    sizes = [] if size is None else [as_integer(size)] if isinstance(size, SupportsIndex) else list(size)
    if size is not None and (kind in ("cls", "last") or not 1 <= len(sizes) <= 3 or min(sizes) < 1):
        raise ValueError(f"size={size!r}: give 1 to 3 numbers of at least 1, and none for cls and last")
    if not 0 < power < math.inf:
        raise ValueError(f"power={power} is not above 0 and finite")
    if kind != "gem" and power != 3.0:
        raise ValueError('power is only used by "gem"')
    message = pb.PoolReduction(kind=POOL_KINDS[kind], size=sizes, power=power if kind == "gem" else None)
    return Reduction(pb.Reduction(pool=message))


@explained
def peak() -> Reduction:
    """Take each channel's largest value over the positions: (batch, channels). Must be the last reduction.

    Its position is another feature map, int64, whose name ends in `.indices`: a number for
    `numpy.unravel_index` with the sizes of the dimensions besides samples and channels. Padding has no peak;
    positions count in the padded batch. `Client.top_inputs` uses it over a data set.
    """
    return Reduction(pb.Reduction(peak=pb.PeakReduction()))


@explained
def top_k(k: int, dim: int = -1, *, smallest: bool = False) -> Reduction:
    """Take the k largest elements along a dimension, largest first. Must be the last reduction.

    Their positions are another feature map, int64, whose name ends in `.indices`. Along tokens or samples,
    padding is never among them; `tap(padding=True)` includes it. Where a sample has fewer than k tokens,
    zeros with the position -1 follow, which statistics ignore. Positions are those of the padded batch.

    Args:
        k: Number of elements, at least 1 and at most the dimension's size.
        dim: Which dimension; negative counts from the end.
        smallest: Take the smallest instead, smallest first.

    Raises:
        TypeError: `k` is no whole number.
        ValueError: `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"k={k} is below 1")
    return Reduction(pb.Reduction(top_k=pb.TopKReduction(k=k, dim=dim, is_smallest=smallest)))


def lens_reduction(top_k: int) -> Reduction:
    """Read values by the model's norm and head; see `trocar.lens`.

    Raises:
        ValueError: `top_k` is below 1.
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k} is below 1")
    return Reduction(pb.Reduction(lens=pb.LensReduction(top_k=top_k)))


def readout_reduction(name: str, *, is_pooled: bool) -> Reduction:
    """Read a stored direction; see `trocar.readout`."""
    return Reduction(pb.Reduction(readout=pb.ReadoutReduction(name=name, is_pooled=is_pooled)))


@explained
def gram(*, normalized: bool = True) -> Reduction:
    """Compute the inner products of the channels of each sample: (batch, channels, channels).

    Args:
        normalized: Whether to divide by the number of positions.
    """
    return Reduction(pb.Reduction(gram=pb.GramReduction(is_normalized=normalized)))


@explained
def grid(height: int = 0, width: int = 0, *, prefix: int = 0) -> Reduction:
    """Arrange patch tokens of a vision transformer in rows and columns, without class and register tokens.

    (batch, tokens, width) becomes (batch, width, height, width of the grid), like the output of a
    convolution.

        trocar.tap("layer[-1]", reduce=trocar.grid())
        trocar.tap("layer[-1]", reduce=[trocar.grid(), trocar.pool("max", 4)])

    Args:
        height: Rows of patches. Without numbers, those of the model are used.
        width: Columns of patches.
        prefix: Tokens before the patches.

    Raises:
        ValueError: Only some of the numbers are given, or one is negative.
    """
    if (height, width, prefix) != (0, 0, 0) and (min(height, width) < 1 or prefix < 0):
        raise ValueError(
            f"grid of {height} x {width} after {prefix} tokens; give height and width, or neither"
        )
    message = pb.GridReduction(height=height, width=width, prefix_count=prefix)
    return Reduction(pb.Reduction(grid=message))


@explained
def project(component_count: int, *, seed: int = 0) -> Reduction:
    """Project each sample, flattened, with a random Gaussian matrix: (batch, component_count), float32.

    The same seed and sizes give the same matrix on every device; distances are approximately preserved.

    Args:
        component_count: 1 to 65,536.
        seed: Seed of torch's generator, a signed 64-bit integer.

    Raises:
        ValueError: `component_count` is below 1, or the seed is out of range.
    """
    if component_count < 1:
        raise ValueError(f"component_count={component_count} is below 1")
    message = pb.ProjectionReduction(component_count=component_count, seed=seed)
    return Reduction(pb.Reduction(projection=message))


@explained
def pca(components: object, mean: object = None) -> Reduction:
    """Replace the channels by component scores, `(x - mean) @ components.T`, in the last dimension.

    (batch, channels, height, width) becomes (batch, height, width, components).

        trocar.pca(components, mean)
        trocar.pca(trocar_fit)             # has .components and .mean
        trocar.pca(sklearn_pca)            # has .components_ and .mean_

    Args:
        components: Array of shape (components, channels), float32 or float64; or an object that has them.
        mean: Array of shape (channels,); None does not centre. For an object, its own mean is used.

    Raises:
        TypeError: They are not arrays of float32 or float64.
        ValueError: Their shapes do not fit, an object's mean is given twice, or it whitens.
    """
    rows, centre = _components_and_mean(components, mean)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"components of shape {rows.shape}; they are (components, channels)")
    if centre is not None and centre.shape != rows.shape[1:]:
        raise ValueError(f"mean of shape {centre.shape}; it is ({rows.shape[1]},) for these components")
    arrays = [rows] if centre is None else [rows, centre]
    dtype = np.result_type(*arrays)
    tensors = tuple(to_wire(array.astype(dtype)) for array in arrays)  # copies: a tap does not change
    specs = [tensor_pb2.TensorSpec(dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors]
    message = pb.PcaReduction(components=specs[0], mean=specs[1] if len(specs) == 2 else None)
    return Reduction(pb.Reduction(pca=message), tensors)


def gather(
    *,
    samples: Positions | None = None,
    channels: Positions | None = None,
    tokens: Tokens | None = None,
    index: IndexExpression | None = None,
    reduce: Reduction | Iterable[Reduction] = (),
) -> tuple[Reduction, ...]:
    """Return the reductions of `tap`'s shorthand arguments, in their order, then `reduce`."""
    short = {"samples": samples, "channels": channels}
    result = [_take(axis, positions) for axis, positions in short.items() if positions is not None]
    if tokens is not None:
        taken = _tokens(tokens)
        # Spans are of the whole batch, so they come before samples are left out.
        result = [taken, *result] if taken.message.HasField("spans") else [*result, taken]
    if index is not None:
        result.append(_index(index))
    rest = _listed(reduce)
    wrong = next((entry for entry in rest if not isinstance(entry, Reduction)), None)
    if wrong is not None:
        raise TypeError(
            f"reduce has {wrong!r}; create reductions with trocar.pool, trocar.index and their like"
        )
    return (*result, *rest)


_index, _tokens = index, tokens  # inside `gather` the shorthands have the names


def _take(axis: str, positions: Positions) -> Reduction:
    message = pb.TakeReduction(axis=AXES[axis], positions=position_list(axis, positions))
    return Reduction(pb.Reduction(take=message))


def _components_and_mean(components: Any, mean: object) -> tuple[Array, Array | None]:
    for names in (("components", "mean"), ("components_", "mean_")):
        if hasattr(components, names[0]):
            if mean is not None:
                raise ValueError("the mean is given twice: by the object and by mean=")
            if getattr(components, "whiten", False):
                raise ValueError(
                    "whitening is not supported; pass components_ divided by their standard deviations"
                )
            return _floats(getattr(components, names[0])), _optional_floats(
                getattr(components, names[1], None)
            )
    return _floats(components), _optional_floats(mean)


def _optional_floats(value: object) -> Array | None:
    return None if value is None else _floats(value)


def _floats(value: object) -> Array:
    array = as_numpy(value)
    if array.dtype.name not in ("float32", "float64"):
        raise TypeError(f"components and mean are float32 or float64 arrays, not {array.dtype.name}")
    return array


def _listed(given: Any) -> list[Any]:
    """Return one reduction, or several, as a list; anything else is rejected later, with advice."""
    if isinstance(given, (Reduction, str)) or not isinstance(given, Iterable):
        return [given]
    return [*given]
