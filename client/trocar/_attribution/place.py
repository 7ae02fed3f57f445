"""Default place of an attribution: the last feature map with height and width before the pooling.

| value                            | chosen                                                       |
|----------------------------------|--------------------------------------------------------------|
| with channels, height and width  | the last one: "layer4" of a ResNet, "features.7" of a Swin     |
| with tokens that are patches     | the last one before the last attention, as rows and columns   |

Outputs of pooling modules do not count: behind an adaptive pooling are as many positions as it was built for.
Nor do values inside attention modules, of which some are maps of tokens by tokens. Behind the last attention
of a ViT only the class token reaches the output: the gradient at all other tokens is zero there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trocar._base.dimensions import Described
from trocar._base.names import few

if TYPE_CHECKING:
    from trocar._base.types import Model

_MOST_KNOWN = 256
"""Places that a client remembers."""


class Value(Described, Protocol):
    """The output of one call of a module; `FeatureMapInfo` is one."""

    @property
    def name(self) -> str:
        """Its selector."""
        ...

    @property
    def path(self) -> str:
        """The module's path."""
        ...

    @property
    def type(self) -> str:
        """The module's class name."""
        ...

    @property
    def pick(self) -> str:
        """The pick into a structured value."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...


@dataclass(frozen=True)
class Place:
    """A feature map and how it has height and width."""

    at: str
    """Its selector."""
    channel_dim: int | None = None
    """The dimension of the channels, where no reply says it and it is not the usual one."""


class KnownPlaces:
    """Default places that were looked up, by model and shape of the inputs, until the model changes."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, tuple[int, ...]], tuple[Model, Place]] = {}

    def find(self, model: Model, input_shape: tuple[int, ...]) -> Place | None:
        """Return the place of the model as it is now described; None if it is not known."""
        described, place = self._places.get((model.model_id, input_shape), (None, None))
        return place if described == model else None

    def keep(self, model: Model, input_shape: tuple[int, ...], place: Place) -> None:
        """Remember a place; the oldest ones are forgotten."""
        self._places[model.model_id, input_shape] = (model, place)
        for key in list(self._places)[:-_MOST_KNOWN]:
            self._places.pop(key, None)


def default_place(values: Sequence[Value], input_shape: tuple[int, ...]) -> Place:
    """Return the last feature map with height and width before the pooling.

    Args:
        values: The outputs of every call of every module, as the calls end.
        input_shape: Shape of the model's input, for images (batch, channels, height, width).

    Raises:
        ValueError: There is none; the message has places that may do.
    """
    attention = _attention_paths(values)
    outside = [value for value in values if _counts(value, attention)]
    maps = [value for value in outside if _has_positions(value, input_shape)]
    before = _before_last_attention(outside, values, attention)
    tokens = [value for value in before if _has_patches(value)]
    if tokens and (not maps or outside.index(tokens[-1]) > outside.index(maps[-1])):
        return Place(tokens[-1].name)
    if not maps:
        raise ValueError(_no_place([value for value in outside if len(value.shape) > 2]))
    is_last = not maps[-1].axes and _is_channels_last(maps[-1], input_shape)
    return Place(maps[-1].name, -1 if is_last else None)


def _counts(value: Value, attention: Sequence[str]) -> bool:
    is_inside = any(_is_within(value.path, path) for path in attention)
    return bool(value.path) and not value.pick and not is_inside and "pool" not in value.type.lower()


def _attention_paths(values: Sequence[Value]) -> list[str]:
    """Return the paths of attention modules, in the order in which they end; the model itself is none."""
    names = ((value.path, value.type.lower()) for value in values)
    return [path for path, kind in names if path and "attention" in kind and "pool" not in kind]


def _before_last_attention(
    outside: Sequence[Value], values: Sequence[Value], attention: Sequence[str]
) -> Sequence[Value]:
    """Return the values that are there when the last attention begins; without attention all of them."""
    if not attention:
        return outside
    begin = next(index for index, value in enumerate(values) if _is_within(value.path, attention[-1]))
    earlier = {id(value) for value in values[:begin]}
    return [value for value in outside if id(value) in earlier]


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


def _has_patches(value: Value) -> bool:
    """Whether one dimension of a value is the rows and columns of a picture."""
    return [len(grid.sizes) for grid in value.token_grids] == [2] and value.channel_dim is not None


def _has_positions(value: Value, input_shape: tuple[int, ...]) -> bool:
    """Whether a value has height and width of more than one position, and no more than the input."""
    if len(value.shape) != 4 or len(input_shape) != 4:
        return False
    if value.axes and "?" not in value.axes:
        return _has_known_positions(value)
    if value.shape[0] != input_shape[0]:
        return False
    height, width = _positions(value, input_shape)
    return min(height, width) > 1 and height <= input_shape[2] and width <= input_shape[3]


def _has_known_positions(value: Value) -> bool:
    """Whether the dimensions beside samples and channels are positions of the inputs, more than one each."""
    named = {dim: name for dim, name in enumerate(value.axes) if dim != value.channel_dim}
    samples = [dim for dim, name in named.items() if name in {"batch", "images"}]
    rest = [dim for dim, name in named.items() if name and name != "heads" and dim not in samples[:1]]
    is_map = value.channel_dim is not None and len(samples) == 1 and len(rest) == 2
    return is_map and not value.token_grids and all(value.shape[dim] > 1 for dim in rest)


def _positions(value: Value, input_shape: tuple[int, ...]) -> tuple[int, int]:
    shape = value.shape
    return (shape[1], shape[2]) if _is_channels_last(value, input_shape) else (shape[2], shape[3])


def _is_channels_last(value: Value, input_shape: tuple[int, ...]) -> bool:
    """Whether the channels come last in a value of which nothing is known: the input's proportions tell."""
    shape, size = value.shape, (input_shape[2], input_shape[3])
    return _is_reduced((shape[1], shape[2]), size) and not _is_reduced((shape[2], shape[3]), size)


def _is_reduced(positions: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether height and width equal the input's divided by one stride, give or take a position."""
    if min(positions) < 1 or positions[0] > size[0] or positions[1] > size[1]:
        return False
    stride = math.sqrt(size[0] * size[1] / (positions[0] * positions[1]))
    return all(abs(count - whole / stride) <= 1 for count, whole in zip(positions, size, strict=True))


def _no_place(values: Sequence[Value]) -> str:
    shown = [f'at="{value.name}", of shape {value.shape}' for value in reversed(values)]
    advice = f"values with positions: {few(shown)}" if shown else "no module has positions in its output"
    return f"no module's output has height and width before a pooling; {advice}"
