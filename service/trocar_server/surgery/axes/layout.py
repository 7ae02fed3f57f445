"""Layout: what each dimension of a value means, as far as it is known.

layout = Layout((Meaning("batch"), Meaning("tokens", (Piece("tokens"),)), Meaning("channels")))
layout.channels                              # 2
layout.dim_of("tokens")                      # 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from trocar_server.surgery.axes.axis import Axis, Digit, Dim, Dims, Kind, Step, kinds_of, size_of
from trocar_server.surgery.structure import Picks

BATCH = "batch"
IMAGES = "images"
CHANNELS = "channels"
HEADS = "heads"
TOKENS = "tokens"
UNKNOWN = "?"
"""Name of a dimension of which nothing is known."""

Key: TypeAlias = tuple[str, int, str, Picks]
"""Path of a module, number of its call, port, and the path within the value."""


@dataclass(frozen=True)
class Piece:
    """A part of a dimension, for masks.

    Attributes:
        root: The axis of the inputs that its positions are of; empty for positions of none.
        steps: How they were made from those, in order.
        size: Its length, where that is the same for all inputs; else 0.
        axes: Of positions along several axes, one after the other as the patches of a picture: a piece
            for each of these axes.
    """

    root: str = ""
    steps: tuple[Step, ...] = ()
    size: int = 0
    axes: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Meaning:
    """What one dimension means.

    Attributes:
        name: `batch`, `channels`, `heads`, the name of an axis of the inputs, several of these with a
            `*` between them; empty for a dimension of constants, `?` where it is not known.
        pieces: What it consists of, where positions of inputs are among it.
    """

    name: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Layout:
    """What the dimensions of a value mean, in order.

    Attributes:
        meanings: One for each dimension.
        masks: The argument that masks the positions of an axis of the inputs, by the axis's name.
    """

    meanings: tuple[Meaning, ...]
    masks: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each dimension; see `Meaning`."""
        return tuple(meaning.name for meaning in self.meanings)

    @property
    def is_known(self) -> bool:
        """Whether every dimension is known."""
        return UNKNOWN not in self.axes

    def dim_of(self, name: str) -> int | None:
        """Return the only dimension of a name; None without one, or several."""
        return self.axes.index(name) if self.axes.count(name) == 1 else None

    @property
    def batch(self) -> int | None:
        """The dimension of the samples: of images beside texts, which may be more or fewer, the images."""
        dims = [dim for dim, name in enumerate(self.axes) if name in (BATCH, IMAGES)]
        return dims[0] if dims and self.axes.count(self.axes[dims[0]]) == 1 else None

    @property
    def channels(self) -> int | None:
        """The dimension of the channels; of attention that of the heads, of constants their only one."""
        if CHANNELS in self.axes:
            return self.dim_of(CHANNELS)
        if HEADS in self.axes:
            return self.dim_of(HEADS)
        if not self.is_known:
            return None
        constant = [dim for dim, meaning in enumerate(self.meanings) if not meaning.name and meaning.pieces]
        return constant[0] if len(constant) == 1 else None

    def masked_dims(self, masks: Mapping[str, torch.Tensor]) -> list[int]:
        """Return the dimensions with positions of axes of the inputs that have one of these masks.

        Args:
            masks: By the name of the argument, bool (batch, positions).
        """
        return [
            dim
            for dim, meaning in enumerate(self.meanings)
            if any(self.masks.get(piece.root) in masks for piece in meaning.pieces)
        ]

    def mask_of(self, dim: int, given: Mapping[str, torch.Tensor], size: int) -> torch.Tensor | None:
        """Return which positions of a dimension are a sample's own; None where that is not known.

        Args:
            dim: One of `masked_dims`.
            given: As for these.
            size: The dimension's length in this pass.
        """
        pieces = self.meanings[dim].pieces
        masks = {root: given[name] for root, name in self.masks.items() if name in given}
        batch = len(next(iter(masks.values())))
        only = size if len(pieces) == 1 else 0
        parts = [_own(piece, masks, batch, only) for piece in pieces]
        if any(part is None and piece.root in masks for piece, part in zip(pieces, parts, strict=True)):
            return None
        missing = size - sum(part.shape[1] for part in parts if part is not None)
        if parts.count(None) > 1 or missing < 0 or (None not in parts and missing):
            return None
        device = next(iter(masks.values())).device
        rest = torch.ones(batch, missing, dtype=torch.bool, device=device)
        return torch.cat([rest if part is None else part for part in parts], 1)


