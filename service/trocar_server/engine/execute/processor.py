"""Processor: texts, sound, and images with texts become arguments, in separate processes.

Belongs to one event loop.

# Note: [Who tokenizes]
Tokenizers, chat templates and feature extractors come with the model, and their regular expressions and
templates may take forever on some text. So they run in worker processes, as decoders of images do: a
deadline, a cancellation, a stop or `max_processing_s` kills them.

# Note: [Padding on the left]
A tokenizer may pad on the left, as those of decoders do. A model with absolute positions then counts the
padding, unless it gets positions. So it gets those of transformers' own generation where its forward takes
them; some models compute them themselves, from the ids or the mask. The texts of all others are padded on the
right, where no token's position moves; where a processor of images with texts pads on the left by itself,
texts of different lengths are refused. A tokenizer that sends no mask pads as it always does: the model reads
its padding. Arrays are used as sent.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.decoding.process import WorkerProcess
from trocar_server.engine.execute.worker_pool import WorkerPool
from trocar_server.engine.request.plan import ArgumentInput, Payload, TensorInput
from trocar_server.engine.schedule.deadlines import until
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, current_flow, set_flow
from trocar_server.processing.exchange import (
    LeftPadding,
    Made,
    Takes,
    detokenize,
    extract_features,
    measure_image_texts,
    process_image_texts,
    tokenize,
)
from trocar_server.processing.folder import (
    has_feature_extractor,
    has_tokenizer,
    processor_digest,
    sound_settings,
)
from trocar_server.processing.inputs import (
    AudioInput,
    ImageTextInput,
    ProcessedInput,
    ProcessorInput,
    TextInput,
    check_characters,
)
from trocar_server.processing.sound_lengths import check_sound, encoded_length
from trocar_server.processing.text_lengths import check_tokens

Result = TypeVar("Result")

_WORKER = "trocar_server.processing.worker"
_TEXT_PROCESSES = 2
_AUDIO_PROCESSES = 1
_IMAGE_TEXT_PROCESSES = 1
_QUANTUM = 1 << 16
_FOLDERS_KEPT = 256
_SMALL_CHARACTERS = 1 << 14
_POSITIONS = "position_ids"


_Described: TypeAlias = tuple[bytes, dict[str, Any]]
"""Digest of a processor's folder, and the settings of its feature extractor."""


@dataclass(frozen=True)
class Processed:
    """Inputs of a pass after processing: tensors and images alone, with their payloads."""

    inputs: tuple[ArgumentInput, ...]
    payloads: list[Payload]
    made: tuple[ProcessedInput, ...]
    byte_count: int
    """Bytes of the payloads that the processor made."""


