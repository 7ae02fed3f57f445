"""Exchange with a processing worker: requests for texts, sound and images; their answers, checked."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.decoding.process import EndedError, WorkerProcess
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import (
    AudioInput,
    ImageTextInput,
    ProcessedSample,
    TextInput,
    TextOptions,
)

_DTYPES = {"bool": 1, "int64": 8, "float32": 4, "float64": 8}
_MOST_DESCRIBED_BYTES_A_TOKEN = 256


LeftPadding: TypeAlias = Literal["nothing", "positions", "right"]
"""Nothing more; the positions of tokens; or padding on the right in place of it."""


@dataclass(frozen=True)
class Takes:
    """What a model takes of its processor.

    Attributes:
        folder: The processor's files.
        names: The arguments that the model takes; all when None.
        token_count: The most tokens of one sample, None where the model does not tell.
        padded_tokens: Tokens that every text is padded to at least; 0 for the longest of its batch.
        version: Of the files in the folder, see `HostedModel.processor_version`.
        left_padding: What texts need to be padded on the left; see Note: [Padding on the left].
    """

    folder: Path
    names: frozenset[str] | None
    token_count: int | None
    padded_tokens: int = 0
    version: str = ""
    left_padding: LeftPadding = "nothing"


@dataclass(frozen=True)
class Made:
    """An answer: the arguments, batch first, and each sample's description."""

    arrays: dict[str, NDArray[Any]]
    samples: tuple[ProcessedSample, ...]
    padded_length: int
    pads_left: bool


def tokenize(process: WorkerProcess, given: TextInput, takes: Takes, limits: Limits, most_bytes: int) -> Made:
    """Tokenize a batch of texts in a worker process; blocks.

    Args:
        process: The process.
        given: The texts.
        takes: What the model takes.
        limits: Limits of a call.
        most_bytes: The most bytes that they may become.

    Raises:
        ServiceError: As `tokenization.tokenize` does; `INPUT_REJECTED`, the process ended over it;
            `CANCELLED`, it was killed.
    """
    request = {
        **_common(takes, most_bytes),
        **asdict(given.options),
        "model_tokens": takes.token_count,
        "padded_tokens": takes.padded_tokens,
        "left_padding": takes.left_padding,
        "most_tokens": limits.max_tokens,
        "most_characters": limits.max_text_characters,
    }
    data = json.dumps([[entry.kind, entry.content] for entry in given.entries]).encode()
    return _made(process, request, data, given.row_count, limits, most_bytes)


def detokenize(
    process: WorkerProcess, takes: Takes, lists: Sequence[Sequence[int]], limits: Limits
) -> list[str]:
    """Return the text of each list of token ids, from a worker process; blocks.

    Raises:
        ServiceError: As `tokenization.detokenize` does; `CANCELLED`, the process was killed.
    """
    request = {**_common(takes, 0), "decodes": True}
    _, result = _asked(process, request, json.dumps(list(map(list, lists))).encode(), limits, 0)
    texts = json.loads(result)
    if len(texts) != len(lists):
        raise _ended()
    return [str(text) for text in texts]


def extract_features(
    process: WorkerProcess,
    given: AudioInput,
    payloads: Sequence[bytes | memoryview],
    takes: Takes,
    limits: Limits,
    most_bytes: int,
) -> Made:
    """Extract the features of a batch of sound in a worker process; blocks.

    Args:
        process: The process.
        given: The clips.
        payloads: Their bytes.
        takes: What the model takes.
        limits: Limits of a call.
        most_bytes: The most bytes that they may become.

    Raises:
        ServiceError: As `audio.extract_features` does; `INPUT_REJECTED`, the process ended over it;
            `CANCELLED`, it was killed.
    """
    request = {
        **_common(takes, most_bytes),
        "rates": [clip.sample_rate for clip in given.clips],
        "sizes": [len(payload) for payload in payloads],
        "most_s": limits.max_audio_s,
    }
    return _made(process, request, b"".join(payloads), given.row_count, limits, most_bytes)


def measure_image_texts(
    process: WorkerProcess, given: ImageTextInput, takes: Takes, limits: Limits, most_bytes: int
) -> int:
    """Check texts with images by the images' sizes, in a worker process; blocks.

    Returns:
        The bytes of the arguments that the images become.

    Raises:
        ServiceError: As `image_texts.process_image_texts` does.
    """
    request = _image_texts(given, takes, limits, most_bytes, measures=True)
    answer, result = _asked(process, request, b"", limits, most_bytes)
    return int(json.loads(result[-int(answer["described_bytes"]) :])["image_bytes"])


def process_image_texts(
    process: WorkerProcess,
    given: ImageTextInput,
    pixels: Sequence[bytes | memoryview],
    takes: Takes,
    limits: Limits,
    most_bytes: int,
) -> Made:
    """Process texts with images in a worker process; blocks.

    Args:
        process: The process.
        given: The texts, and the sizes of the images.
        pixels: The RGB values of each image; none for blank images.
        takes: What the model takes.
        limits: Limits of a call.
        most_bytes: The most bytes that the images may become.

    Raises:
        ServiceError: As `image_texts.process_image_texts` does; `INPUT_REJECTED`, the process ended over it;
            `CANCELLED`, it was killed.
    """
    request = _image_texts(given, takes, limits, most_bytes, measures=False)
    rows = 0 if given.texts is None else given.texts.row_count
    most_bytes += limits.max_tokens * _MOST_DESCRIBED_BYTES_A_TOKEN  # and the texts'
    return _made(process, request, b"".join(pixels), rows, limits, most_bytes, is_batch=False)


