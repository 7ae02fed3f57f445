"""Inference tensors: from the inputs of a request to the arguments of a forward and their bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.request.plan import ArgumentInput, ImageInput, ImageSpec, Payload, TensorInput
from trocar_server.models import HostedModel
from trocar_server.models.inputs import IMAGES
from trocar_server.processing.inputs import TextInput, check_characters
from trocar_server.rpc.codec.fields import check_batch, invalid
from trocar_server.rpc.codec.inputs import check_argument_count, check_request_bytes
from trocar_server.rpc.codec.wire_dtypes import tensor_byte_count
from trocar_server.rpc.oip.argument_names import arranged
from trocar_server.rpc.oip.datatypes import BYTES, Datatype, datatype_named
from trocar_server.rpc.oip.inference_texts import check_texts, is_texts, text_input
from trocar_server.rpc.oip.request_parameters import check_input_parameters

_LENGTH_BYTES = 4
_ELEMENTS_AT_ONCE = 1 << 14
_WIDEST = {"b": np.bool_, "f": np.float64, "i": np.int64, "u": np.uint64}


@dataclass(frozen=True)
class ReadInputs:
    """The inputs of a request.

    Attributes:
        inputs: The arguments in the order of the call.
        payloads: Those of each, one after another.
        texts: What the model's tokenizer turns into further arguments.
    """

    inputs: tuple[ArgumentInput, ...]
    payloads: list[Payload]
    texts: tuple[TextInput, ...]


def read_inputs(request: Any, raw: Sequence[memoryview], hosted: HostedModel, limits: Limits) -> ReadInputs:
    """Return the arguments, the payloads and the texts.

    Args:
        request: A `ModelInferRequest` without its `raw_input_contents`.
        raw: Its `raw_input_contents`.
        hosted: The model that it is for.
        limits: What a call may not exceed.

    Raises:
        ServiceError: With the field named.
    """
    check_argument_count(len(request.inputs))
    _check_raw(request, len(raw))
    texts: list[TextInput] = []
    left: dict[int, str] = {}
    for index, entry in enumerate(request.inputs):
        if is_texts(entry.name, entry.datatype):
            texts.append(_texts(f"inputs[{index}]", entry, raw[index] if raw else None, limits))
        else:
            left[index] = _own_name(hosted, entry)
    indices = list(left)
    inputs: list[ArgumentInput] = []
    payloads: list[Payload] = []
    for position, keyword in arranged(hosted.spec.model_id, hosted.module, list(left.values())):
        index = indices[position]
        entry = request.inputs[index]
        argument, own = _argument(f"inputs[{index}]", keyword, entry, raw[index] if raw else None, limits)
        inputs.append(argument)
        payloads += own
    check_texts(texts)
    check_characters(texts, limits)
    check_request_bytes([payload.nbytes for payload in payloads], limits)
    return ReadInputs(tuple(inputs), payloads, tuple(texts))


def _own_name(hosted: HostedModel, entry: Any) -> str:
    """Return the name of the model's argument: of images that are called `images`, its input for images."""
    signature = hosted.known_signature
    if entry.datatype != BYTES or signature is None or signature.image_channels is None:
        return str(entry.name)
    return IMAGES if entry.name in ("images", "image") else str(entry.name)


def _check_raw(request: Any, given: int) -> None:
    """Refuse a request whose bytes are given twice, or not for each input."""
    for index, entry in enumerate(request.inputs):
        check_input_parameters(f"inputs[{index}].parameters", entry.parameters)
        if given and entry.HasField("contents"):
            raise invalid(
                f"inputs[{index}].contents",
                "is set together with raw_input_contents; put the elements in one of them",
            )
    due = len(request.inputs)
    if given not in (0, due):
        raise invalid(
            "raw_input_contents", f"{given} entries for {due} inputs; expected one for each, or none"
        )


def _argument(
    field: str, keyword: str, entry: Any, raw: memoryview | None, limits: Limits
) -> tuple[ArgumentInput, list[Payload]]:
    shape = tuple(entry.shape)
    if entry.datatype == BYTES:
        return _images(field, keyword, shape, entry, raw, limits)
    datatype = datatype_named(f"{field}.datatype", entry.datatype)
    byte_count = tensor_byte_count(f"{field}.shape", shape, datatype.dtype.itemsize)
    if raw is None:
        payload = _typed(f"{field}.contents", entry, datatype, math.prod(shape))
    else:
        _check_bytes(field, entry, len(raw), byte_count)
        payload = np.frombuffer(raw, np.uint8).copy()  # torch must own the memory that it views
    if datatype.name == "BOOL" and payload.size and payload.max() > 1:
        raise invalid(field, "a BOOL is one byte, 0 or 1", ErrorReason.INVALID_TENSOR)
    if shape:
        check_batch(f"{field}.shape", shape[0], limits)
    return TensorInput(keyword, datatype.dtype, shape), [payload]


