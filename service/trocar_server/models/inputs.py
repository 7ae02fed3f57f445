"""Input signature: a model's named inputs, with dtypes and symbolic dimensions.

    signature = InputSignature((InputSpec("input_ids", "int64", ("batch", "tokens"), below=30522),))
    signature.check([("input_ids", torch.int64, (2, 9))])
    signature.example(2)                                   # {"input_ids": a tensor of shape (2, 8)}

A dimension is a number, or a name: dimensions of one name are equal within a call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_api.value_words import not_one_of
from trocar_server.errors import ServiceError, unknown
from trocar_server.nested_names import is_nested, parse_name

BATCH = "batch"
"""The name of the first dimension of nearly every input."""
IMAGE_BATCH = "images"
"""The name of the first dimension of images that need not be as many as the texts beside them."""
TOKEN_IDS = "input_ids"
"""The name that token ids have in transformers' models."""
IMAGES = "pixel_values"
"""The name that images have in transformers' models."""
PIXEL_MASK = "pixel_mask"
"""Argument that is 1 where a padded image has pixels, int64 (batch, height, width)."""
PATCH_MASK = "pixel_attention_mask"
"""Argument that is 1 where a patch is of the image, (images, patches)."""
SPATIAL_SHAPES = "spatial_shapes"
"""Argument with the rows and columns of the patches of each image, (images, 2)."""
IMAGE_GRID = "image_grid_thw"
"""Argument with frames, rows and columns of the patches of each image, (images, 3), of models that take the
patches of all images one after the other."""
FLATTENED = "flattened_patches"
"""Argument with row, column and values of the patches of each image, (batch, patches, 2 + values)."""
_OF_IMAGES = (IMAGES, IMAGE_GRID, FLATTENED)
_BESIDE_IMAGES = (PATCH_MASK, SPATIAL_SHAPES)
FLAGS = ("bool", "int", "str")
"""Types of inputs that are no tensors."""

