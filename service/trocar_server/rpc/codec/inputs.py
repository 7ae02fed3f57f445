"""Codec of inputs: messages to the arguments of forwards, with the bytes of each payload."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_server.config import Limits
from trocar_server.engine.request.plan import (
    ArgumentInput,
    FlagInput,
    ImageInput,
    ImageSpec,
    MadeInput,
    SourceInputs,
    TensorInput,
    TensorListInput,
)
from trocar_server.errors import ServiceError
from trocar_server.nested_names import nested
from trocar_server.processing.inputs import ProcessorInput, check_characters
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_batch, invalid
from trocar_server.rpc.codec.processor_inputs import PROCESSED_KINDS, to_processor_input
from trocar_server.rpc.codec.wire_dtypes import from_wire, tensor_byte_count

_MAX_ARGUMENTS = 64
_MAX_SOURCES = 8
_Tensors = TypeVar("_Tensors", TensorInput, TensorListInput)


def to_inputs(
    entries: Sequence[pb.Input],
    limits: Limits,
    unprocessed: list[ProcessorInput],
    field: str = "inputs",
) -> tuple[tuple[ArgumentInput, ...], list[int]]:
    """Convert and check the arguments of one forward, and return them with the bytes of each payload.

    Args:
        entries: One message for each argument.
        limits: What a call may not exceed.
        unprocessed: Takes those that the model's processor turns into arguments.
        field: The name of the arguments in errors.

    Raises:
        ServiceError: With the field named.
    """
    check_argument_count(len(entries), field)
    byte_counts: list[int] = []
    result: list[ArgumentInput] = []
    for i, entry in enumerate(entries):
        if entry.WhichOneof("value") in PROCESSED_KINDS:
            unprocessed.append(to_processor_input(f"{field}[{i}]", entry, limits, byte_counts))
        else:
            result.append(_input(f"{field}[{i}]", entry, limits, byte_counts))
    # Flags last: the first argument tells the batch, and they have no payloads.
    inputs = tuple(sorted(result, key=lambda entry: isinstance(entry, FlagInput)))
    _check_names(field, inputs)
    check_characters(unprocessed, limits)
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
    if kind == "tensors":
        listed = _tensor_list(f"{field}.tensors", entry, limits, byte_counts)
        return _converted(f"{field}.convert_to", listed, entry.convert_to)
    if entry.convert_to:
        raise invalid(f"{field}.convert_to", "applies to tensors only; leave it out for images")
    if kind == "images":
        return _image_input(f"{field}.images", entry, limits, byte_counts)
    if kind == "flag":
        return _flag(f"{field}.flag", entry)
    raise invalid(field, "needs a tensor, tensors, images, texts, sound or a flag")


def _flag(field: str, entry: pb.Input) -> FlagInput:
    if not entry.name:
        raise invalid(field, "needs a name: that of the model's argument")
    kind = entry.flag.WhichOneof("value")
    if kind is None:
        raise invalid(field, "has no value")
    if len(entry.flag.text) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.text", f"over {MAX_TEXT_CHARACTERS} characters")
    return FlagInput(entry.name, getattr(entry.flag, kind))


def _tensor_list(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> TensorListInput:
    specs = entry.tensors.tensors
    check_batch(field, len(specs), limits)
    dtypes = {spec.dtype for spec in specs}
    if len(dtypes) > 1:
        raise invalid(
            field,
            "the tensors of a list have different dtypes; convert them to one",
            ErrorReason.INVALID_TENSOR,
        )
    dtype, shapes = from_wire(field, dtypes.pop()), tuple(tuple(spec.shape) for spec in specs)
    for index, shape in enumerate(shapes):
        byte_counts.append(tensor_byte_count(f"{field}[{index}]", shape, dtype.itemsize))
    return TensorListInput(entry.name, dtype, shapes)


def _converted(field: str, given: _Tensors, wanted: tensor_pb2.Dtype.ValueType) -> _Tensors:
    if not wanted:
        return given
    dtype = from_wire(field, wanted)
    if not (given.dtype.is_floating_point and dtype.is_floating_point):
        raise invalid(field, "only floats can be converted, and only to another dtype of floats")
    return replace(given, convert_to=dtype)


def _converted_bytes(entry: ArgumentInput) -> int:
    """Byte count of tensors as converted for the model."""
    if isinstance(entry, (ImageInput, FlagInput, MadeInput)):
        return 0
    shapes = (entry.shape,) if isinstance(entry, TensorInput) else entry.shapes
    return sum(map(math.prod, shapes)) * entry.model_dtype.itemsize


def check_argument_count(count: int, field: str = "inputs") -> None:
    """Check the number of arguments of a forward.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there are none or too many.
    """
    if count == 0:
        raise invalid(
            field, "none given (None); pass for example an array of (batch, channels, height, width)"
        )
    if count > _MAX_ARGUMENTS:
        raise invalid(field, f"{count} given; at most {_MAX_ARGUMENTS} are possible")


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
    image_specs = tuple(_image(f"{field}[{i}]", image, limits) for i, image in enumerate(entry.images.images))
    byte_counts.extend(image_spec.byte_count for image_spec in image_specs)
    return ImageInput(entry.name, image_specs)


def _image(field: str, image: pb.Image, limits: Limits) -> ImageSpec:
    kind = image.WhichOneof("form")
    if kind == "raw":
        height, width = _size(field, image.raw, limits)
        return ImageSpec(height * width * 3, height, width)
    if kind == "encoded_byte_count" and image.encoded_byte_count > 0:
        return ImageSpec(image.encoded_byte_count, encoded_size=_encoded_size(field, image, limits))
    raise invalid(field, "has no bytes", ErrorReason.INVALID_IMAGE)


def _encoded_size(field: str, image: pb.Image, limits: Limits) -> tuple[int, int] | None:
    return _size(field, image.encoded_size, limits) if image.HasField("encoded_size") else None


def _size(field: str, size: pb.RawImage, limits: Limits) -> tuple[int, int]:
    height, width = size.height, size.width
    if height < 1 or width < 1:
        raise invalid(field, f"an image of {height} x {width} pixels", ErrorReason.INVALID_IMAGE)
    if height * width > limits.max_image_pixels:
        raise invalid(
            field,
            f"{height * width:,} pixels, the limit is {limits.max_image_pixels:,}",
            ErrorReason.IMAGE_TOO_LARGE,
        )
    return height, width


def _check_names(field: str, inputs: Sequence[ArgumentInput]) -> None:
    names = [entry.name for entry in inputs]
    keywords = [name for name in names if name]
    try:
        nested(names, names)
    except ValueError as error:
        raise invalid(field, str(error)) from None
    positional = [not name or name.startswith("[") for name in names]
    if positional != sorted(positional, reverse=True):
        raise invalid(field, "positional arguments come before keyword arguments")
    if len(set(keywords)) != len(keywords):
        raise invalid(field, "a keyword is given twice")


def source_names(messages: Sequence[pb.SourceInputs]) -> list[str]:
    """Check the names of sources and return them.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if len(messages) > _MAX_SOURCES:
        raise invalid("sources", f"{len(messages)} given; at most {_MAX_SOURCES} are allowed")
    names: list[str] = []
    for i, message in enumerate(messages):
        if not 1 <= len(message.name) <= MAX_TEXT_CHARACTERS:
            raise invalid(f"sources[{i}].name", f"1 to {MAX_TEXT_CHARACTERS} characters are needed")
        if message.name in names:
            raise invalid(f"sources[{i}].name", f"'{message.name[:80]}' is given twice; names are unique")
        names.append(message.name)
    return names


def to_sources(
    messages: Sequence[pb.SourceInputs], limits: Limits, *, needs_inputs: bool
) -> tuple[tuple[SourceInputs, ...], list[int]]:
    """Convert and check sources with valid names, and return them with the bytes of each payload.

    Args:
        messages: As received.
        limits: What a call may not exceed.
        needs_inputs: Whether one without inputs is refused.

    Raises:
        ServiceError: With the field named.
    """
    sources: list[SourceInputs] = []
    byte_counts: list[int] = []
    for i, message in enumerate(messages):
        if not (message.inputs or needs_inputs):
            sources.append(SourceInputs(message.name, ()))
            continue
        unprocessed: list[ProcessorInput] = []
        inputs, result = to_inputs(message.inputs, limits, unprocessed, f"sources[{i}].inputs")
        sources.append(SourceInputs(message.name, inputs, tuple(unprocessed)))
        byte_counts += result
    return tuple(sources), byte_counts
