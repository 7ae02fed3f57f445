"""What the operations are, in NumPy and float64; written without a look at the code under test.

`expected` says what an edit makes of a value. Random numbers come from torch's CPU generator, because that
is what the operations are defined by.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trocar_server.tensors.edits import (
    Add,
    AddInput,
    Affine,
    Cap,
    Cast,
    Clamp,
    Dropout,
    Edit,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operand,
    Operation,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Steer,
    Swap,
    TopK,
    Zero,
)
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Slice

Array = np.ndarray[Any, np.dtype[Any]]


def channel_axis(edit: Edit, rank: int) -> int | None:
    if edit.channel_dim is not None:
        return edit.channel_dim % rank
    return {0: None, 1: 0, 3: 2}.get(rank, 1)


def numpy_items(index: Index | None, rank: int) -> tuple[Any, ...]:
    """Return one item for each dimension, or more where the index has too many."""
    given = () if index is None else index.items
    items = [slice(i.start, i.stop, i.step) if isinstance(i, Slice) else i for i in given]
    at = items.index(...) if ... in items else len(items)
    missing = rank - len(items) + (... in items)
    return (*items[:at], *[slice(None)] * missing, *items[at + 1 :])


def expected(edit: Edit, value: Array, operands: list[Array], other: Array | None = None) -> Array:
    """Return the whole result in float64 or complex128 (integers as they are)."""
    wide = value.astype(np.promote_types(value.dtype, np.float64)) if value.dtype.kind in "fc" else value
    if edit.region.mask is not None:
        mask, *operands = operands
        full = apply(edit.operation, wide, operands, other, 0, channel_axis(edit, value.ndim))
        return np.where(mask, full, wide)
    shape, index = value.shape, numpy_items(edit.region.index, value.ndim)
    kept = [dim for dim, item in enumerate(index) if isinstance(item, slice)]
    axes = {Axis.SAMPLES: 0, Axis.CHANNELS: channel_axis(edit, value.ndim), Axis.TOKENS: 1}
    lists = [np.arange(size) for size in wide[index].shape]
    for take in edit.region.takes:
        dim = axes[take.axis]
        assert dim is not None
        lists[kept.index(dim)] = np.array(take.positions) % shape[dim]
    grid = np.ix_(*lists) if lists else ()
    part = wide[index][grid]
    own = None if other is None else np.broadcast_to(other, shape)[index][grid]
    samples, channels = (kept.index(d) if d in kept else None for d in (0, channel_axis(edit, value.ndim)))
    result = wide.copy()
    done = apply(edit.operation, part, operands, own, samples, channels)
    if lists:
        result[index][grid] = done
    else:
        result[index] = done
    return result


def apply(
    wanted: Operation,
    part: Array,
    operands: list[Array],
    other: Array | None,
    samples: int | None,
    channels: int | None,
) -> Array:
    work: Callable[..., Array] = _WORK[type(wanted)]
    found = work(wanted, part, list(operands), other, samples, channels)
    return np.broadcast_to(found, part.shape)


def _operand(operand: Operand, operands: list[Array]) -> Any:
    if not isinstance(operand, OperandSpec):
        return operand
    given = operands.pop(0)
    return given.astype(np.promote_types(given.dtype, np.float64)) if given.dtype.kind in "fc" else given


def _affine(wanted: Affine, x: Array, operands: list[Array], *_: Any) -> Array:
    scaled: Array = x * _operand(wanted.scale, operands)
    shifted: Array = scaled + _operand(wanted.shift, operands)
    return shifted


def _noise(wanted: Noise, x: Array, *_: Any) -> Array:
    assert wanted.seed is not None
    generator = torch.Generator().manual_seed(wanted.seed)
    if wanted.kind is NoiseKind.GAUSSIAN:
        return x + torch.randn(x.shape, generator=generator).double().numpy() * wanted.scale
    return x + (torch.rand(x.shape, generator=generator).double().numpy() * 2 - 1) * wanted.scale


def _dropout(wanted: Dropout, x: Array, *_: Any) -> Array:
    drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(wanted.seed)).numpy()
    return np.where(drawn < np.float32(wanted.probability), 0, x / (1 - wanted.probability))


def _mean_ablate(
    wanted: MeanAblate, x: Array, operands: list[Array], _: Any, samples: int, channels: int | None
) -> Array:
    if wanted.reference is None:
        return np.broadcast_to(x.mean(samples, keepdims=True), x.shape)
    reference = _operand(wanted.reference, operands)
    if channels is not None and reference.shape == (x.shape[channels],):
        return np.moveaxis(np.broadcast_to(reference, np.moveaxis(x, channels, -1).shape), -1, channels)
    return np.broadcast_to(reference, x.shape)


def _resample(wanted: Resample, x: Array, _c: Any, _o: Any, samples: int, _channels: Any) -> Array:
    order = torch.randperm(x.shape[samples], generator=torch.Generator().manual_seed(wanted.seed))
    return np.take(x, order.numpy(), samples)


def _cap(wanted: Cap, x: Array, operands: list[Array], _: Any, __: int | None, channels: int) -> Array:
    (direction,) = operands
    unit = direction.astype(np.float64)
    unit = unit / (np.linalg.norm(unit) or 1)
    last = np.moveaxis(x, channels, -1)
    component = last @ unit
    low, high = (np.inf * sign if end is None else end for end, sign in ((wanted.low, -1), (wanted.high, 1)))
    capped = last + (np.clip(component, low, high) - component)[..., None] * unit
    return np.moveaxis(capped, -1, channels)


def _steer(
    wanted: Steer, x: Array, operands: list[Array], _: Any, samples: int | None, channels: int
) -> Array:
    last = np.moveaxis(x, channels, -1)
    direction = _operand(wanted.direction, operands)
    if direction.ndim == 2:
        assert samples == 0
        direction = direction.reshape(direction.shape[0], *[1] * (x.ndim - 2), direction.shape[1])
    if wanted.is_relative:
        lengths = np.linalg.norm(direction, axis=-1, keepdims=True)
        direction = (
            direction / np.where(lengths == 0, 1, lengths) * np.linalg.norm(last, axis=-1, keepdims=True)
        )
    steered = last + wanted.alpha * direction
    if wanted.keeps_norm:
        before = np.linalg.norm(last, axis=-1, keepdims=True)
        after = np.linalg.norm(steered, axis=-1, keepdims=True)
        steered = np.where(after == 0, 0, steered / np.where(after == 0, 1, after) * before)
    return np.moveaxis(steered, -1, channels)


def _project(wanted: Project, x: Array, operands: list[Array], _o: Any, _s: Any, channels: int) -> Array:
    basis = _operand(wanted.basis, operands)
    onto = np.linalg.pinv(basis) @ basis  # row vectors: x @ onto
    last = np.moveaxis(x, channels, -1)
    projected = last @ onto
    return np.moveaxis(projected if isinstance(wanted, ProjectOnto) else last - projected, -1, channels)


def _top_k(wanted: TopK, x: Array, _c: Any, _o: Any, _s: Any, channels: int) -> Array:
    dim = channels if wanted.dim is None else wanted.dim
    keys = np.abs(x.astype(object)).astype(float) if x.dtype.kind == "i" else np.abs(x)
    keys = keys if wanted.is_absolute else x
    order = np.argsort(keys, axis=dim, kind="stable")
    kept = np.take(order, range(x.shape[dim] - wanted.k, x.shape[dim]), dim)
    is_kept = np.zeros(x.shape, bool)
    np.put_along_axis(is_kept, kept, True, dim)
    return np.where(is_kept, x, 0)


def _cast(wanted: Cast, x: Array, *_: Any) -> Array:
    if wanted.dtype == torch.int8:
        scale = np.abs(x).max() / 127
        return np.zeros_like(x) if scale == 0 else np.rint(x / scale) * scale
    return torch.from_numpy(np.ascontiguousarray(x)).to(wanted.dtype).double().numpy().reshape(x.shape)


def _normalise(
    wanted: Normalise, x: Array, _c: Any, _o: Any, samples: int | None, channels: int | None
) -> Array:
    axes = {
        NormScope.ALL: tuple(range(x.ndim)),
        NormScope.SAMPLE: tuple(dim for dim in range(x.ndim) if dim != samples),
        NormScope.CHANNEL_VECTOR: tuple(dim for dim in range(x.ndim) if dim == channels),
    }[wanted.scope]
    norms = np.sqrt((np.abs(x) ** 2).sum(axes, keepdims=True)) if axes else np.abs(x)
    scaled = norms > (0 if wanted.is_exact else wanted.max_norm)
    return np.where(scaled, x * wanted.max_norm / np.where(scaled, norms, 1), x)


def _nan_to_num(wanted: NanToNum, x: Array, *_: Any) -> Array:
    return np.nan_to_num(x, nan=wanted.nan, posinf=wanted.posinf, neginf=wanted.neginf)


_WORK: dict[type[Operation], Callable[..., Array]] = {
    Set: lambda wanted, x, operands, *_: _operand(wanted.value, operands),
    Zero: lambda wanted, x, *_: np.zeros_like(x),
    Add: lambda wanted, x, operands, *_: x + _operand(wanted.value, operands),
    Scale: lambda wanted, x, operands, *_: x * _operand(wanted.factor, operands),
    Affine: _affine,
    Clamp: lambda wanted, x, *_: np.clip(x, wanted.low, wanted.high),
    Swap: lambda wanted, x, _c, other, *_: other,
    AddInput: lambda wanted, x, _c, other, *_: x + other,
    Noise: _noise,
    Dropout: _dropout,
    MeanAblate: _mean_ablate,
    Resample: _resample,
    Steer: _steer,
    Cap: _cap,
    Project: _project,
    ProjectOnto: _project,
    TopK: _top_k,
    Cast: _cast,
    Normalise: _normalise,
    NanToNum: _nan_to_num,
}
