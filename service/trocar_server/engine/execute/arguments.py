"""Model arguments from the bytes of a call. Tensors are made on the owner thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.decoding.headers import ImageHeader, read_header
from trocar_server.decoding.pixels import image_from_pixels
from trocar_server.engine.execute.image_decoder import ImageDecoder, in_order, naming_image
from trocar_server.engine.execute.prepared_images import DecodedImages, prepared_images
from trocar_server.engine.request.plan import (
    ArgumentInput,
    Flag,
    FlagInput,
    ImageInput,
    ImageSpec,
    MadeInput,
    Payload,
    Signature,
    TensorInput,
    TensorListInput,
    TensorSignature,
    payload_count,
)
from trocar_server.engine.transfer import this_thread
from trocar_server.errors import ServiceError
from trocar_server.models import Family, HostedModel
from trocar_server.models.image_rules import Size
from trocar_server.models.preprocessing import too_many, too_many_padded
from trocar_server.nested_names import flattened
from trocar_server.surgery import PassGuard
from trocar_server.tensors.reductions import dtype_name

Argument = torch.Tensor | list[torch.Tensor] | Flag

_HALVES = (torch.float16, torch.bfloat16)
_LEAST_ROOM_BYTES = 64 << 20


def has_images(inputs: Sequence[ArgumentInput]) -> bool:
    """Whether any argument is images."""
    return any(isinstance(entry, ImageInput) for entry in inputs)


def predicted_signature(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> Signature | None:
    """Return the arguments' signature where it is known before any image is decoded."""
    if has_images(inputs):
        return None
    return tuple(
        _tensor_signature(hosted, entry) for entry in inputs if not isinstance(entry, (ImageInput, MadeInput))
    )


def _tensor_signature(
    hosted: HostedModel, entry: TensorInput | TensorListInput | FlagInput
) -> TensorSignature:
    if isinstance(entry, FlagInput):
        return TensorSignature.of_flag(entry.name, entry.value)
    _check_dtype(hosted, entry)
    dtype = _dtype_for(hosted, entry.model_dtype)
    if isinstance(entry, TensorListInput):
        return TensorSignature(entry.name, dtype, entry.shapes, is_list=True)
    if hosted.takes_list and entry.shape:
        return TensorSignature(entry.name, dtype, (entry.shape[1:],) * entry.shape[0], is_list=True)
    return TensorSignature(entry.name, dtype, (entry.shape,))