class Processor:
    """Runs models' processors in separate processes.

    processor = Processor()
    processed = await processor.process(hosted, plan.inputs, plan.unprocessed, payloads, limits)
    processor.stop()
    """

    def __init__(self) -> None:
        self._texts = WorkerPool(lambda: WorkerProcess(_WORKER, "text"), _TEXT_PROCESSES, _QUANTUM, _stopping)
        self._audio = WorkerPool(
            lambda: WorkerProcess(_WORKER, "audio"), _AUDIO_PROCESSES, _QUANTUM, _stopping
        )
        self._image_texts = WorkerPool(
            lambda: WorkerProcess(_WORKER, "image_text"), _IMAGE_TEXT_PROCESSES, _QUANTUM, _stopping
        )
        self._folders: OrderedDict[tuple[Path, str], _Described] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [*self._texts.pids, *self._audio.pids, *self._image_texts.pids]

    def stop(self) -> None:
        """Kill every process; pending calls fail, and nothing is processed afterwards."""
        self._texts.stop()
        self._audio.stop()
        self._image_texts.stop()

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
        """Turn texts and sound into arguments of the model.

        Args:
            hosted: The model.
            inputs: Its other inputs.
            unprocessed: The texts and sound.
            payloads: Those of all inputs.
            limits: Limits of a call.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call; grows by the bytes of the arguments, as counted before they are made.

        Raises:
            ServiceError: `NO_PREPROCESSING`, the model takes no texts or no sound; `INPUT_REJECTED`,
                `REQUEST_TOO_LARGE`, naming the sample where it is one, or where padding would make too
                much of them, which is not tried; `CANCELLED`, the server stops;
                `DEADLINE_EXCEEDED`; `SERVER_BUSY`, there is no room for the arguments.
        """
        room = Room() if room is None else room
        before_bytes = room.byte_count
        try:
            async with until(deadline, "the inputs were processed"):
                return await self._process(hosted, inputs, unprocessed, payloads, limits, room)
        except BaseException:
            room.release(room.byte_count - before_bytes)
            raise

    async def _process(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        unprocessed: Sequence[ProcessorInput],
        payloads: Sequence[Payload],
        limits: Limits,
        room: Room,
    ) -> Processed:
        takes = _takes(hosted, unprocessed)
        if any(entry.name == _POSITIONS for entry in inputs):
            takes = replace(takes, left_padding="nothing")  # the caller knows better
        digest, settings = await self._described(takes)
        rest, result = list(inputs), list(_of_others(unprocessed, payloads))
        described: list[ProcessedInput] = []
        byte_count = 0
        for given in unprocessed:
            own = _taken(hosted, given.name) if given.name else takes
            most_bytes = room.most_bytes(limits)
            counted_bytes = _count(given, own, settings, payloads, limits, most_bytes)
            room.reserve(counted_bytes, given.row_count)
            made = await self._made(given, own, payloads, limits, most_bytes)
            made = _as_taken(hosted, given.name, made)
            own_bytes = sum(array.nbytes for array in made.arrays.values())
            room.settle(counted_bytes, own_bytes, given.row_count)
            byte_count += own_bytes
            _check_vocabulary(hosted.module, made)
            names = tuple(_argument_name(given.name, name) for name in made.arrays)
            check_names(rest, names)
            for name, array in zip(names, made.arrays.values(), strict=True):
                rest.append(TensorInput(name, torch.from_numpy(array[:0]).dtype, array.shape))
                result.append(array.reshape(-1).view(np.uint8))
            described.append(
                ProcessedInput(given.name, made.samples, names, digest, made.padded_length, made.pads_left)
            )
        return Processed(tuple(rest), result, tuple(described), byte_count)

    def process_from_thread(
        self,
        hosted: HostedModel,
        given: ProcessorInput,
        payloads: Sequence[Payload],
        limits: Limits,
        flow: str,
    ) -> Processed:
        """Process texts or sound from a thread other than the event loop's, blocking; see `attach`.

        Args:
            hosted: The model.
            given: The texts or the sound.
            payloads: Those of the sound.
            limits: Limits of a call.
            flow: The flow that is charged.

        Raises:
            ServiceError: As `process`; `REQUEST_TOO_LARGE`, there are too many characters.
        """
        check_characters([given], limits)
        if self._loop is None or self._texts.is_stopped:
            raise _stopping()

        async def process() -> Processed:
            set_flow(flow)
            return await self.process(hosted, (), (given,), payloads, limits)

        return asyncio.run_coroutine_threadsafe(process(), self._loop).result()

    async def texts(
        self, hosted: HostedModel, lists: Sequence[Sequence[int]], limits: Limits
    ) -> Sequence[str]:
        """Return the text of each list of token ids; empty ones of a model without a tokenizer.

        Raises:
            ServiceError: `MODEL_INVALID`, its tokenizer cannot be loaded; `CANCELLED`, the server stops.
        """
        folder = hosted.processor_folder
        if folder is None or not has_tokenizer(folder, hosted.processor_version):
            return ["" for _ in lists]
        takes, cost, timeout_s = _taken(hosted), sum(map(len, lists)), limits.max_processing_s
        try:
            return await self._texts.run(
                lambda process: detokenize(process, takes, lists, limits),
                cost,
                current_flow(),
                timeout_s,
                is_small=True,
            )
        except TimeoutError:
            raise _too_slow(timeout_s) from None

    def attach(self) -> None:
        """Serve other threads too, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    async def _described(self, takes: Takes) -> _Described:
        """Return the digest of a processor's files, and the settings of its feature extractor."""
        key = takes.folder, takes.version
        if key not in self._folders:
            self._folders[key] = await asyncio.to_thread(_describe, takes.folder)
            if len(self._folders) > _FOLDERS_KEPT:
                self._folders.popitem(last=False)
        return self._folders[key]

    async def measure_image_texts(
        self, hosted: HostedModel, given: ImageTextInput, limits: Limits, most_bytes: int
    ) -> int:
        """Check texts with images by the images' sizes, and return the bytes that the images become.

        Args:
            hosted: The model.
            given: The texts, and the sizes of the images.
            limits: Limits of a call.
            most_bytes: The most bytes that the images may become.

        Raises:
            ServiceError: As `process_image_texts`.
        """
        takes = _taken(hosted)
        return await self._of_image_texts(
            given, limits, lambda process: measure_image_texts(process, given, takes, limits, most_bytes)
        )

    async def process_image_texts(
        self,
        hosted: HostedModel,
        given: ImageTextInput,
        pixels: Sequence[bytes],
        limits: Limits,
        most_bytes: int,
    ) -> tuple[Made, bytes]:
        """Run the model's own processor of texts and images; returns its digest too.

        Args:
            hosted: The model.
            given: The texts, and the sizes of the images.
            pixels: The RGB values of each image; none for blank images.
            limits: Limits of a call.
            most_bytes: The most bytes that the images may become.

        Raises:
            ServiceError: `INPUT_REJECTED`, `REQUEST_TOO_LARGE`, `IMAGE_TOO_LARGE`, `NO_PREPROCESSING` or
                `MODEL_INVALID`, as the processor says; `CANCELLED`, the server stops.
        """
        takes = _taken(hosted)
        digest, _ = await self._described(takes)
        made = await self._of_image_texts(
            given,
            limits,
            lambda process: process_image_texts(process, given, pixels, takes, limits, most_bytes),
        )
        made = _as_taken(hosted, "", made)
        _check_vocabulary(hosted.module, made)
        return made, digest

    async def _of_image_texts(
        self, given: ImageTextInput, limits: Limits, work: Callable[[WorkerProcess], Result]
    ) -> Result:
        cost = sum(height * width for height, width in given.sizes)
        if given.texts is not None:
            cost += sum(entry.character_count for entry in given.texts.entries)
        timeout_s = limits.max_processing_s
        try:
            return await self._image_texts.run(work, cost, current_flow(), timeout_s, is_small=False)
        except TimeoutError:
            raise _too_slow(timeout_s) from None

    async def _made(
        self,
        given: ProcessorInput,
        takes: Takes,
        payloads: Sequence[Payload],
        limits: Limits,
        most_bytes: int,
    ) -> Made:
        flow, timeout_s = current_flow(), limits.max_processing_s
        try:
            if isinstance(given, TextInput):
                cost = sum(entry.character_count for entry in given.entries)
                return await self._texts.run(
                    lambda process: tokenize(process, given, takes, limits, most_bytes),
                    cost,
                    flow,
                    timeout_s,
                    is_small=cost <= _SMALL_CHARACTERS,
                )
            own = [payload.data for payload in payloads[_places(given)]]
            return await self._audio.run(
                lambda process: extract_features(process, given, own, takes, limits, most_bytes),
                sum(clip.byte_count for clip in given.clips),
                flow,
                timeout_s,
                is_small=False,
            )
        except TimeoutError:
            raise _too_slow(timeout_s) from None


