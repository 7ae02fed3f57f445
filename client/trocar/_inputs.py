"""What a caller may pass as `inputs`, turned into wire arguments and payloads.

    arguments, payloads = wire_inputs(images)

| passed                                         | becomes                                    |
|------------------------------------------------|--------------------------------------------|
| array or tensor                                | one tensor, as it is                       |
| uint8 array (H, W, 3) or (N, H, W, 3)          | images that the server preprocesses        |
| path, encoded bytes, PIL image                 | a batch of one image                       |
| list of paths, bytes, PIL images, uint8 HW3    | a batch of images; kinds may be mixed      |
| list of arrays of one shape                    | one tensor, stacked: a batch               |
| tuple of arrays or tensors                     | positional arguments                       |
| dict of name to any of the above               | keyword arguments                          |
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from trocar._narrow import Wire, narrowed
from trocar._tensors import WIRE_DTYPES, as_numpy, flat_bytes, is_array, to_wire
from trocar.errors import EmptyBatchError
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, TensorSpec


class PilImage(Protocol):
    """What is used of a `PIL.Image.Image`."""

    def convert(self, mode: str, /) -> Any:
        """Return the image in another mode."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height) in pixels."""
        ...


class ArrayLike(Protocol):
    """An array or tensor of any library that NumPy can read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of each dimension."""
        ...


ImageLike: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | PilImage | ArrayLike
Argument: TypeAlias = ArrayLike | ImageLike | Sequence[ImageLike]
Inputs: TypeAlias = Argument | tuple[ArrayLike, ...] | Mapping[str, Argument]
WireInputs: TypeAlias = tuple[list[pb.Input], list[memoryview]]

_ACCEPTED = (
    "an array or tensor, a path, encoded bytes, a PIL image, a list of these, "
    "a tuple of arrays (positional arguments) or a dict (keyword arguments)"
)


def wire_inputs(inputs: object, wire: Wire | None = None) -> WireInputs:
    """Convert inputs to wire arguments and, in their order, the payloads.

    Payloads are views of the caller's arrays where these are contiguous.

    Args:
        inputs: What a caller passed.
        wire: What float32 arrays travel as; as they are when None.

    Raises:
        EmptyBatchError: A list, or a batch of images, is empty.
        FileNotFoundError: A path leads nowhere.
        TypeError: Something of a kind or dtype that cannot be sent.
        ValueError: Arrays of one list differ in shape, or an array has more than 8 dimensions.
    """
    arguments: list[pb.Input] = []
    payloads: list[memoryview] = []
    for name, value in _arguments(inputs):
        argument, parts = _argument(value, wire)
        argument.name = name
        arguments.append(argument)
        payloads += parts
    return arguments, payloads


def _arguments(inputs: object) -> list[tuple[str, object]]:
    if inputs is None:
        return []
    if isinstance(inputs, Mapping):
        values = list(inputs.items())
    elif isinstance(inputs, tuple) and all(is_array(item) and not is_pil(item) for item in inputs):
        values = [("", item) for item in inputs]
    else:
        values = [("", inputs)]
    if not values:
        raise EmptyBatchError("the inputs are empty; pass at least one argument")
    return values


def _argument(value: object, wire: Wire | None) -> tuple[pb.Input, list[memoryview]]:
    if isinstance(value, (list, tuple)):
        if not value:
            raise EmptyBatchError("the list of inputs is empty; pass at least one image or array")
        if not all(is_image(item) for item in value):
            return _tensor(_stack(value), wire)
        return _images(value)
    if is_image(value):
        return _images([value])
    if is_array(value) and _is_pixels(value, rank=4):
        return _images(list(as_numpy(value)))
    return _tensor(value, wire)


def _tensor(value: object, wire: Wire | None) -> tuple[pb.Input, list[memoryview]]:
    if not is_array(value):
        raise TypeError(f"{type(value).__name__} cannot be an input; pass {_ACCEPTED}")
    tensor = to_wire(value)
    if wire is not None and tensor.dtype == DTYPE_FLOAT32:
        values = np.frombuffer(tensor.payload, "<f4").reshape(tensor.shape)
        narrow = TensorSpec(dtype=WIRE_DTYPES[wire], shape=tensor.shape)
        return pb.Input(tensor=narrow, convert_to=DTYPE_FLOAT32), [flat_bytes(narrowed(values, wire)).data]
    return pb.Input(tensor=TensorSpec(dtype=tensor.dtype, shape=tensor.shape)), [tensor.payload]


def _stack(arrays: Sequence[object]) -> object:
    for item in arrays:
        if not is_array(item):
            raise TypeError(f"a list with {type(item).__name__} cannot be an input; pass {_ACCEPTED}")
        if is_pil(item):
            raise TypeError("a list holds images beside arrays that are none (uint8, height x width x 3)")
    converted = [as_numpy(item) for item in arrays]
    shapes = sorted({array.shape for array in converted})
    if len(shapes) > 1:
        raise ValueError(f"arrays of one list must have one shape to make a batch, not {shapes}")
    if any("bfloat16" in str(getattr(item, "dtype", "")) for item in arrays):
        raise TypeError("a list of bfloat16 tensors cannot be stacked without torch; pass torch.stack(...)")
    return np.stack(converted)


def _images(images: Sequence[object]) -> tuple[pb.Input, list[memoryview]]:
    if not images:
        raise EmptyBatchError("the batch of images is empty; pass at least one image")
    pairs = [_image(item) for item in images]
    batch = pb.ImageBatch(images=[image for image, _ in pairs])
    return pb.Input(images=batch), [payload for _, payload in pairs]


def _image(value: Any) -> tuple[pb.Image, memoryview]:
    if isinstance(value, (str, os.PathLike)):
        value = Path(value).read_bytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        encoded = memoryview(value).cast("B")
        return pb.Image(encoded_byte_count=encoded.nbytes), encoded
    pixels = np.asarray(value.convert("RGB")) if is_pil(value) else as_numpy(value)
    height, width, _ = pixels.shape
    payload = flat_bytes(np.ascontiguousarray(pixels)).data
    return pb.Image(raw=pb.RawImage(height=height, width=width)), payload


def is_image(value: object) -> bool:
    """Tell whether a value is one image: path, encoded bytes, PIL image or uint8 (H, W, 3)."""
    if isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview)) or is_pil(value):
        return True
    return is_array(value) and _is_pixels(value, rank=3)


def _is_pixels(value: Any, rank: int) -> bool:
    is_uint8 = str(getattr(value, "dtype", "")).removeprefix("torch.") == "uint8"
    return is_uint8 and len(value.shape) == rank and value.shape[-1] == 3


def is_pil(value: object) -> bool:
    """Tell whether a value is a PIL image, without PIL."""
    return hasattr(value, "convert") and hasattr(value, "size") and not isinstance(value, np.ndarray)
