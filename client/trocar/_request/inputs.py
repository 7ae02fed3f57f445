"""Inputs: values that a caller may pass as `inputs`, converted to wire arguments and payloads.

    arguments, payloads = wire_inputs(images)

| passed                                         | becomes                                    |
|------------------------------------------------|--------------------------------------------|
| array or tensor                                | one tensor, as it is                       |
| uint8 array (H, W, 3) or (N, H, W, 3)          | images that the server preprocesses        |
| path, encoded bytes, PIL image                 | a batch of one image                       |
| list of paths, bytes, PIL images, uint8 HW3    | a batch of images; kinds may be mixed      |
| list of arrays of one shape                    | one tensor, stacked: a batch               |
| list of arrays of different shapes, one rank   | a list of samples, which detection takes   |
| tuple of arrays or tensors                     | positional arguments                       |
| text, pair of texts, token ids, a list of these | texts that the server tokenizes; see `texts` |
| `trocar.chat` with images in its messages      | texts, and a batch of images               |
| path of a .wav or .flac file, a list of these  | sound, for the model's feature extractor   |
| dict of name to any of the above               | keyword arguments; also `text` and `images` |
| dict or `tensor_list` as a value of that dict  | a dictionary or a list as one argument      |
| bool or whole number in a dict, `trocar.flag`  | a flag of the model's forward              |
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from trocar._base.call_options import Wire
from trocar._base.delegation import explained
from trocar._base.input_kinds import (
    is_encoded,
    is_image,
    is_path,
    is_pattern,
    is_pil,
    is_pixels,
    is_url,
    refuse_url,
)
from trocar._base.names import few
from trocar._base.rgb import rgb_pixels
from trocar._base.tensors import (
    WIRE_DTYPES,
    Array,
    WireTensor,
    as_numpy,
    flat_bytes,
    is_array,
    named_array,
    named_to_wire,
    to_wire,
)
from trocar._request.narrow import narrowed
from trocar._request.texts import Audio, Texts, TextSample, is_texts, processor_input
from trocar.errors import EmptyBatchError
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, DTYPE_UNSPECIFIED, Dtype, TensorSpec


class PilImage(Protocol):
    """The methods used of a `PIL.Image.Image`."""

    def convert(self, mode: str, /) -> Any:
        """Return the image in another mode."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height) in pixels."""
        ...


@dataclass(frozen=True)
class Flag:
    """An argument that is no tensor; `flag` makes it."""

    value: bool | int | str
    """The value."""


