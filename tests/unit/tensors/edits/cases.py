"""Edits of every kind that fit a value of a shape, with their tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from trocar_server.tensors.edits import (
    WHOLE,
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
    Operation,
    Project,
    ProjectOnto,
    Region,
    Resample,
    Scale,
    Set,
    Steer,
    Swap,
    TopK,
    Zero,
    edit_value,
)
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Slice, Take

SHAPES = [(5,), (4, 6), (3, 5, 4), (3, 4, 2, 5), (2, 3, 2, 3, 2)]
"""Of rank 1 to 5."""


def spec(tensor: torch.Tensor) -> OperandSpec:
    return OperandSpec(tensor.dtype, tuple(tensor.shape))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dataclass(frozen=True)
class Case:
    """An edit and what comes along."""

    edit: Edit
    operands: tuple[torch.Tensor, ...] = ()
    needs_other: bool = False

    def __str__(self) -> str:
        operation = self.edit.operation
        numbers = [f"{v}" for v in vars(operation).values() if isinstance(v, bool | float | str)]
        return "-".join([str(operation), *numbers, *(str(tuple(c.shape)) for c in self.operands)])

    def masked(self, mask: torch.Tensor) -> "Case":
        edit = replace(self.edit, region=Region(mask=spec(mask)))
        return replace(self, edit=edit, operands=(mask, *self.operands))

    def run(self, value: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return edit_value(self.edit, value, self.operands, other if self.needs_other else None)


def channels_of(shape: Sequence[int], channel_dim: int | None = None) -> int:
    default = {1: 0, 3: 2}.get(len(shape), 1)
    return default if channel_dim is None else channel_dim % len(shape)


def cases(
    shape: Sequence[int], region: Region = WHOLE, channel_dim: int | None = None, *, dtype: torch.dtype
) -> Iterator[Case]:
    """Yield edits whose operations fit a part of this shape, with channels where `channel_dim` says."""
    dim = channels_of(shape, channel_dim)
    count = shape[dim]
    vector, full = randn(count, seed=1, dtype=dtype), randn(*shape, seed=2, dtype=dtype)
    along = vector.reshape([-1] + [1] * (len(shape) - dim - 1))
    basis = torch.stack([vector, randn(count, seed=3, dtype=dtype), 2 * vector])

    def case(operation: Operation, *operands: torch.Tensor, other: bool = False) -> Case:
        return Case(Edit(operation, region, channel_dim), operands, other)

    yield from (case(operation) for operation in simple_operations(dtype))
    for tensor in (along, full, randn(seed=4, dtype=dtype)):
        yield case(Set(spec(tensor)), tensor)
        yield case(Add(spec(tensor)), tensor)
        yield case(Scale(spec(tensor)), tensor)
        yield case(MeanAblate(spec(tensor)), tensor)
    yield case(MeanAblate(spec(vector)), vector)
    yield case(Affine(spec(along), spec(full)), along, full)
    yield case(Affine(2.0, spec(full)), full)
    directions = (
        [vector] if dim == 0 else [vector, randn(1, count, dtype=dtype), randn(shape[0], count, dtype=dtype)]
    )
    for direction in directions:
        yield case(Steer(spec(direction), -1.5), direction)
        if direction.ndim == 1 and not dtype.is_complex:
            yield case(Cap(spec(direction), -0.25, 0.5), direction)
            yield case(Cap(spec(direction), low=0.25), direction)
        yield case(Steer(spec(direction), 2.5, keeps_norm=True), direction)
        yield case(Steer(spec(direction), 0.75, is_relative=True), direction)
    yield case(Project(spec(basis)), basis)
    yield case(ProjectOnto(spec(basis)), basis)
    yield case(Swap("clean"), other=True)
    yield case(AddInput(), other=True)


def simple_operations(dtype: torch.dtype) -> Iterator[Operation]:
    """Yield operations without tensors."""
    yield from (
        Set(1.5),
        Zero(),
        Add(-0.75),
        Scale(3.0),
        Affine(0.5, 2.0),
        Affine(),
        MeanAblate(),
        Resample(3),
    )
    yield from (Noise(kind, 0.5, 7) for kind in NoiseKind)
    yield Dropout(0.4, 9)
    for scope in NormScope:
        yield from (Normalise(0.8, scope), Normalise(1.25, scope, is_exact=True))
    if not dtype.is_complex:
        yield from (Clamp(-0.5), Clamp(None, 0.25), Clamp(-0.5, 0.25), NanToNum(), NanToNum(1.0, 2.0, -2.0))
        yield from (TopK(1), TopK(2, -1), Cast(torch.int8))
        yield from (Cast(half) for half in (torch.float16, torch.bfloat16))
    yield from (TopK(2, is_absolute=True), TopK(1, 0, is_absolute=True))


def regions(shape: Sequence[int]) -> Iterator[tuple[Region, tuple[int, ...]]]:
    """Yield regions that keep every dimension, with the shape of the part."""
    first, *rest = shape
    yield Region(Index((Slice(1, None, 2), ...))), (len(range(1, first, 2)), *rest)
    dim = channels_of(shape)
    taken = tuple(size if d != dim else 2 for d, size in enumerate(shape))
    yield Region(takes=(Take(Axis.CHANNELS, (-1, 0)),)), taken
    if len(shape) == 3:
        takes = (Take(Axis.SAMPLES, (2, 0)), Take(Axis.CHANNELS, (3, 1)))
        yield Region(Index((..., Slice(1, 4), Slice())), takes), (2, 3, 2)


def seeded_value(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    value = randn(*shape, seed=11, dtype=dtype)
    assert value.numel() == math.prod(shape)
    return value