def _describe(folder: Path) -> _Described:
    return processor_digest(folder), sound_settings(folder)


def _count(
    given: ProcessorInput,
    takes: Takes,
    settings: dict[str, Any],
    payloads: Sequence[Payload],
    limits: Limits,
    most_bytes: int,
) -> int:
    """Return the bytes that inputs become at least, before a worker gets them.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`, padding would make too much of them.
    """
    if isinstance(given, AudioInput):
        own = [payload.data for payload in payloads[_places(given)]]
        pairs = zip(given.clips, own, strict=True)
        lengths = [clip.byte_count // 4 if clip.sample_rate else encoded_length(data) for clip, data in pairs]
        return check_sound(settings, lengths, most_bytes)
    # Of texts, a tokenizer alone knows their tokens, and counts them before it pads.
    least = [
        1 if entry.kind != "ids" or given.options.truncate else len(entry.content) for entry in given.entries
    ]
    check_tokens(least, takes.padded_tokens, limits.max_tokens)
    return 0


def _too_slow(timeout_s: float) -> ServiceError:
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        f"the model's tokenizer or other processor takes longer than {timeout_s:g} s over these inputs; send "
        "fewer or shorter ones",
    )


def _takes(hosted: HostedModel, unprocessed: Sequence[ProcessorInput]) -> Takes:
    folder, version = hosted.processor_folder, hosted.processor_version
    for given in unprocessed:
        is_text = isinstance(given, TextInput)
        if folder is None or not (has_tokenizer if is_text else has_feature_extractor)(folder, version):
            what = "tokenizer, so it takes no texts" if is_text else "feature extractor, so it takes no sound"
            images = "images or " if hosted.preprocessing is not None else ""
            raise ServiceError(
                ErrorReason.NO_PREPROCESSING,
                f"model '{hosted.spec.model_id}' has no {what}; send {images}an array of shape (batch, "
                f"{', '.join(map(str, hosted.input_shape))})",
            )
    return _taken(hosted)