@explained
def flag(value: bool | int | str) -> Flag:
    """Return an argument that is not a tensor, for example a string that is not a text input.

        client.extract("mine", {"x": array, "mode": trocar.flag("fast")}, ["layer"])

    Booleans and whole numbers in a dict of inputs are flags without this function.
    `client.model(NAME).inputs` lists the flags of a model.

    Args:
        value: A boolean, a whole number of 64 bits, or a string.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, (bool, int, str)):
        raise TypeError(f"a flag is a bool, an int or a str, not {type(value).__name__}")
    return Flag(value)


@dataclass(frozen=True, eq=False)
class TensorList:
    """Arrays that are one argument, a list; `tensor_list` makes it."""

    values: tuple[Any, ...]
    """Arrays; or dictionaries or lists of these."""


@explained
def tensor_list(values: Iterable[Any]) -> TensorList:
    """Return arrays as one argument, a list of tensors; a plain list of arrays of one shape becomes a batch.

        client.extract("neck", {"levels": trocar.tensor_list([low, high])}, ["fuse"])

    Each array keeps its own shape and dtype. Dictionaries of arrays may be in it, and it may be in them.

    Raises:
        EmptyBatchError: There are none.
    """
    result = tuple(values)
    if not result:
        raise EmptyBatchError("the list of arrays is empty; pass at least one")
    return TensorList(result)


NO_FLAGS: Mapping[str, bool | int | str] = MappingProxyType({})


def with_flags(inputs: Any, flags: Mapping[str, bool | int | str]) -> Any:
    """Return inputs together with flags of the forward; as they are without any.

    None, the example input of a dry run, becomes the flags alone.
    """
    if not flags:
        return inputs
    result = {name: flag(value) for name, value in flags.items()}
    if inputs is None:
        return result
    return {**(inputs if isinstance(inputs, Mapping) else {"": inputs}), **result}


class ArrayLike(Protocol):
    """An array or tensor of any library that NumPy can read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of each dimension."""
        ...


ImageLike: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | PilImage | ArrayLike
# One `Sequence` alone: between two, type checkers do not infer the type of a list of mixed images.
Argument: TypeAlias = ArrayLike | ImageLike | Texts | Audio | TensorList | Sequence[ImageLike | TextSample]
Nested: TypeAlias = Mapping[str, Any]
"""A dictionary as one argument: of arrays, flags, and further dictionaries and lists."""
Inputs: TypeAlias = Argument | tuple[ArrayLike, ...] | Mapping[str, Argument | Nested | Flag | bool | int]
WireInputs: TypeAlias = tuple[list[pb.Input], list[memoryview]]

_ACCEPTED = (
    "an array or tensor, a path, encoded bytes, a PIL image, a text, token ids, a list of these, "
    "a tuple of arrays (positional arguments) or a dict (keyword arguments)"
)


def wire_inputs(inputs: object, wire: Wire | None = None) -> WireInputs:
    """Convert inputs to wire arguments and, in their order, the payloads.

    Payloads are views of the caller's arrays where these are contiguous.

    Args:
        inputs: The caller's inputs.
        wire: What float32 arrays travel as; as they are when None.

    Raises:
        EmptyBatchError: A list, or a batch of images, is empty.
        FileNotFoundError: A path does not exist.
        TypeError: Something of a kind or dtype that cannot be sent.
        ValueError: Arrays of one list differ in rank, or an array has more than 8 dimensions.
    """
    arguments: list[pb.Input] = []
    payloads: list[memoryview] = []
    leaves = (leaf for given in _arguments(inputs) for leaf in _leaves(*given))
    for name, value in leaves:
        argument, parts = _flag_argument(name, value) or _argument(value, wire)
        argument.name = name
        arguments.append(argument)
        payloads += parts
        if isinstance(value, Texts) and (images := value.own_images):
            argument, parts = _images(images)
            arguments.append(argument)
            payloads += parts
    return arguments, payloads


def _arguments(inputs: object) -> list[tuple[str, object]]:
    if inputs is None:
        return []
    if isinstance(inputs, Mapping):
        values = list(inputs.items())
    elif (
        isinstance(inputs, tuple)
        and not is_texts(inputs)
        and all(is_array(item) and not is_pil(item) for item in inputs)
    ):
        values = [("", item) for item in inputs]
    else:
        values = [("", inputs)]
    if not values:
        raise EmptyBatchError("the inputs are empty; pass at least one argument")
    return values


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield an argument; of a dictionary or a list, what is within it, with the way into it as its name."""
    if not isinstance(value, (Mapping, TensorList)):
        yield name, value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value.values)
    if not items:
        raise EmptyBatchError(f"the dictionary '{name}' is empty; pass at least one array in it")
    for key, item in items:
        if isinstance(value, Mapping) and not isinstance(key, str):
            raise TypeError(f"the dictionary '{name}' has the key {key!r}; keys are strings")
        yield from _leaves(f"{name}[{json.dumps(key, ensure_ascii=False)}]", item)


def _flag_argument(name: str, value: object) -> tuple[pb.Input, list[memoryview]] | None:
    """Return the argument of a flag; None for what is none."""
    if not name or not isinstance(value, (Flag, bool, int)):
        return None
    given = value.value if isinstance(value, Flag) else value
    if isinstance(given, bool):
        return pb.Input(flag=pb.Flag(boolean=given)), []
    if isinstance(given, str):
        return pb.Input(flag=pb.Flag(text=given)), []
    if not -(2**63) <= given < 2**63:
        raise ValueError(f"the flag '{name}' is {given}, and a whole number of 64 bits is expected")
    return pb.Input(flag=pb.Flag(integer=given)), []


def _argument(value: object, wire: Wire | None) -> tuple[pb.Input, list[memoryview]]:
    if type(value) is np.ndarray and value.dtype != np.uint8:
        return _tensor(value, wire)
    if (processed := processor_input(value)) is not None:
        return processed.to_wire()
    if isinstance(value, (list, tuple)):
        if not value:
            raise EmptyBatchError("the list of inputs is empty; pass at least one image or array")
        if empty := [place for place, item in enumerate(value) if isinstance(item, list) and not item]:
            raise EmptyBatchError(f"entry {empty[0]} of the list is empty; a text has at least one token")
        if not all(is_image(item) for item in value):
            return _listed(value, wire)
        return _images(value)
    if is_image(value):
        return _images([value])
    if is_array(value) and is_pixels(value, ranks=(4,)):
        return _images(list(as_numpy(value)))
    return _tensor(value, wire)


def _tensor(value: object, wire: Wire | None) -> tuple[pb.Input, list[memoryview]]:
    if not is_array(value):
        raise TypeError(_not_an_input(value))
    tensor = to_wire(value)
    sent = _as_sent(tensor, wire)
    return pb.Input(tensor=_spec(sent), convert_to=_convert_to(tensor, sent)), [sent.payload]


