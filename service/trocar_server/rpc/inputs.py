"""From `Input` messages to the arguments of a forward, with the bytes of each of their payloads."""

import math
from collections.abc import Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_server.config import Limits
from trocar_server.engine.plan import ArgumentInput, ImageForm, ImageInput, TensorInput
from trocar_server.errors import ServiceError
from trocar_server.rpc.dtypes import from_wire
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.payloads import tensor_byte_count

_MAX_ARGUMENTS = 64


def to_inputs(
    entries: Sequence[pb.Input], limits: Limits, field: str = "inputs"
) -> tuple[tuple[ArgumentInput, ...], list[int]]:
    """Convert and check the arguments of one forward, and return them with the bytes of each payload.

    Args:
        entries: One message for each argument.
        limits: What a call may not exceed.
        field: The name of the arguments in errors.

    Raises:
        ServiceError: With the field named.
    """
    check_argument_count(len(entries), field)
    byte_counts: list[int] = []
    inputs = tuple(_input(f"{field}[{i}]", entry, limits, byte_counts) for i, entry in enumerate(entries))
    _check_names(field, inputs)
    check_request_bytes(byte_counts, limits)
    check_request_bytes([_converted_bytes(entry) for entry in inputs], limits)
    return inputs, byte_counts


def check_request_bytes(byte_counts: Sequence[int], limits: Limits) -> None:
    """Refuse inputs that are too large together.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    total = sum(byte_counts)
    if total > limits.max_request_bytes:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the inputs are {total:,} bytes, the limit is {limits.max_request_bytes:,}; "
            "send a smaller batch",
            byte_count=str(total),
            limit=str(limits.max_request_bytes),
        )


def _input(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> ArgumentInput:
    if len(entry.name) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.name", f"over {MAX_TEXT_CHARACTERS} characters")
    kind = entry.WhichOneof("value")
    if kind == "tensor":
        given = tensor_input(f"{field}.tensor", entry.name, entry.tensor, limits, byte_counts)
        return _converted(f"{field}.convert_to", given, entry.convert_to)
    if entry.convert_to:
        raise invalid(f"{field}.convert_to", "is for tensors; images are preprocessed")
    if kind == "images":
        return _image_input(f"{field}.images", entry, limits, byte_counts)
    raise invalid(field, "needs a tensor or images")


def _converted(field: str, given: TensorInput, wanted: tensor_pb2.Dtype.ValueType) -> TensorInput:
    if not wanted:
        return given
    dtype = from_wire(field, wanted)
    if not (given.dtype.is_floating_point and dtype.is_floating_point):
        raise invalid(field, "floats are converted to floats, and nothing else")
    return replace(given, convert_to=dtype)


def _converted_bytes(entry: ArgumentInput) -> int:
    """Return the bytes of a tensor as the model sees it."""
    return math.prod(entry.shape) * entry.model_dtype.itemsize if isinstance(entry, TensorInput) else 0


def check_argument_count(count: int, field: str = "inputs") -> None:
    """Check how many arguments a forward gets.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there are none or too many.
    """
    if not 1 <= count <= _MAX_ARGUMENTS:
        raise invalid(field, f"{count} given; 1 to {_MAX_ARGUMENTS} are allowed")


def tensor_input(
    field: str, name: str, spec: tensor_pb2.TensorSpec, limits: Limits, byte_counts: list[int]
) -> TensorInput:
    """Check one tensor's description and append its bytes."""
    dtype, shape = from_wire(field, spec.dtype), tuple(spec.shape)
    byte_counts.append(tensor_byte_count(field, shape, dtype.itemsize))
    if shape:
        check_batch(field, shape[0], limits)
    return TensorInput(name, dtype, shape)


def _image_input(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> ImageInput:
    check_batch(field, len(entry.images.images), limits)
    forms = tuple(_image(f"{field}[{i}]", image, limits) for i, image in enumerate(entry.images.images))
    byte_counts.extend(form.byte_count for form in forms)
    return ImageInput(entry.name, forms)


def _image(field: str, image: pb.Image, limits: Limits) -> ImageForm:
    kind = image.WhichOneof("form")
    if kind == "raw":
        height, width = image.raw.height, image.raw.width
        if height < 1 or width < 1:
            raise invalid(field, f"an image of {height} x {width} pixels", ErrorReason.INVALID_IMAGE)
        if height * width > limits.max_image_pixels:
            raise invalid(
                field,
                f"{height * width:,} pixels, the limit is {limits.max_image_pixels:,}",
                ErrorReason.IMAGE_TOO_LARGE,
            )
        return ImageForm(height * width * 3, height, width)
    if kind == "encoded_byte_count" and image.encoded_byte_count > 0:
        return ImageForm(image.encoded_byte_count)
    raise invalid(field, "has no bytes", ErrorReason.INVALID_IMAGE)


def check_batch(field: str, size: int, limits: Limits) -> None:
    """Check the number of samples.

    Raises:
        ServiceError: `EMPTY_BATCH` or `REQUEST_TOO_LARGE`, with the field named.
    """
    if size == 0:
        raise invalid(field, "the batch has no sample", ErrorReason.EMPTY_BATCH)
    if size > limits.max_batch:
        raise invalid(
            field, f"{size} samples, the limit is {limits.max_batch}", ErrorReason.REQUEST_TOO_LARGE
        )


def _check_names(field: str, inputs: Sequence[ArgumentInput]) -> None:
    names = [entry.name for entry in inputs]
    keywords = [name for name in names if name]
    if any(not name for name in names[len(names) - len(keywords) :]):
        raise invalid(field, "positional arguments come before keyword arguments")
    if len(set(keywords)) != len(keywords):
        raise invalid(field, "a keyword is given twice")
