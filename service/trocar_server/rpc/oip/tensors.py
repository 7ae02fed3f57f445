"""From the inputs of a request to the arguments of a forward and their bytes."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.plan import ArgumentInput, ImageForm, ImageInput, Payload, TensorInput
from trocar_server.models import HostedModel
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.inputs import check_argument_count, check_batch, check_request_bytes
from trocar_server.rpc.oip.arguments import arranged
from trocar_server.rpc.oip.datatypes import IMAGES, Datatype, datatype_named
from trocar_server.rpc.oip.parameters import check_input_parameters
from trocar_server.rpc.payloads import tensor_byte_count

_LENGTH_BYTES = 4
_ELEMENTS_AT_ONCE = 1 << 14
_WIDEST = {"b": np.bool_, "f": np.float64, "i": np.int64, "u": np.uint64}


def read_inputs(
    request: Any, raw: Sequence[memoryview], hosted: HostedModel, limits: Limits
) -> tuple[tuple[ArgumentInput, ...], list[Payload]]:
    """Return the arguments in the order of the call, and the payloads of each, one after another.

    Args:
        request: A `ModelInferRequest` without its `raw_input_contents`.
        raw: These.
        hosted: The model that it is for.
        limits: What a call may not exceed.

    Raises:
        ServiceError: With the field named.
    """
    check_argument_count(len(request.inputs))
    _check_raw(request, len(raw))
    order = arranged(hosted.spec.model_id, hosted.module, [entry.name for entry in request.inputs])
    inputs: list[ArgumentInput] = []
    payloads: list[Payload] = []
    for index, keyword in order:
        entry = request.inputs[index]
        argument, own = _argument(f"inputs[{index}]", keyword, entry, raw[index] if raw else None, limits)
        inputs.append(argument)
        payloads += own
    check_request_bytes([payload.nbytes for payload in payloads], limits)
    return tuple(inputs), payloads


def _check_raw(request: Any, given: int) -> None:
    """Refuse a request whose bytes are given twice, or not for each input."""
    for index, entry in enumerate(request.inputs):
        check_input_parameters(f"inputs[{index}].parameters", entry.parameters)
        if given and entry.HasField("contents"):
            raise invalid(
                f"inputs[{index}].contents", "comes with raw_input_contents; give the elements in one of them"
            )
    due = len(request.inputs)
    if given not in (0, due):
        raise invalid("raw_input_contents", f"{given} entries for {due} inputs; one for each is due, or none")


def _argument(
    field: str, keyword: str, entry: Any, raw: memoryview | None, limits: Limits
) -> tuple[ArgumentInput, list[Payload]]:
    shape = tuple(entry.shape)
    if entry.datatype == IMAGES:
        return _images(field, keyword, shape, entry, raw, limits)
    datatype = datatype_named(f"{field}.datatype", entry.datatype)
    byte_count = tensor_byte_count(f"{field}.shape", shape, datatype.dtype.itemsize)
    if raw is None:
        payload = _typed(f"{field}.contents", entry, datatype, math.prod(shape))
    else:
        _check_bytes(field, entry, len(raw), byte_count)
        payload = np.frombuffer(raw, np.uint8).copy()  # torch wants to own what it views
    if datatype.dtype is torch.bool and payload.size and payload.max() > 1:
        raise invalid(field, "a BOOL is one byte, 0 or 1", ErrorReason.INVALID_TENSOR)
    if shape:
        check_batch(f"{field}.shape", shape[0], limits)
    return TensorInput(keyword, datatype.dtype, shape), [payload]


def _check_bytes(field: str, entry: Any, given: int, due: int) -> None:
    if given != due:
        raise invalid(
            f"{field}.shape",
            f"{entry.datatype} of shape {list(entry.shape)} is {due:,} bytes, {given:,} came",
            ErrorReason.INVALID_TENSOR,
        )


def _typed(field: str, entry: Any, datatype: Datatype, due: int) -> Payload:
    """Return the bytes of elements that came as numbers."""
    if datatype.contents is None:
        raise invalid(field, f"has no field for {datatype.name}; send it in raw_input_contents")
    elements = _elements(field, entry, datatype.contents, due)
    values: NDArray[Any] = np.empty(due, _WIDEST[datatype.numpy.kind])
    for start in range(0, due, _ELEMENTS_AT_ONCE):  # between which other threads have their turn
        values[start : start + _ELEMENTS_AT_ONCE] = elements[start : start + _ELEMENTS_AT_ONCE]
    if datatype.numpy.kind in "iu" and values.size:
        info = torch.iinfo(datatype.dtype)
        if not (int(values.min()) >= info.min and int(values.max()) <= info.max):
            raise invalid(field, f"a number is outside of {datatype.name}", ErrorReason.INVALID_TENSOR)
    return np.ascontiguousarray(values.astype(datatype.numpy)).reshape(-1).view(np.uint8)


def _elements(field: str, entry: Any, wanted: str, due: int) -> Any:
    """Return the elements, all of which are in one field."""
    for descriptor, _ in entry.contents.ListFields():
        if descriptor.name != wanted:
            raise invalid(f"{field}.{descriptor.name}", f"{entry.datatype} goes into {wanted}")
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
        raise invalid(f"{field}.shape", f"{IMAGES} are images, of shape [count]", ErrorReason.INVALID_TENSOR)
    tensor_byte_count(f"{field}.shape", shape, 1)
    check_batch(f"{field}.shape", shape[0], limits)
    if raw is None:
        images = list(_elements(f"{field}.contents", entry, "bytes_contents", shape[0]))
    else:
        images = list(islice(_strings(field, raw), shape[0] + 1))
    if len(images) != shape[0]:
        came = "more" if len(images) > shape[0] else f"{len(images):,}"
        raise invalid(f"{field}.shape", f"{shape[0]:,} images, {came} came", ErrorReason.INVALID_TENSOR)
    for index, image in enumerate(images):
        if not image:
            raise invalid(field, f"image {index} has no bytes", ErrorReason.INVALID_IMAGE)
    payloads = [np.frombuffer(image, np.uint8).copy() for image in images]
    return ImageInput(keyword, tuple(ImageForm(payload.nbytes) for payload in payloads)), payloads


def _strings(field: str, raw: memoryview) -> Iterator[memoryview]:
    """Yield strings of bytes, each after its length as four little-endian bytes."""
    position = 0
    while position < len(raw):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(raw[position:start], "little")
        if end > len(raw):
            raise invalid(field, "the bytes end inside a string", ErrorReason.INVALID_TENSOR)
        yield raw[start:end]
        position = end