def _not_an_input(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, (Iterator, Set, ValuesView)):
        return (
            f"a {kind} cannot be an input: write list(...) for one batch; client.extract_stream takes "
            "batches one after the other"
        )
    if value is None:
        return f"None cannot be an input; pass {_ACCEPTED}"
    return f"{kind} cannot be an input; pass {_ACCEPTED}"


def _spec(tensor: WireTensor) -> TensorSpec:
    return TensorSpec(dtype=tensor.dtype, shape=tensor.shape)


def _as_sent(tensor: WireTensor, wire: Wire | None) -> WireTensor:
    """Return the tensor to send: float32 narrowed, if requested."""
    if wire is None or tensor.dtype != DTYPE_FLOAT32:
        return tensor
    values = np.frombuffer(tensor.payload, "<f4").reshape(tensor.shape)
    return WireTensor(WIRE_DTYPES[wire], tensor.shape, flat_bytes(narrowed(values, wire)).data)


def _convert_to(tensor: WireTensor, sent: WireTensor) -> Dtype.ValueType:
    return DTYPE_UNSPECIFIED if tensor.dtype == sent.dtype else tensor.dtype


def _listed(items: Sequence[object], wire: Wire | None) -> tuple[pb.Input, list[memoryview]]:
    """Stack arrays of one shape to a batch; leave others as the list that they are."""
    result = _named_arrays(items)
    names = list(dict.fromkeys(name for _, name in result))
    if len(names) > 1:
        raise TypeError(
            f"arrays of one list must have one dtype, not {few(names)}; convert them, "
            f'`[array.astype("{names[0]}") for array in arrays]`'
        )
    shapes = list(dict.fromkeys(array.shape for array, _ in result))
    if len(shapes) == 1:
        tensors = [named_to_wire(np.stack([array for array, _ in result]), names[0])]
    elif len({len(shape) for shape in shapes}) == 1:
        tensors = [named_to_wire(array, name) for array, name in result]
    else:
        raise ValueError(
            f"arrays of one list must have one shape to make a batch, or one rank to be samples of different "
            f"sizes, not {few(shapes)}"
        )
    sent = [_as_sent(tensor, wire) for tensor in tensors]
    argument = pb.Input(convert_to=_convert_to(tensors[0], sent[0]))
    if len(shapes) == 1:
        argument.tensor.CopyFrom(_spec(sent[0]))
    else:
        argument.tensors.tensors.extend(map(_spec, sent))
    return argument, [tensor.payload for tensor in sent]


def _named_arrays(arrays: Sequence[object]) -> list[tuple[Array, str]]:
    for item in arrays:
        if not is_array(item):
            kind = "None" if item is None else type(item).__name__
            raise TypeError(f"a list with {kind} cannot be an input; pass {_ACCEPTED}")
        if is_pil(item):
            raise TypeError("a list mixes images with arrays that are not images (uint8, height x width x 3)")
    return [named_array(item) for item in arrays]


def _images(images: Sequence[object]) -> tuple[pb.Input, list[memoryview]]:
    if not images:
        raise EmptyBatchError("the batch of images is empty; pass at least one image")
    pairs = [_image(item) for item in images]
    batch = pb.ImageBatch(images=[image for image, _ in pairs])
    return pb.Input(images=batch), [payload for _, payload in pairs]


def _image(value: Any) -> tuple[pb.Image, memoryview]:
    if is_path(value):
        value = _read(value)
    if is_encoded(value):
        encoded = memoryview(value).cast("B")
        return pb.Image(encoded_byte_count=encoded.nbytes), encoded
    pixels = rgb_pixels(value) if is_pil(value) else as_numpy(value)
    height, width, _ = pixels.shape
    payload = flat_bytes(np.ascontiguousarray(pixels)).data
    return pb.Image(raw=pb.RawImage(height=height, width=width)), payload


def _read(given: str | os.PathLike[str]) -> bytes:
    if is_url(given):
        refuse_url(given)
    path = Path(given)
    if is_pattern(given):
        raise FileNotFoundError(
            2,
            f"A pattern where files are expected: write `sorted(glob.glob({os.fspath(given)!r}))` for one "
            "pass, or pass it to an analysis such as client.predict, which batches",
            os.fspath(given),
        )
    try:
        return path.read_bytes()
    except IsADirectoryError as error:
        hint = (
            "A folder where a file is expected: write "
            f"`sorted(pathlib.Path({os.fspath(given)!r}).glob('*.jpg'))` for one pass, or pass it "
            "to an analysis such as client.predict, or to trocar.extract_dataset, which batch; for a text "
            "write trocar.texts(...)"
        )
        raise IsADirectoryError(error.errno, hint, str(path)) from None
    except FileNotFoundError as error:
        hint = "No such file; for a text write trocar.texts(...)"
        raise FileNotFoundError(error.errno, hint, str(path)) from None