def _own(piece: Piece, masks: Mapping[str, torch.Tensor], batch: int, size: int) -> torch.Tensor | None:
    """Return the mask of a piece; None where its length is not known."""
    if piece.root in masks:
        mask = masks[piece.root]
        if size == mask.shape[1] and all(step.name in _IN_ORDER for step in piece.steps):
            return mask  # each position is that of the input, as of a causal convolution
        return after_steps(piece, mask)
    if piece.size:
        return next(iter(masks.values())).new_ones(batch, piece.size)
    return None


def after_steps(piece: Piece, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of a piece, from that of its root; None where positions do not correspond."""
    result: torch.Tensor | None = mask
    for step in piece.steps:
        result = None if result is None else _after(step, result)
    return result


_IN_ORDER = ("window", "slice", "pad")


def _after(step: Step, mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask after a step; None where a sample would not have these positions alone."""
    if step.name == "slice":
        return _sliced(mask, *step.numbers)
    if step.name == "pad":
        before, after = step.numbers
        return torch.nn.functional.pad(mask, (before, after)) if min(before, after) >= 0 else None
    if step.name == "roll":
        return mask.roll(step.numbers[0], 1)
    if step.name == "flip":
        return mask.flip(1)
    return _windows(step, mask) if step.name == "window" else None


def _sliced(mask: torch.Tensor, start: int, stop: int, stride: int) -> torch.Tensor:
    """Return the mask of a slice, whose end may be counted from the end of each sample."""
    kept = mask[:, slice(start, stop or None, stride)]
    lengths = mask.sum(1)
    if stop >= 0 or not torch.equal(mask, _first(lengths, mask.shape[1])):
        return kept
    return kept & _first(lengths + stop - start, kept.shape[1])


def _first(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Return a mask of the first positions of each sample."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _windows(step: Step, mask: torch.Tensor) -> torch.Tensor | None:
    """Return which windows a sample has alone; None unless its own positions come first."""
    lengths = mask.sum(1)
    if not torch.equal(mask, _first(lengths, mask.shape[1])):
        return None
    kernel, stride, padding, dilation = step.numbers

    def count(length: int) -> int:
        return max((length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1, 0)

    own = torch.tensor([count(length) for length in lengths.tolist()], device=mask.device)
    return _first(own, count(mask.shape[1]))


def layout_of(dims: Dims, masks: Mapping[str, str]) -> Layout:
    """Return the layout of a tensor's dimensions; `masks` as in `Layout`."""
    return Layout(tuple(Meaning(_name(dim), _pieces(dim)) for dim in dims), masks)


def _name(dim: Dim) -> str:
    if len(dim) == 1:
        return _name_of_digit(dim[0])
    kinds = kinds_of(dim)
    if Kind.UNKNOWN in kinds:
        return UNKNOWN
    if Kind.BATCH in kinds:
        names = [name for digit in dim if (name := _name_of_digit(digit))]
        return names[0] if len(names) == 1 else "*".join(names)
    if Kind.CHANNELS in kinds:
        return CHANNELS
    names = list(dict.fromkeys(name for digit in dim if (name := _name_of_digit(digit))))
    return names[0] if len(names) == 1 else TOKENS if names else ""


def _name_of_digit(digit: Digit) -> str:
    axis = digit.axis.real
    if axis.kind is Kind.UNKNOWN:
        return UNKNOWN
    if axis.kind is Kind.CHANNELS:
        return HEADS if digit.stride > 1 else CHANNELS
    if axis.kind is Kind.BATCH:
        return axis.name or BATCH if digit.is_whole else UNKNOWN
    if axis.kind is Kind.JOINED:
        return _name_of_parts(axis)
    return axis.name


def _name_of_parts(axis: Axis) -> str:
    names = {_name(part) for part in axis.parts} - {""}
    if UNKNOWN in names or any(Kind.BATCH in kinds_of(part) for part in axis.parts):
        return UNKNOWN
    return names.pop() if len(names) == 1 else TOKENS


def _pieces(dim: Dim) -> tuple[Piece, ...]:
    if len(dim) > 1:
        axes = tuple(piece for digit in dim if (piece := _axis(digit)) is not None)
        return (Piece(axes=axes if len(axes) == len(dim) else ()),)
    if len(dim) != 1 or not dim[0].is_whole:
        return (Piece(),) if dim else ()
    axis = dim[0].axis.real
    if axis.kind is Kind.JOINED:
        return tuple(one for part in axis.parts for one in _pieces(part) or (Piece(size=size_of(part)),))
    if axis.kind is Kind.FIXED:
        return (Piece(size=axis.size),)
    if axis.kind is not Kind.NAMED:
        return (Piece(),)
    steps = _steps(axis)
    return (Piece(),) if steps is None else (Piece(axis.root.name, steps),)


def _axis(digit: Digit) -> Piece | None:
    """Return the piece of a digit that counts along all of an axis, in steps; None for another one."""
    axis = digit.axis.real
    steps = _steps(axis) if axis.kind is Kind.NAMED else None
    if steps is None or digit.stride * digit.size != axis.size:
        return None
    cut = () if digit.stride == 1 else (Step("window", (digit.stride, digit.stride, 0, 1)),)
    return Piece(axis.root.name, (*steps, *cut))


def _steps(axis: Axis) -> tuple[Step, ...] | None:
    """Return how an axis was made from one of the inputs; None where positions do not correspond."""
    if axis.kind is Kind.JOINED:
        return None
    if axis.source is None:
        return ()
    before = _steps(axis.source.real)
    if before is None or axis.step is None or axis.step.name == "mixed":
        return None
    return (*before, axis.step)


def channel_dim_of(layout: Layout | None, given: int | None) -> int | None:
    """Return the dimension of the channels: as a request gives it, or as it is known; else None."""
    return given if given is not None or layout is None else layout.channels


def class_dim_of(layout: Layout | None, rank: int) -> int | None:
    """Return the dimension of the classes of scores: their channels; None where that is not known."""
    known = layout is not None and len(layout.axes) == rank and layout.batch is not None
    return layout.dim_of(CHANNELS) if known and layout is not None else None


def tokens_dim_of(layout: Layout | None) -> int | None:
    """Return the only dimension of the tokens; None where that is not known, without one, or with several."""
    return None if layout is None else layout.dim_of(TOKENS)


def samples_dim_of(layout: Layout | None) -> int | None:
    """Return the dimension of the samples: the first where that is not known, None without one."""
    if layout is None or layout.batch is not None:
        return 0 if layout is None else layout.batch
    names = {part for name in layout.axes for part in name.split("*")}
    return None if layout.is_known and not names & {BATCH, IMAGES} else 0


@dataclass(frozen=True)
class Layouts:
    """The layouts of the values of a pass.

    Attributes:
        by_value: By path of the module, number of its call, port and path within the value.
        missing: Operators without a rule, and how often each ran.
    """

    by_value: Mapping[Key, Layout] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)

    def find(self, path: str, call: int, port: str, picks: Picks) -> Layout | None:
        """Return the layout of a value; None where nothing is known of it."""
        return self.by_value.get((path, call, port, picks))


NO_LAYOUTS = Layouts()