def _image_texts(
    given: ImageTextInput, takes: Takes, limits: Limits, most_bytes: int, *, measures: bool
) -> dict[str, Any]:
    texts = given.texts
    return {
        **_common(takes, most_bytes),
        **asdict(TextOptions() if texts is None else texts.options),
        "model_tokens": takes.token_count,
        "left_padding": takes.left_padding,
        "most_tokens": limits.max_tokens,
        "most_characters": limits.max_text_characters,
        "sizes": given.sizes,
        "entries": [] if texts is None else [[entry.kind, entry.content] for entry in texts.entries],
        "measures": measures,
    }


def _common(takes: Takes, most_bytes: int) -> dict[str, Any]:
    names = None if takes.names is None else sorted(takes.names)
    folder, version = str(takes.folder), takes.version
    return {"folder": folder, "version": version, "names": names, "most_bytes": most_bytes}


def _made(
    process: WorkerProcess,
    request: dict[str, Any],
    data: bytes,
    rows: int,
    limits: Limits,
    most_bytes: int,
    *,
    is_batch: bool = True,
) -> Made:
    answer, result = _asked(process, request, data, limits, most_bytes)
    if not answer["parts"]:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            "the model takes nothing of what its tokenizer or other processor makes of these inputs; send "
            "the arrays that it takes",
        )
    try:
        return _read(answer, result, rows, is_batch=is_batch)
    except (ValueError, KeyError, TypeError) as error:
        raise _ended() from error


def _asked(
    process: WorkerProcess, request: dict[str, Any], data: bytes, limits: Limits, most_bytes: int
) -> tuple[dict[str, Any], bytearray]:
    """Return an answer's head and bytes; one that is too large is not read."""
    most_described = limits.max_tokens * _MOST_DESCRIBED_BYTES_A_TOKEN

    def size(answer: dict[str, Any]) -> int:
        described = int(answer["described_bytes"])
        count = sum(_byte_count(dtype, shape) for _, dtype, shape in answer["parts"])
        if described < 0:
            raise ValueError("the process answered with a negative size")
        if count > most_bytes or described > most_described:
            raise _too_large(count + described, most_bytes)
        return described + count

    try:
        return process.ask(request, data, size)
    except (EndedError, ValueError, KeyError, TypeError) as error:
        if process.is_killed:
            raise ServiceError(ErrorReason.CANCELLED, "the processing of the inputs was stopped") from None
        raise _ended() from error


def _too_large(byte_count: int, most_bytes: int) -> ServiceError:
    return ServiceError(
        ErrorReason.REQUEST_TOO_LARGE,
        f"the inputs become {byte_count:,} bytes when they are processed, and one call may have "
        f"{most_bytes:,}; send fewer or shorter ones",
        byte_count=str(byte_count),
        limit=str(most_bytes),
    )


def _ended() -> ServiceError:
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        "the process of the model's tokenizer or other processor ended on these inputs; send fewer or "
        "shorter ones",
    )


def _byte_count(dtype: str, shape: Sequence[int]) -> int:
    if any(int(size) < 0 for size in shape):
        raise ValueError("the process answered with a negative shape")
    return _DTYPES[dtype] * math.prod(shape)


def _read(answer: dict[str, Any], data: bytearray, rows: int, *, is_batch: bool) -> Made:
    arrays: dict[str, NDArray[Any]] = {}
    start = 0
    for name, dtype, shape in answer["parts"]:
        end = start + _byte_count(dtype, shape)
        arrays[str(name)] = np.frombuffer(memoryview(data)[start:end], dtype).reshape(shape)
        start = end
    described = json.loads(data[start:])
    samples = tuple(map(_sample, described["samples"]))
    are_rows = not is_batch or all(array.shape[:1] == (rows,) for array in arrays.values())
    if len(samples) != rows or not are_rows:
        raise ValueError("the process answered another request")
    padded_length, pads_left = described.get("padded_length", 0), described.get("pads_left", False)
    return Made(arrays, samples, int(padded_length), bool(pads_left))


def _sample(described: dict[str, Any]) -> ProcessedSample:
    if "length" in described:
        return ProcessedSample(int(described["length"]))
    return ProcessedSample(
        len(described["token_ids"]),
        tuple(map(int, described["token_ids"])),
        tuple(map(str, described["tokens"])),
        tuple(map(int, described["starts"])),
        tuple(map(int, described["ends"])),
        tuple(map(bool, described["is_special"])),
        str(described["rendered"]),
        tuple(map(int, described.get("texts", ()))),
        tuple(map(int, described.get("words", ()))),
        _contents(described.get("contents")),
    )


def _contents(described: Sequence[Sequence[Any]] | None) -> tuple[tuple[str, int, int], ...] | None:
    if described is None:
        return None
    return tuple((str(role), int(start), int(stop)) for role, start, stop in described)
