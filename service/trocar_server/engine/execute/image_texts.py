"""Texts with images for models whose own processor takes both together. Belongs to one event loop.

The number of tokens of an image is known only once its size is: see Note: [Images before their tokens].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.decoding.headers import ImageHeader
from trocar_server.engine.execute.arguments import (
    decoded_images,
    image_headers,
    image_room_bytes,
)
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.execute.processor import Processed, Processor, check_names
from trocar_server.engine.request.plan import (
    ArgumentInput,
    ImageInput,
    ImageSpec,
    Payload,
    TensorInput,
    payload_count,
)
from trocar_server.engine.schedule.deadlines import until
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.models.image_rules import Size
from trocar_server.models.inputs import FLATTENED, IMAGE_GRID, IMAGES
from trocar_server.models.preprocessing import too_many
from trocar_server.processing.exchange import Made
from trocar_server.processing.folder import has_feature_extractor, has_tokenizer
from trocar_server.processing.inputs import ImageTextInput, ProcessedInput, ProcessorInput, TextInput

_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "idefics3", "pix2struct"})
"""Values of `model_type` whose processors are compared with transformers in the tests."""
_ARRAYS = frozenset({IMAGES, IMAGE_GRID, FLATTENED})
_KINDS = ("text", "chat")
_DECODED_BYTES = 4 + 3 + 3
"""Of a pixel: in Pillow, and its RGB values on their way to the worker process."""
_COPIES = 2
"""Of what the images become: in the worker process and here."""


def takes_image_texts(
    hosted: HostedModel, inputs: Sequence[ArgumentInput], unprocessed: Sequence[ProcessorInput]
) -> bool:
    """Whether inputs are for a processor of texts and images together; arrays that it would make are not."""
    folder, version = hosted.processor_folder, hosted.processor_version
    if folder is None or _model_type(hosted) not in _MODELS:
        return False
    if not has_tokenizer(folder, version) or not has_feature_extractor(folder, version):
        return False
    if any(isinstance(entry, ImageInput) for entry in inputs):
        return True
    if any(entry.name in _ARRAYS for entry in inputs):
        return False
    texts = [entry for entry in unprocessed if isinstance(entry, TextInput)]
    return bool(texts) and all(each.kind in _KINDS for entry in texts for each in entry.entries)


@dataclass(frozen=True)
class _Images:
    """The images of a call, in order.

    Attributes:
        specs: As described.
        payloads: Their bytes; none in a dry run.
        headers: Of the encoded ones; None for pixels.
        sizes: Height and width, as the headers say.
    """

    specs: tuple[ImageSpec, ...]
    payloads: tuple[Payload, ...]
    headers: tuple[ImageHeader | None, ...]
    sizes: tuple[Size, ...]

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all, decoded and on their way."""
        return sum(height * width for height, width in self.sizes) * _DECODED_BYTES


