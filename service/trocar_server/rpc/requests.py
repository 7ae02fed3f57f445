"""From an `ExtractRequest` to a plan, with every check that needs no model."""

from collections.abc import Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_api.v1.stream_pb2 import ExtractStreamStart
from trocar_server.config import Limits
from trocar_server.engine.plan import ArgumentInput, ImageForm, ImageInput, Plan, StartAt, TensorInput
from trocar_server.errors import ServiceError
from trocar_server.rpc.dtypes import from_wire
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.payloads import tensor_byte_count
from trocar_server.rpc.reductions import constant_byte_counts
from trocar_server.rpc.taps import tap_request
from trocar_server.surgery import parse_selector

DEFAULT_CHUNK_BYTES = 1 << 20
_MIN_CHUNK_BYTES = 4096
_MAX_ARGUMENTS = 64


def to_plan(
    request: pb.ExtractRequest, limits: Limits, *, needs_inputs: bool = True
) -> tuple[Plan, list[int]]:
    """Convert and check the first message of a call.

    Returns:
        The plan, and the bytes of each payload that belongs to it.

    Raises:
        ServiceError: With the field named.
    """
    plan = base_plan(request, limits)
    needs_inputs = needs_inputs and any(tap.selector.parameter is None for tap in plan.taps)
    inputs, byte_counts = to_inputs(request.inputs, limits) if request.inputs or needs_inputs else ((), [])
    byte_counts += plan_constant_bytes(plan)
    check_request_bytes(byte_counts, limits)
    return replace(plan, inputs=inputs), byte_counts


def plan_constant_bytes(plan: Plan) -> list[int]:
    """Return the bytes of each tensor that the taps' reductions need."""
    return [count for tap in plan.taps for count in constant_byte_counts(tap.reductions)]


def base_plan(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> Plan:
    """Convert and check what batches have in common: everything but inputs.

    Raises:
        ServiceError: With the field named.
    """
    if not request.model_id:
        raise invalid("model_id", "is required in the first message")
    if not 1 <= len(request.taps) <= limits.max_taps:
        raise invalid("taps", f"{len(request.taps)} given; 1 to {limits.max_taps} are allowed")
    taps = tuple(tap_request(f"taps[{i}]", tap) for i, tap in enumerate(request.taps))
    return Plan(request.model_id, taps, (), _chunk_bytes(request, limits), _start_at(request, limits))


def to_inputs(entries: Sequence[pb.Input], limits: Limits) -> tuple[tuple[ArgumentInput, ...], list[int]]:
    """Convert and check the arguments of one forward, and return them with the bytes of each payload.

    Raises:
        ServiceError: With the field named.
    """
    check_argument_count(len(entries))
    byte_counts: list[int] = []
    inputs = tuple(_input(i, entry, limits, byte_counts) for i, entry in enumerate(entries))
    _check_names(inputs)
    check_request_bytes(byte_counts, limits)
    return inputs, byte_counts


def _start_at(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> StartAt | None:
    if not request.start_at:
        if request.start_inputs:
            raise invalid("start_inputs", "says what start_at would need, but start_at is empty")
        return None
    if len(request.start_at) > MAX_TEXT_CHARACTERS:
        raise invalid("start_at", f"over {MAX_TEXT_CHARACTERS} characters")
    if request.start_inputs:
        check_argument_count(len(request.start_inputs))
    byte_counts: list[int] = []
    inputs = tuple(
        tensor_input(f"start_inputs[{i}]", "", spec, limits, byte_counts)
        for i, spec in enumerate(request.start_inputs)
    )
    check_request_bytes(byte_counts, limits)
    return StartAt(parse_selector(request.start_at), inputs)


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


def _input(index: int, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> ArgumentInput:
    field = f"inputs[{index}]"
    if len(entry.name) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.name", f"over {MAX_TEXT_CHARACTERS} characters")
    kind = entry.WhichOneof("value")
    if kind == "tensor":
        return tensor_input(f"{field}.tensor", entry.name, entry.tensor, limits, byte_counts)
    if kind == "images":
        return _image_input(f"{field}.images", entry, limits, byte_counts)
    raise invalid(field, "needs a tensor or images")


def check_argument_count(count: int) -> None:
    """Check how many arguments a forward gets.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there are none or too many.
    """
    if not 1 <= count <= _MAX_ARGUMENTS:
        raise invalid("inputs", f"{count} given; 1 to {_MAX_ARGUMENTS} are allowed")


def tensor_input(
    field: str, name: str, spec: tensor_pb2.TensorSpec, limits: Limits, byte_counts: list[int]
) -> TensorInput:
    """Check one tensor's description and append its bytes."""
    dtype, shape = from_wire(field, spec.dtype), tuple(spec.shape)
    byte_counts.append(tensor_byte_count(field, shape, dtype.itemsize))
    if shape:
        _check_batch(field, shape[0], limits)
    return TensorInput(name, dtype, shape)


def _image_input(field: str, entry: pb.Input, limits: Limits, byte_counts: list[int]) -> ImageInput:
    _check_batch(field, len(entry.images.images), limits)
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


def _check_batch(field: str, size: int, limits: Limits) -> None:
    if size == 0:
        raise invalid(field, "the batch has no sample", ErrorReason.EMPTY_BATCH)
    if size > limits.max_batch:
        raise invalid(
            field, f"{size} samples, the limit is {limits.max_batch}", ErrorReason.REQUEST_TOO_LARGE
        )


def _check_names(inputs: Sequence[ArgumentInput]) -> None:
    names = [entry.name for entry in inputs]
    keywords = [name for name in names if name]
    if any(not name for name in names[len(names) - len(keywords) :]):
        raise invalid("inputs", "positional arguments come before keyword arguments")
    if len(set(keywords)) != len(keywords):
        raise invalid("inputs", "a keyword is given twice")


def _chunk_bytes(request: pb.ExtractRequest | ExtractStreamStart, limits: Limits) -> int:
    if not request.HasField("max_chunk_bytes"):
        return min(DEFAULT_CHUNK_BYTES, limits.max_chunk_bytes)
    if not _MIN_CHUNK_BYTES <= request.max_chunk_bytes <= limits.max_chunk_bytes:
        raise invalid("max_chunk_bytes", f"{_MIN_CHUNK_BYTES} to {limits.max_chunk_bytes} are allowed")
    return request.max_chunk_bytes