def _taken(hosted: HostedModel, prefix: str = "") -> Takes:
    """Return what the model takes of its processor; with a prefix what its decoder takes."""
    folder = hosted.processor_folder
    assert folder is not None  # refused before
    config = getattr(hosted.module, "config", None)
    told = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    # RoBERTa's configuration also counts the positions of the padding, which no token can have.
    learned = hosted.signature.largest.get("target_tokens" if prefix else "tokens")
    counts = [each for each in (told, learned) if isinstance(each, int) and each > 0]
    most = min(counts, default=None)
    # SigLIP was trained on texts of one length and takes the vector of the last token, padding or not.
    is_of_one_length = str(getattr(config, "model_type", "")).startswith("siglip")
    padded = most if is_of_one_length and most is not None else 0
    names = _argument_names(hosted, prefix)
    return Takes(folder, names, most, padded, hosted.processor_version, _left_padding(hosted, prefix, names))


def _left_padding(hosted: HostedModel, prefix: str, names: frozenset[str] | None) -> LeftPadding:
    """Return what texts that a tokenizer pads on the left need. See Note: [Padding on the left]."""
    if hosted.computes_positions:
        return "nothing"
    return "positions" if names is not None and _POSITIONS in names and not prefix else "right"


def _argument_names(hosted: HostedModel, prefix: str) -> frozenset[str] | None:
    """Return a processor's names of the arguments that a model takes; None where it takes any.

    Of a forward with `**kwargs`, as nearly all of transformers' are, the signature tells the names.
    """
    parameters = inspect.signature(hosted.module.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    if hosted.known_signature is not None and hosted.known_signature.is_complete:
        names |= {spec.name for spec in hosted.known_signature.inputs}
    elif any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    start = _argument_name(prefix, "")
    return frozenset(name.removeprefix(start) for name in names if name.startswith(start))


def _as_taken(hosted: HostedModel, prefix: str, made: Made) -> Made:
    """Return arrays in the model's dtypes: EnCodec's extractor makes numbers, and its model takes a bool."""
    signature = hosted.known_signature
    bools = {spec.name for spec in signature.inputs if spec.dtype == "bool"} if signature is not None else ()
    arrays = {
        name: array.astype(bool) if _argument_name(prefix, name) in bools else array
        for name, array in made.arrays.items()
    }
    return replace(made, arrays=arrays)


def _argument_name(prefix: str, name: str) -> str:
    return f"decoder_{name}" if prefix else name


def check_names(inputs: Sequence[ArgumentInput], names: Sequence[str]) -> None:
    """Refuse inputs that the processor makes too.

    Raises:
        ServiceError: `INPUT_REJECTED`.
    """
    for entry in inputs:
        if entry.name in names:
            raise ServiceError(
                ErrorReason.INPUT_REJECTED,
                f"'{entry.name}' is given, and the server also computes it from texts, sound or images; "
                "send one or the other",
            )


def _check_vocabulary(module: nn.Module, made: Made) -> None:
    config = getattr(module, "config", None)
    size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    ids = made.arrays.get("input_ids")
    if ids is not None and isinstance(size, int) and int(ids.max()) >= size:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the tokenizer returned the token id {int(ids.max())}, but the model's vocabulary "
            f"ends with {size - 1}; ask the server's operator to check the model's files",
        )


def _places(given: AudioInput) -> slice:
    return slice(given.first_payload, given.first_payload + len(given.clips))


def _of_others(unprocessed: Sequence[ProcessorInput], payloads: Sequence[Payload]) -> Sequence[Payload]:
    """Return the payloads of tensors and images."""
    taken = {
        index
        for given in unprocessed
        if isinstance(given, AudioInput)
        for index in range(len(payloads))[_places(given)]
    }
    return [payload for index, payload in enumerate(payloads) if index not in taken]


def _stopping() -> ServiceError:
    return ServiceError(ErrorReason.CANCELLED, "the server is shutting down: the inputs were not processed")
