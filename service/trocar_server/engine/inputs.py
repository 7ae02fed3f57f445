"""From the bytes of a call to the model's arguments. Tensors are made on the owner thread."""

from collections.abc import Iterator, Sequence

import torch
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.engine.plan import (
    ArgumentInput,
    ImageForm,
    ImageInput,
    Payload,
    Signature,
    TensorInput,
    TensorSignature,
)
from trocar_server.engine.transfer import current
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, decode_image, image_from_pixels
from trocar_server.reductions import dtype_name
from trocar_server.surgery import PassGuard

Argument = torch.Tensor | list[torch.Tensor]

_LEAST_ROOM_BYTES = 64 << 20


def predicted_signature(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> Signature | None:
    """Return the form of the arguments where it is known before any image is decoded."""
    if any(isinstance(entry, ImageInput) for entry in inputs):
        return None
    return tuple(_tensor_signature(hosted, entry) for entry in inputs if isinstance(entry, TensorInput))


def _tensor_signature(hosted: HostedModel, entry: TensorInput) -> TensorSignature:
    _check_dtype(hosted, entry)
    if hosted.takes_list and entry.shape:
        return TensorSignature(
            entry.name, entry.model_dtype, (entry.shape[1:],) * entry.shape[0], is_list=True
        )
    return TensorSignature(entry.name, entry.model_dtype, (entry.shape,))


def _check_dtype(hosted: HostedModel, entry: TensorInput) -> None:
    """Refuse a float of another width: torch's own error comes late and names no way out."""
    dtype = entry.model_dtype
    if dtype.is_floating_point and hosted.dtype is not None and dtype != hosted.dtype:
        given, wanted = map(dtype_name, (dtype, hosted.dtype))
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the input is {given}, model '{hosted.spec.model_id}' computes in {wanted}; "
            f'convert it first: `array.astype("{wanted}")`',
        )


def signature_of_batch(hosted: HostedModel, batch: int, dtype: torch.dtype) -> Signature:
    """Return the form of a batch like the model's example input."""
    if hosted.takes_list:
        return (TensorSignature("", dtype, (hosted.input_shape,) * batch, is_list=True),)
    entry = TensorSignature("", dtype, ((batch, *hosted.input_shape),))
    return (entry,) * len(hosted.example_inputs())


def signature_of(names: Sequence[str], arguments: Sequence[Argument]) -> Signature:
    """Return the form of arguments that exist."""
    found = []
    for name, argument in zip(names, arguments, strict=True):
        tensors = argument if isinstance(argument, list) else [argument]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        found.append(TensorSignature(name, tensors[0].dtype, shapes, is_list=isinstance(argument, list)))
    return tuple(found)


def decode_images(
    inputs: Sequence[ArgumentInput], payloads: Sequence[Payload], max_pixels: int, max_bytes: int
) -> list[list[Image.Image]]:
    """Decode the images of each argument; tensors give an empty list. Needs no torch, so any thread.

    Args:
        inputs: The arguments.
        payloads: Their bytes.
        max_pixels: The most pixels of one image.
        max_bytes: The most bytes of pixels of all images together, or 64 MiB where that is more.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position.
    """
    remaining = iter(payloads)
    room_bytes = max(max_bytes, _LEAST_ROOM_BYTES)
    decoded: list[list[Image.Image]] = []
    for entry in inputs:
        decoded.append([])
        if isinstance(entry, TensorInput):
            next(remaining)
            continue
        for index, form in enumerate(entry.images):
            image = _decode(index, form, next(remaining), max_pixels)
            room_bytes -= image.width * image.height * 3
            if room_bytes < 0:
                raise _too_many_pixels(index)
            decoded[-1].append(image)
    return decoded


def _too_many_pixels(index: int) -> ServiceError:
    return ServiceError(
        ErrorReason.IMAGE_TOO_LARGE,
        f"the first {index + 1} images decode to more than the server takes in one call; send fewer at once",
    )


def _decode(index: int, form: ImageForm, payload: Payload, max_pixels: int) -> Image.Image:
    try:
        if form.height:
            return image_from_pixels(form.height, form.width, payload.tobytes())
        return decode_image(payload.tobytes(), max_pixels)
    except ServiceError as error:
        details = {**error.details, "image": str(index)}
        raise ServiceError(error.reason, f"image {index}: {error.message}", **details) from error


def build_arguments(
    hosted: HostedModel,
    inputs: Sequence[ArgumentInput],
    payloads: Sequence[Payload],
    images: Sequence[list[Image.Image]],
    guard: PassGuard | None = None,
) -> list[Argument]:
    """Make the model's arguments on its device. Owner thread only.

    Raises:
        PassAborted: The guard says to stop; it is asked before each image.
    """
    remaining = iter(payloads)
    return [
        _argument(hosted, entry, remaining, _while_allowed(decoded, guard))
        for entry, decoded in zip(inputs, images, strict=True)
    ]


def _while_allowed(images: list[Image.Image], guard: PassGuard | None) -> Iterator[Image.Image]:
    for image in images:
        if guard is not None:
            guard.check()
        yield image


def _argument(
    hosted: HostedModel, entry: ArgumentInput, payloads: Iterator[Payload], images: Iterator[Image.Image]
) -> Argument:
    if isinstance(entry, TensorInput):
        tensor = tensor_of(entry.dtype, entry.shape, next(payloads))
        tensor = current().to_device(tensor, hosted.device).to(entry.model_dtype)
        return list(tensor.unbind()) if hosted.takes_list else tensor
    for _ in entry.images:
        next(payloads)
    assert hosted.preprocessing is not None  # refused before: see check_images
    batch = hosted.preprocessing(images)
    if isinstance(batch, list):
        return [current().to_device(image, hosted.device) for image in batch]
    return current().to_device(batch, hosted.device)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], payload: Payload) -> torch.Tensor:
    """View a payload as a tensor."""
    if not payload.size:  # which torch does not view as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(payload).view(dtype).reshape(shape)


def check_images(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> None:
    """Refuse images for a model that has no preprocessing.

    Raises:
        ServiceError: `NO_PREPROCESSING`.
    """
    if hosted.preprocessing is None and any(isinstance(entry, ImageInput) for entry in inputs):
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            f"model '{hosted.spec.model_id}' has no preprocessing for images; send an array of shape "
            f"(batch, {', '.join(map(str, hosted.input_shape))})",
        )