def _check_bytes(field: str, entry: Any, given: int, due: int) -> None:
    if given != due:
        raise invalid(
            f"{field}.shape",
            f"{entry.datatype} of shape {list(entry.shape)} is {due:,} bytes, but {given:,} were received",
            ErrorReason.INVALID_TENSOR,
        )


def _typed(field: str, entry: Any, datatype: Datatype, due: int) -> Payload:
    """Bytes of elements that were sent as numbers."""
    if datatype.contents is None:
        raise invalid(field, f"has no field for {datatype.name}; send it in raw_input_contents")
    elements = _elements(field, entry, datatype.contents, due)
    values: NDArray[Any] = np.empty(due, _WIDEST[datatype.numpy.kind])
    for start in range(0, due, _ELEMENTS_AT_ONCE):  # other threads run between the steps
        values[start : start + _ELEMENTS_AT_ONCE] = elements[start : start + _ELEMENTS_AT_ONCE]
    if datatype.numpy.kind in "iu" and values.size:
        info = np.iinfo(datatype.name.lower())
        if not (int(values.min()) >= info.min and int(values.max()) <= info.max):
            raise invalid(field, f"a number is outside of {datatype.name}", ErrorReason.INVALID_TENSOR)
    return np.ascontiguousarray(values.astype(datatype.numpy)).reshape(-1).view(np.uint8)


def _elements(field: str, entry: Any, wanted: str, due: int) -> Any:
    """Return the elements, all of which are in one field."""
    for descriptor, _ in entry.contents.ListFields():
        if descriptor.name != wanted:
            raise invalid(f"{field}.{descriptor.name}", f"elements of {entry.datatype} belong into {wanted}")
    elements = getattr(entry.contents, wanted)
    if len(elements) != due:
        raise invalid(
            f"{field}.{wanted}",
            f"{len(elements):,} elements, shape {list(entry.shape)} has {due:,}",
            ErrorReason.INVALID_TENSOR,
        )
    return elements


def _images(
    field: str, keyword: str, shape: tuple[int, ...], entry: Any, raw: memoryview | None, limits: Limits
) -> tuple[ArgumentInput, list[Payload]]:
    """Read encoded images, which the server prepares as the model's weights say."""
    if len(shape) != 1:
        raise invalid(f"{field}.shape", f"{BYTES} are images, of shape [count]", ErrorReason.INVALID_TENSOR)
    tensor_byte_count(f"{field}.shape", shape, 1)
    images = _byte_strings(field, "images", shape, entry, raw, limits)
    for index, image in enumerate(images):
        if not image:
            raise invalid(field, f"image {index} has no bytes", ErrorReason.INVALID_IMAGE)
    payloads = [np.frombuffer(image, np.uint8).copy() for image in images]
    return ImageInput(keyword, tuple(ImageSpec(payload.nbytes) for payload in payloads)), payloads


def _texts(field: str, entry: Any, raw: memoryview | None, limits: Limits) -> TextInput:
    shape = tuple(entry.shape)
    if len(shape) not in (1, 2) or shape[1:] not in ((), (1,), (2,)):
        raise invalid(
            f"{field}.shape",
            "texts have shape [count] or [count, 1], and pairs of texts [count, 2]",
            ErrorReason.INVALID_TENSOR,
        )
    tensor_byte_count(f"{field}.shape", shape, 1)
    return text_input(field, shape, _byte_strings(field, "texts", shape, entry, raw, limits))


def _byte_strings(
    field: str, what: str, shape: tuple[int, ...], entry: Any, raw: memoryview | None, limits: Limits
) -> list[Any]:
    """Return strings of bytes, as many as the shape says, from typed contents or from raw ones."""
    check_batch(f"{field}.shape", shape[0], limits)
    due = math.prod(shape)
    if raw is None:
        byte_strings = list(_elements(f"{field}.contents", entry, "bytes_contents", due))
    else:
        byte_strings = list(islice(_strings(field, raw), due + 1))
    if len(byte_strings) != due:
        received = "more" if len(byte_strings) > due else f"{len(byte_strings):,}"
        raise invalid(
            f"{field}.shape", f"{due:,} {what} expected, {received} received", ErrorReason.INVALID_TENSOR
        )
    return byte_strings


def _strings(field: str, raw: memoryview) -> Iterator[memoryview]:
    """Yield strings of bytes, each after its length as four little-endian bytes."""
    position = 0
    while position < len(raw):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(raw[position:start], "little")
        if end > len(raw):
            raise invalid(field, "the bytes end in the middle of a string", ErrorReason.INVALID_TENSOR)
        yield raw[start:end]
        position = end