class ImageTextProcessor:
    """Turns texts and images into arguments of a model.

    Args:
        processor: Runs models' processors.
        decoder: Decodes images.
    """

    def __init__(self, processor: Processor, decoder: ImageDecoder) -> None:
        self._processor = processor
        self._decoder = decoder

    async def process(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        unprocessed: Sequence[ProcessorInput],
        payloads: Sequence[Payload],
        limits: Limits,
        deadline: float | None = None,
        room: Room | None = None,
    ) -> Processed:
        """Turn texts and images into arguments; see `takes_image_texts`.

        Args:
            hosted: The model.
            inputs: The images, and other inputs.
            unprocessed: The texts.
            payloads: Those of all inputs; none for a dry run, which processes blank images of the same sizes.
            limits: Limits of a call.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call; grows by the bytes of the arguments; while these are made also by those of
                the decoded images.

        Raises:
            ServiceError: `INPUT_REJECTED`, texts and images do not fit; `INVALID_IMAGE` or `IMAGE_TOO_LARGE`,
                naming the image; `REQUEST_TOO_LARGE`, there are too many tokens; `SERVER_BUSY`;
                `DEADLINE_EXCEEDED`; `CANCELLED`.
        """
        room = Room() if room is None else room
        texts = _only_texts(hosted, unprocessed)
        result, others, of_others = _split(inputs, payloads)
        async with until(deadline, "the inputs were processed"):
            images = await self._with_sizes(result, limits)
            made, digest = await self._made(hosted, texts, images, limits, room)
        processed = _processed(made, digest, texts, others, of_others)
        room.reserve(processed.byte_count, max(1, len(images.specs)))
        return processed

    async def _with_sizes(self, outcome: _Images, limits: Limits) -> _Images:
        """Return images with their sizes: of headers, or in a dry run as they were told."""
        if outcome.specs and not outcome.payloads:
            return replace(outcome, sizes=tuple(map(_told_size, outcome.specs)))
        most_pixels = limits.max_image_pixels
        headers = await self._decoder.aside(
            lambda: image_headers(outcome.specs, outcome.payloads, most_pixels)
        )
        sizes = tuple(
            (spec.height, spec.width) if header is None else (header.height, header.width)
            for spec, header in zip(outcome.specs, headers, strict=True)
        )
        return replace(outcome, headers=tuple(headers), sizes=sizes)

    async def _made(
        self,
        hosted: HostedModel,
        texts: TextInput | None,
        images: _Images,
        limits: Limits,
        room: Room,
    ) -> tuple[Made, bytes]:
        """Check the size of everything, decode the images, and run the model's processor."""
        room_bytes, held_bytes = image_room_bytes(limits.max_request_bytes), images.decoded_bytes
        if held_bytes > room_bytes * _DECODED_BYTES:
            raise too_many(len(images.specs) - 1, room_bytes)
        given = ImageTextInput(texts, images.sizes)
        if images.specs:
            held_bytes += _COPIES * await self._processor.measure_image_texts(
                hosted, given, limits, room_bytes
            )
        before_bytes = room.byte_count
        room.reserve(held_bytes, max(1, len(images.specs)))
        try:
            pixels: list[bytes] = []
            if images.payloads:
                decoded = await decoded_images(
                    images.headers, images.specs, images.payloads, limits.max_image_pixels, self._decoder
                )
                given = ImageTextInput(texts, tuple((each.height, each.width) for each in decoded))
                pixels = [each.tobytes() for each in decoded]
            return await self._processor.process_image_texts(hosted, given, pixels, limits, room_bytes)
        finally:
            room.release(room.byte_count - before_bytes)


def _model_type(hosted: HostedModel) -> str:
    return str(getattr(getattr(hosted.module, "config", None), "model_type", ""))


def _only_texts(hosted: HostedModel, unprocessed: Sequence[ProcessorInput]) -> TextInput | None:
    texts = [entry for entry in unprocessed if isinstance(entry, TextInput) and not entry.name]
    kinds = {each.kind for entry in texts for each in entry.entries}
    if len(texts) != len(unprocessed) or len(texts) > 1 or not kinds <= set(_KINDS):
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"model '{hosted.spec.model_id}' takes images beside one list of texts or of chats: in Python "
            '`{"text": texts, "images": images}`; not beside pairs, token ids or other inputs to process',
        )
    return texts[0] if texts else None


def _split(
    inputs: Sequence[ArgumentInput], payloads: Sequence[Payload]
) -> tuple[_Images, list[ArgumentInput], list[Payload]]:
    """Return the images, and the other inputs with their payloads."""
    specs: list[ImageSpec] = []
    own: list[Payload] = []
    others: list[ArgumentInput] = []
    of_others: list[Payload] = []
    remaining = iter(payloads)
    for entry in inputs:
        sent = list(islice(remaining, payload_count(entry)))
        if isinstance(entry, ImageInput):
            specs += entry.images
            own += sent
        else:
            others.append(entry)
            of_others += sent
    return _Images(tuple(specs), tuple(own), (), ()), others, of_others


def _told_size(spec: ImageSpec) -> Size:
    size = (spec.height, spec.width) if spec.height else spec.encoded_size
    if size is None:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            "a dry run of this model needs the size of each image, as its number of tokens depends on it; "
            "send pixels, or install pillow beside the client, which then reads the sizes",
        )
    return size


def _processed(
    made: Made,
    digest: bytes,
    texts: TextInput | None,
    others: Sequence[ArgumentInput],
    of_others: Sequence[Payload],
) -> Processed:
    """Return the arguments. Texts are first, as the first tells the batch, and flags last."""
    names = tuple(made.arrays)
    check_names(others, names)
    tensors = [
        TensorInput(name, torch.from_numpy(array[:0]).dtype, array.shape)
        for name, array in made.arrays.items()
    ]
    described = ProcessedInput("", made.samples, names, digest, made.padded_length, made.pads_left)
    return Processed(
        (*tensors, *others),
        [*(array.reshape(-1).view(np.uint8) for array in made.arrays.values()), *of_others],
        () if texts is None else (described,),
        sum(array.nbytes for array in made.arrays.values()),
    )