def check_tensors(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> None:
    """Refuse tensors that the model cannot take, as far as that is known without a pass.

    Raises:
        ServiceError: `INPUT_REJECTED`.
    """
    check_lists(hosted, inputs)
    check_named(hosted, inputs)
    for entry in inputs:
        if isinstance(entry, (TensorInput, TensorListInput)):
            _check_dtype(hosted, entry)


def check_named(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> None:
    """Refuse inputs that are not in the model's signature, where it is known.

    Raises:
        ServiceError: `INPUT_REJECTED`.
    """
    hosted.signature.check_flags(
        [(entry.name, entry.value) for entry in inputs if isinstance(entry, FlagInput)]
    )
    if hosted.known_signature is not None and not any(isinstance(entry, TensorListInput) for entry in inputs):
        given = [
            (entry.name, entry.model_dtype, entry.shape)
            if isinstance(entry, TensorInput)
            else (entry.name, None, ())
            for entry in inputs
            if not isinstance(entry, FlagInput)
        ]
        hosted.known_signature.check(given)


def _dtype_for(hosted: HostedModel, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that an input is converted to: float32 becomes a 16-bit model's compute dtype.

    NumPy has no bfloat16, so many callers can only send float32 to such a model.
    """
    return hosted.dtype if dtype is torch.float32 and hosted.dtype in _HALVES else dtype


def _check_dtype(hosted: HostedModel, entry: TensorInput | TensorListInput) -> None:
    """Refuse a float of another width: torch's own error comes late and names no remedy.

    Other dtypes are left to custom models; torchvision's models take floats only.
    """
    dtype = _dtype_for(hosted, entry.model_dtype)
    is_judged = dtype.is_floating_point or hosted.family is not Family.CUSTOM
    if is_judged and hosted.dtype is not None and dtype != hosted.dtype:
        shapes = entry.shapes if isinstance(entry, TensorListInput) else (entry.shape,)
        advice = input_advice(hosted, dtype, shapes[0])
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the input is {dtype_name(dtype)}, model '{hosted.spec.model_id}' computes in "
            f"{dtype_name(hosted.dtype)}; convert it first: {advice}",
        )


def input_advice(hosted: HostedModel, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return a line of NumPy that converts an array to what the model takes; empty where none is known."""
    wanted = hosted.dtype or torch.float32
    name = "float32" if wanted is torch.bfloat16 else dtype_name(wanted)  # NumPy has no bfloat16
    order = _channel_order(hosted, shape)
    if dtype is torch.uint8 and hosted.preprocessing is not None and (line := _pixel_advice(hosted, shape)):
        return line
    if dtype is torch.uint8 and order == "first" and hosted.preprocessing is not None:
        axes = "0, 2, 3, 1" if len(shape) == 4 else "1, 2, 0"
        return f"`array.transpose({axes})`, as pixels have their channels last; the server preprocesses them"
    line, first = "array", []
    if order == "last":
        line += f".transpose({'0, 3, 1, 2' if len(shape) == 4 else '2, 0, 1'})"
        first.append("channels")
    if (shape == hosted.input_shape or (order and len(shape) == 3)) and not hosted.takes_list:
        line += "[np.newaxis]"
        first.append("the batch")
    if dtype is torch.uint8:
        line += f'.astype("{name}") / 255'
    elif dtype.is_complex:
        line += f'.real.astype("{name}")'
    elif _dtype_for(hosted, dtype) != wanted:
        line += f'.astype("{name}")'
    if line == "array":
        return ""
    reason = f", as {' and '.join(first)} come{'s' if first == ['the batch'] else ''} first" if first else ""
    return f"`{line}`{reason}"


def _pixel_advice(hosted: HostedModel, shape: tuple[int, ...]) -> str:
    """Return a line that makes pixels (height, width, 3) of grey ones or of those with alpha; or empty."""
    if len(hosted.input_shape) != 3 or hosted.input_shape[0] != 3:
        return ""
    if len(shape) == 5 and shape[-1] == 3:
        return "`np.concatenate(array)`, as each array in a list is one image"
    if 3 in (shape[-1], *shape[-3:-2]):
        return ""
    if len(shape) in (3, 4) and shape[-1] == 4:
        return "`array[..., :3]`, as pixels are red, green and blue, without alpha"
    if len(shape) in (3, 4) and shape[-1] == 1:
        return "`np.repeat(array, 3, axis=-1)`, as pixels have three channels, last"
    if len(shape) == 4 and shape[1] == 1:
        return "`np.repeat(array.transpose(0, 2, 3, 1), 3, axis=-1)`, as pixels have three channels, last"
    if len(shape) in (2, 3):
        return "`np.stack([array] * 3, axis=-1)`, as pixels have three channels, last"
    return ""


def _channel_order(hosted: HostedModel, shape: tuple[int, ...]) -> str:
    """Return the position of an image's channels: first, last, or "" where that is ambiguous."""
    if len(hosted.input_shape) != 3 or len(shape) not in (3, 4):
        return ""
    is_first, is_last = (size == hosted.input_shape[0] for size in (shape[-3], shape[-1]))
    return "" if is_first == is_last else "first" if is_first else "last"


def signature_of_batch(hosted: HostedModel, batch: int, dtype: torch.dtype) -> Signature:
    """Return the signature of a batch like the model's example input."""
    names = hosted.example_names
    if hosted.known_signature is not None:
        return signature_of(names, list(hosted.example_inputs(batch)))
    if hosted.takes_list:
        return (TensorSignature(names[0], dtype, (hosted.input_shape,) * batch, is_list=True),)
    shapes = ((batch, *hosted.input_shape),)
    return tuple(TensorSignature(name, dtype, shapes) for name in names)


def signature_of(names: Sequence[str], arguments: Sequence[Argument]) -> Signature:
    """Return the signature of existing arguments."""
    result = []
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, Flag):
            result.append(TensorSignature.of_flag(name, argument))
            continue
        tensors = argument if isinstance(argument, list) else [argument]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        result.append(TensorSignature(name, tensors[0].dtype, shapes, is_list=isinstance(argument, list)))
    return tuple(result)


def signature_of_called(
    hosted: HostedModel, args: Sequence[object], kwargs: Mapping[str, object]
) -> Signature:
    """Return the signature of the arguments of a forward; structures among them are taken apart."""
    names = (*hosted.bind(("",) * len(args)), *kwargs)
    return signature_of(*flattened(names, (*args, *kwargs.values())))


async def decode_images(
    hosted: HostedModel,
    inputs: Sequence[ArgumentInput],
    payloads: Sequence[Payload],
    limits: Limits,
    decoder: ImageDecoder,
    reserve: Callable[[int, int], None],
) -> list[DecodedImages]:
    """Decode the images of each argument; tensors give an empty list. Needs no torch.

    All headers are read first, and the bytes of decoded and prepared images are counted; once more where EXIF
    data turned some. If the preprocessing allows it, they are prepared too: see `models.fitting`.

    Args:
        hosted: The model, for its preprocessing.
        inputs: The arguments.
        payloads: Their bytes.
        limits: Limits of a call.
        decoder: Decodes them.
        reserve: Reserves bytes for a number of images, before these are decoded.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position; `SERVER_BUSY`,
            there is no memory for the decoded images.
    """
    decoded: list[DecodedImages] = []
    remaining = iter(payloads)
    for entry in inputs:
        own = list(islice(remaining, payload_count(entry)))
        if not isinstance(entry, ImageInput):
            decoded.append([])
            continue
        specs = entry.images
        headers = await decoder.aside(partial(image_headers, specs, own, limits.max_image_pixels))
        stored = [header or spec for spec, header in zip(specs, headers, strict=True)]
        sizes = [(each.height, each.width) for each in stored]
        bytes_of = partial(_made_bytes, hosted, max_bytes=limits.max_request_bytes)
        reserve(bytes_of(sizes), len(specs))
        assert hosted.preprocessing is not None  # refused before: see check_images
        fitting, max_pixels = hosted.preprocessing.fitting, limits.max_image_pixels
        batch: DecodedImages | None = await prepared_images(fitting, headers, specs, own, max_pixels, decoder)
        if batch is None:
            batch = await decoded_images(headers, specs, own, max_pixels, decoder)
            turned = [(image.height, image.width) for image in batch]
            if turned != sizes:  # by EXIF data: padded to the size of tall images, wide ones become far more
                reserve(max(0, bytes_of(turned) - bytes_of(sizes)), len(specs))
        decoded.append(batch)
    return decoded


def image_headers(
    image_specs: Sequence[ImageSpec], payloads: Sequence[Payload], max_pixels: int
) -> list[ImageHeader | None]:
    """Read the header of each encoded image; raw pixels have none.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position.
    """
    headers: list[ImageHeader | None] = []
    for index, (image_spec, payload) in enumerate(zip(image_specs, payloads, strict=True)):
        with naming_image(index):
            headers.append(None if image_spec.height else read_header(payload.tobytes(), max_pixels))
    return headers


def image_room_bytes(max_bytes: int) -> int:
    """Return the most bytes of decoded or of prepared images in one call.

    Args:
        max_bytes: `Limits.max_request_bytes`.
    """
    return max(max_bytes, _LEAST_ROOM_BYTES)


def _made_bytes(hosted: HostedModel, sizes: Sequence[Size | None], max_bytes: int) -> int:
    """Return the bytes of images as decoded and as prepared; a lower bound for images without a size.

    Raises:
        ServiceError: `IMAGE_TOO_LARGE`.
    """
    room_bytes = image_room_bytes(max_bytes)
    decoded_bytes = 0
    for index, size in enumerate(sizes):
        decoded_bytes += 0 if size is None else size[0] * size[1] * 3
        if decoded_bytes > room_bytes:
            raise too_many(index, room_bytes)
    assert hosted.preprocessing is not None  # refused before: see check_images
    prepared = hosted.preprocessing.prepared_size(sizes)
    if prepared.padded is not None and prepared.batch_bytes > room_bytes:
        raise too_many_padded(len(sizes), prepared.padded, prepared.batch_bytes, room_bytes)
    if prepared.batch_bytes > room_bytes:
        raise too_many(len(sizes) * room_bytes // prepared.batch_bytes, room_bytes)
    return decoded_bytes * 4 // 3 + prepared.byte_count


async def decoded_images(
    headers: Sequence[ImageHeader | None],
    image_specs: Sequence[ImageSpec],
    payloads: Sequence[Payload],
    max_pixels: int,
    decoder: ImageDecoder,
) -> list[Image.Image]:
    """Decode images with known headers.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position.
    """

    async def one(index: int) -> Image.Image:
        header, image_spec, payload = headers[index], image_specs[index], payloads[index]
        with naming_image(index):
            if header is not None:
                return await decoder.decode(payload.data, header, max_pixels)
            return await decoder.aside(
                lambda: image_from_pixels(image_spec.height, image_spec.width, payload.data)
            )

    return await in_order(one(index) for index in range(len(image_specs)))


def build_arguments(
    hosted: HostedModel,
    inputs: Sequence[ArgumentInput],
    payloads: Sequence[Payload],
    images: Sequence[DecodedImages],
    guard: PassGuard | None = None,
    *,
    is_start: bool = False,
) -> list[Argument]:
    """Make the model's arguments on its device. Owner thread only.

    Args:
        hosted: The model.
        inputs: The arguments.
        payloads: Their bytes.
        images: The decoded images of each argument, see `decode_images`.
        guard: Aborts between images.
        is_start: Whether they are a value within the model, which is not converted.

    Raises:
        PassAborted: The guard stopped it; it is checked before each image.
    """
    remaining = iter(payloads)
    made: dict[str, torch.Tensor] = {}
    arguments: list[Argument] = []
    for position, (entry, decoded) in enumerate(zip(inputs, images, strict=True)):
        if isinstance(entry, MadeInput):
            arguments.append(made[entry.name])
        elif isinstance(entry, ImageInput):
            arguments.append(_image_argument(hosted, entry, remaining, decoded, guard, made))
        else:
            arguments.append(_argument(hosted, entry, position, remaining, is_start=is_start))
    return arguments


def _while_allowed(images: list[Image.Image], guard: PassGuard | None) -> Iterator[Image.Image]:
    for image in images:
        if guard is not None:
            guard.check()
        yield image


def _argument(
    hosted: HostedModel,
    entry: TensorInput | TensorListInput | FlagInput,
    position: int,
    payloads: Iterator[Payload],
    *,
    is_start: bool,
) -> Argument:
    if isinstance(entry, FlagInput):
        return entry.value
    # Rounded twice where it was sent as float16 or bfloat16; float32 keeps the value that was sent.
    sent_as, to_device = entry.model_dtype, this_thread.transfers.to_device
    dtype = sent_as if is_start or hosted.dtype not in _HALVES else _dtype_for(hosted, sent_as)
    known, tensors = None if is_start else hosted.known_signature, []
    for shape in entry.shapes if isinstance(entry, TensorListInput) else (entry.shape,):
        tensor = tensor_of(entry.dtype, shape, next(payloads))
        if known is not None:
            known.check_values(entry.name, position, tensor)
        tensors.append(to_device(tensor, hosted.device).to(sent_as).to(dtype))
    if isinstance(entry, TensorListInput):
        return tensors
    return list(tensors[0].unbind()) if hosted.takes_list else tensors[0]


def _image_argument(
    hosted: HostedModel,
    entry: ImageInput,
    payloads: Iterator[Payload],
    decoded: DecodedImages,
    guard: PassGuard | None,
    made: dict[str, torch.Tensor],
) -> Argument:
    """Make the argument of images; `made` gets what is made beside them, which comes after them."""
    for _ in entry.images:
        next(payloads)
    if isinstance(decoded, np.ndarray):
        return _prepared(hosted, torch.from_numpy(decoded))
    assert hosted.preprocessing is not None  # refused before: see check_images
    images = _while_allowed(decoded, guard)
    if hosted.preprocessing.made_names:
        prepared = hosted.preprocessing.with_made(images)
        made |= {
            name: this_thread.transfers.to_device(value, hosted.device)
            for name, value in prepared.made.items()
        }
        return _prepared(hosted, prepared.values)
    batch = hosted.preprocessing(images)
    if isinstance(batch, list):
        return [_prepared(hosted, image) for image in batch]
    return _prepared(hosted, batch)


def _prepared(hosted: HostedModel, values: torch.Tensor) -> torch.Tensor:
    return this_thread.transfers.to_device(values, hosted.device).to(_dtype_for(hosted, values.dtype))


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], payload: Payload) -> torch.Tensor:
    """View a payload as a tensor."""
    if not payload.size:  # torch does not view it as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(payload).view(dtype).reshape(shape)


def check_lists(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> None:
    """Refuse samples of different sizes for a model that takes one batch.

    Raises:
        ServiceError: `INPUT_REJECTED`.
    """
    if hosted.takes_list:
        return
    for entry in inputs:
        if isinstance(entry, TensorListInput):
            shapes = list(dict.fromkeys(entry.shapes))
            result = " and ".join(map(str, shapes[:2])) + (f" and {len(shapes) - 2} more" * (len(shapes) > 2))
            raise ServiceError(
                ErrorReason.INPUT_REJECTED,
                f"the arrays of the list have shapes {result}, and model '{hosted.spec.model_id}' takes one "
                "batch; bring them to one shape and pass `np.stack(arrays)`, or send them one by one, as "
                "batches of 1",
            )


def _no_preprocessing(hosted: HostedModel) -> ServiceError:
    model = f"model '{hosted.spec.model_id}'"
    if hosted.why_no_images:
        message = f"the image processor of {model} {hosted.why_no_images}, which this server does not do"
    else:
        message = f"{model} has no preprocessing for images"
    signature = hosted.known_signature
    images = signature.image_arrays if signature is not None else ()
    if images:
        arrays = "the array" if len(images) == 1 else "the arrays"
        return ServiceError(
            ErrorReason.NO_PREPROCESSING,
            f"{message}; prepare them and send {arrays} {'; '.join(map(str, images))}",
        )
    return ServiceError(
        ErrorReason.NO_PREPROCESSING,
        f"{message}; send an array of shape (batch, {', '.join(map(str, hosted.input_shape))})",
    )


def image_sizes(image_specs: Sequence[ImageSpec]) -> list[Size | None]:
    """Return height and width of images; None of encoded ones, which tell them later."""
    return [
        (image_spec.height, image_spec.width) if image_spec.height else None for image_spec in image_specs
    ]


def check_images(hosted: HostedModel, inputs: Sequence[ArgumentInput], limits: Limits) -> int:
    """Refuse images for a model that has no preprocessing, and those that would become too large.

    Returns:
        The bytes of the decoded images, as far as known before they are received.

    Raises:
        ServiceError: `NO_PREPROCESSING` or `IMAGE_TOO_LARGE`.
    """
    sizes = [image_sizes(entry.images) for entry in inputs if isinstance(entry, ImageInput)]
    if sizes and hosted.preprocessing is None:
        raise _no_preprocessing(hosted)
    return sum(_made_bytes(hosted, each, limits.max_request_bytes) for each in sizes)