_EXAMPLE_SIZE = 8
_DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool")
_WHOLE = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a model."""

    name: str
    """The parameter of `forward`."""
    dtype: str
    """A torch dtype such as `int64`; or `flag:bool`, `flag:int`, `flag:str` for what is no tensor."""
    shape: tuple[int | str, ...] | None = None
    """Dimensions, the batch included. None: any."""
    is_optional: bool = False
    """Whether a call may leave it out."""
    below: int = 0
    """Values are from 0 to below this, for example the size of a vocabulary; 0 for any."""
    fill: int = 0
    """Every value of the example; 0 for seeded ones within the range."""

    @property
    def is_flag(self) -> bool:
        """Whether it is no tensor."""
        return self.dtype.startswith("flag:")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a tensor input."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        """As `input_ids: int64 (batch, tokens)`."""
        shape = "" if self.shape is None or self.is_flag else f" ({', '.join(map(str, self.shape))})"
        optional = ", optional" if self.is_optional else ""
        return f"{self.name}: {self.dtype.removeprefix('flag:')}{shape}{optional}"


Given = tuple[str, torch.dtype | None, tuple[int, ...]]
"""Name (empty where positional), dtype and shape of an input of a call; no dtype for images to prepare."""


@dataclass(frozen=True, slots=True)
class InputSignature:
    """The inputs of a model, in the order of its `forward`."""

    inputs: tuple[InputSpec, ...]
    """All that a call may give."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of named dimensions in the example input; 8 where not given."""
    largest: Mapping[str, int] = field(default_factory=dict)
    """Limits of named dimensions, for example the positions that the model has embeddings for."""
    is_complete: bool = True
    """Whether nothing else can be given: else only the example is known, and the model judges."""

    def check(self, given: Sequence[Given]) -> None:
        """Refuse inputs that the model cannot take.

        Raises:
            ServiceError: `INPUT_REJECTED`: an unknown name, a missing input, a wrong dtype or shape, unequal
                sizes of one dimension.
        """
        if not self.is_complete:
            return
        sizes: dict[str, tuple[int, str]] = {}
        names = []
        within: set[str] = set()
        for position, (name, dtype, shape) in enumerate(given):
            spec = self.find(name, position)
            if name not in ("", spec.name):
                within.add(spec.name)  # of any shape: the model judges
                continue
            names.append(spec.name)
            if dtype is not None:
                self._check_one(spec, dtype, shape, sizes)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise rejected(f"the input '{twice[0]}' is given twice")
        names += within
        names += [name.replace("inputs_embeds", "input_ids") for name in names]  # transformers takes either
        missing = [spec for spec in self.inputs if not spec.is_optional and spec.name not in names]
        if missing:
            raise rejected(f"the input '{missing[0].name}' is missing{self._both(names)}; {self}")

    def check_flags(self, given: Sequence[tuple[str, bool | int | str]]) -> None:
        """Refuse what is no flag of the model: only what its signature lists reaches its forward.

        Args:
            given: Name and value of each.

        Raises:
            ServiceError: `INPUT_REJECTED`: no flag of this name, or a value of another type.
        """
        for name, value in given:
            flags = {spec.name: spec.dtype.removeprefix("flag:") for spec in self.inputs if spec.is_flag}
            kind = type(value).__name__
            if name not in flags:
                own = [spec for spec in self.inputs if spec.name == name]
                advice = f"the model takes {own[0]}" if own else _flags_advice(flags)
                raise rejected(f"'{name[:80]}' is given as {kind} and is not a flag of the model; {advice}")
            if flags[name] != kind:
                raise rejected(f"the input '{name}' takes a {flags[name]}, not {value!r:.80} ({kind})")
        names = [name for name, _ in given]
        if len(set(names)) != len(names):
            raise rejected("a flag is given twice")

    def _both(self, given: Sequence[str]) -> str:
        """Advice for a call that has texts or images and needs both."""
        required = {spec.name for spec in self.inputs if not spec.is_optional}
        is_half = {TOKEN_IDS, IMAGES} <= required and bool({TOKEN_IDS, IMAGES} & set(given))
        return ': in Python `{"text": texts, "images": images}`' if is_half else ""

    def find(self, name: str, position: int) -> InputSpec:
        """Return the input of a name, or of a position where the name is empty; or what the name is within.

        Raises:
            ServiceError: `INPUT_REJECTED`, there is none.
        """
        if not name:
            if position >= len(self.inputs):
                raise rejected(f"input {position} is one too many; {self}")
            return self.inputs[position]
        for spec in self.inputs:
            if spec.name == name:
                return spec
        if is_nested(name):
            root, _ = parse_name(name)
            result = next((spec for spec in self.inputs if spec.name == root and spec.shape is None), None)
            if result is not None and not result.is_flag:
                return result
        names = [spec.name for spec in self.inputs]
        raise unknown(ErrorReason.INPUT_REJECTED, "input", name[:80], names, str(self))

    def _check_one(
        self, spec: InputSpec, dtype: torch.dtype, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
    ) -> None:
        if spec.is_flag:
            raise rejected(
                f"the input '{spec.name}' takes a {spec.dtype.removeprefix('flag:')}, not a tensor"
            )
        if not _fits(spec, dtype):
            name = str(dtype).removeprefix("torch.")
            advice = f'`array.astype("{spec.dtype}")`'
            raise rejected(f"the input '{spec.name}' is {name}, and the model takes {spec.dtype}; {advice}")
        if spec.shape is None:
            return
        if len(spec.shape) != len(shape):
            raise rejected(f"the input '{spec.name}' has shape {shape}; the model takes {spec}")
        for wanted, size in zip(spec.shape, shape, strict=True):
            self._check_size(spec, wanted, size, shape, sizes)

    def _check_size(
        self,
        spec: InputSpec,
        wanted: int | str,
        size: int,
        shape: tuple[int, ...],
        sizes: dict[str, tuple[int, str]],
    ) -> None:
        if isinstance(wanted, int):
            if wanted != size:
                raise rejected(f"the input '{spec.name}' has shape {shape}; the model takes {spec}")
            return
        known, other = sizes.setdefault(wanted, (size, spec.name))
        if known != size:
            raise rejected(
                f"the inputs '{other}' and '{spec.name}' have {known} and {size} {_plural(wanted)}; "
                "these must be equal"
            )
        if wanted in self.largest and size > self.largest[wanted]:
            raise rejected(
                f"the input '{spec.name}' has {size} {_plural(wanted)}, and the model takes at most "
                f"{self.largest[wanted]}"
            )

    def check_values(self, name: str, position: int, value: Tensor) -> None:
        """Refuse numbers outside an input's range: on a GPU these would end the process.

        Raises:
            ServiceError: `INPUT_REJECTED`, with the number and its place.
        """
        below = self.find(name, position).below if self.is_complete else 0
        if not below or not value.numel() or value.dtype is torch.bool or value.is_floating_point():
            return
        low, high = value.aminmax()
        if int(low) < 0 or int(high) >= below:
            wrong = ((value < 0) | (value >= below)).nonzero()[0].tolist()
            label, number = self.find(name, position).name, int(value[tuple(wrong)])
            raise rejected(
                f"the input '{label}' has {number} at {tuple(wrong)}; the model takes 0 to {below - 1}"
            )

    @property
    def image_channels(self) -> int | None:
        """Channels of the input that images become; None without one of that name, or any number."""
        shape = next((spec.shape for spec in self.inputs if spec.name == IMAGES), None)
        channels = shape[1] if shape is not None and len(shape) == 4 else None
        return channels if isinstance(channels, int) else None

    @property
    def takes_images(self) -> bool:
        """Whether images become an input: as they are, or in patches."""
        return self.image_channels is not None or any(spec.name == SPATIAL_SHAPES for spec in self.inputs)

    @property
    def image_arrays(self) -> tuple[InputSpec, ...]:
        """Inputs that images become; empty for a model that takes none by the usual name."""
        if not any(spec.name in (IMAGES, FLATTENED) for spec in self.inputs):
            return ()
        return tuple(
            spec
            for spec in self.inputs
            if spec.name in _OF_IMAGES or (spec.name in _BESIDE_IMAGES and not spec.is_optional)
        )

    def example(self, batch: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return valid values for the required inputs by name, the same at every call, on the CPU.

        Args:
            batch: The size of the first dimension.
            dtype: Of floats; float32 when None.
        """
        generator = torch.Generator().manual_seed(0)
        return {
            spec.name: _values(spec, self.shape_of(spec, batch), dtype, generator)
            for spec in self.inputs
            if not spec.is_optional and not spec.is_flag
        }

    def value_of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return a valid value for an input, as in `example`; None where none of this name is known."""
        spec = next((spec for spec in self.inputs if spec.name == name), None)
        if spec is None or spec.is_flag:
            return None
        return _values(spec, shape, dtype, torch.Generator().manual_seed(0)).to(dtype)

    def shape_of(self, spec: InputSpec, batch: int) -> tuple[int, ...]:
        """Return the shape of an input's example."""
        sizes = {**self.sizes, BATCH: batch, IMAGE_BATCH: batch}
        return tuple(
            size if isinstance(size, int) else self._size(size, sizes) for size in spec.shape or (BATCH,)
        )

    def _size(self, name: str, sizes: Mapping[str, int]) -> int:
        return sizes.get(name, min(_EXAMPLE_SIZE, self.largest.get(name, _EXAMPLE_SIZE)))

    def __str__(self) -> str:
        """As a list of the inputs."""
        return f"the model takes {'; '.join(map(str, self.inputs))}"


def overridden(signature: InputSignature, inputs: Mapping[str, Mapping[str, Any]]) -> InputSignature:
    """Return a signature with an operator's words: `dtype`, `shape`, `optional`, `below`, `sizes` by name.

    A name that is new is added; without a shape that was known before, it takes any.

    Raises:
        ServiceError: `MODEL_INVALID`, a key or value is wrong.
    """
    if not inputs:
        return signature
    known = {spec.name: spec for spec in signature.inputs} if signature.is_complete else {}
    sizes = dict(signature.sizes)
    for name, settings in inputs.items():
        known[name] = _changed(known.get(name, InputSpec(name, "float32")), settings)
        sizes |= settings.get("sizes", {})
    return replace(signature, inputs=tuple(known.values()), sizes=sizes, is_complete=True)


def _changed(spec: InputSpec, settings: Mapping[str, Any]) -> InputSpec:
    dtype = settings.get("dtype", spec.dtype)
    dtype = f"flag:{dtype}" if dtype in ("int", "str") else dtype
    shape = settings.get("shape", spec.shape)
    if dtype.removeprefix("flag:") not in (*_DTYPES, *FLAGS):
        message = f"inputs.{spec.name}.dtype {not_one_of(settings['dtype'], (*_DTYPES, 'int', 'str'))}"
        raise ServiceError(ErrorReason.MODEL_INVALID, message)
    return InputSpec(
        spec.name,
        dtype,
        None if shape is None else tuple(shape),
        settings.get("optional", spec.is_optional),
        settings.get("below", spec.below),
        spec.fill,
    )


def example_only(name: str, input_shape: Sequence[int], dtype: torch.dtype | None) -> InputSignature:
    """Return the signature of a model of which only an example input is known."""
    text = str(dtype or torch.float32).removeprefix("torch.")
    return InputSignature((InputSpec(name, text, (BATCH, *input_shape)),), is_complete=False)


def rejected(message: str) -> ServiceError:
    """Error for inputs that a model cannot take."""
    return ServiceError(ErrorReason.INPUT_REJECTED, message)


def _flags_advice(flags: Mapping[str, str]) -> str:
    if not flags:
        return "it has none"
    return f"it has {', '.join(f'{name}: {kind}' for name, kind in flags.items())}"


def _fits(spec: InputSpec, dtype: torch.dtype) -> bool:
    wanted = spec.torch_dtype
    if wanted.is_floating_point:
        return dtype.is_floating_point  # its width is judged with the weights'
    is_mask = spec.below == 2
    return dtype == wanted or (wanted in _WHOLE and dtype in _WHOLE) or (is_mask and dtype is torch.bool)


def _values(
    spec: InputSpec, shape: tuple[int, ...], dtype: torch.dtype | None, generator: torch.Generator
) -> Tensor:
    wanted = spec.torch_dtype
    if spec.fill:
        return torch.full(shape, spec.fill, dtype=wanted)
    if wanted.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype or wanted)
    if spec.below == 2 or wanted is torch.bool:
        return torch.ones(shape, dtype=wanted)
    return torch.randint(0, spec.below or 1, shape, generator=generator).to(wanted)


def _plural(dimension: str) -> str:
    return "samples" if dimension == BATCH else dimension
