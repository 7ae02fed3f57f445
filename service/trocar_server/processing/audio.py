"""Feature extraction from sound by a model's own feature extractor, in a worker process."""

import inspect
import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.processing.sound_lengths import check_sound
from trocar_server.processing.tokenization import MOST_CACHED

Samples = NDArray[np.float32]

_WINDOWS = ("n_samples", "nb_max_samples", "num_max_samples")
"""Attributes with the window in samples: of Whisper's extractor and its like, CLAP's, UnivNet's."""


def extract_features(head: dict[str, Any], clips: Sequence[bytes]) -> dict[str, Any]:
    """Return the arguments and the description of a batch of sound.

    Args:
        head: The sample rates and limits; see `exchange`.
        clips: WAV or FLAC where the rate is 0, float32 samples otherwise.

    Raises:
        ServiceError: `INPUT_REJECTED`, a clip does not decode, or has another rate or several channels;
            `REQUEST_TOO_LARGE`, there is too much; `MODEL_INVALID`, the extractor cannot be loaded.
    """
    extractor = _extractor(head["folder"], head["version"])
    rate = int(extractor.sampling_rate)
    most_s = left_s = float(head["most_s"])
    sounds: list[Samples] = []
    settings, longest = vars(extractor), 0
    for index, (data, own_rate) in enumerate(zip(clips, head["rates"], strict=True)):
        if own_rate:
            sound = _given(index, data, own_rate, rate)
        else:
            sound = _decoded(index, data, rate, left_s, most_s)
        left_s -= len(sound) / rate
        if left_s < 0:
            raise _too_long(most_s)
        _check_window(extractor, index, sound, rate)
        sounds.append(sound)
        longest = max(longest, len(sound))
        check_sound(settings, [longest] * len(clips), head["most_bytes"])  # as soon as it is certain
    _check_chance(extractor, len(sounds))
    try:
        made = extractor(sounds, sampling_rate=rate, return_tensors="np", **_padding(extractor, sounds))
    except Exception as error:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED, f"the model's feature extractor cannot take it: {first_line(error)}"
        ) from error
    taken = head["names"]
    arrays = {name: plain_array(value) for name, value in made.items() if taken is None or name in taken}
    return {"arrays": arrays, "samples": [{"length": len(sound)} for sound in sounds]}


@lru_cache(maxsize=MOST_CACHED)
def _extractor(folder: str, _version: str) -> Any:
    try:
        from transformers import AutoFeatureExtractor

        load: Any = AutoFeatureExtractor.from_pretrained  # untyped (transformers 5.23)
        result = load(folder, local_files_only=True, trust_remote_code=False)
    except ImportError:
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            "this server has no feature extractors; its operator has to install trocar[transformers]",
        ) from None
    except Exception as error:
        problem = first_line(error)
        raise ServiceError(
            ErrorReason.MODEL_INVALID, f"the model's feature extractor cannot be loaded: {problem}"
        ) from error
    if not getattr(result, "sampling_rate", None):
        raise ServiceError(ErrorReason.NO_PREPROCESSING, "the model's feature extractor takes no sound")
    return result


def _padding(extractor: Any, sounds: Sequence[Samples]) -> dict[str, Any]:
    """Return options that make one batch of clips of different lengths; Whisper's has a fixed window."""
    if not hasattr(extractor, "chunk_length"):
        return {"padding": True}
    if _takes_longer(extractor):
        return {"max_length": max(extractor.n_samples, *map(len, sounds))}
    return {}


def _takes_longer(extractor: Any) -> bool:
    """Whether an extractor pads to its window, as Whisper's does, and cuts nothing: Qwen3-ASR's."""
    options = inspect.signature(extractor.__call__).parameters
    is_whole = "truncation" in options and options["truncation"].default is False
    return is_whole and bool(getattr(extractor, "n_samples", None))


def _check_window(extractor: Any, index: int, sound: Samples, rate: int) -> None:
    """Refuse a clip that the extractor would cut without a word."""
    most = _most_samples(extractor, rate)
    if most and len(sound) > most:
        raise _rejected(
            index, f"has {len(sound) / rate:g} s, and the model takes {most / rate:g} s at most; cut it"
        )


def _most_samples(extractor: Any, rate: int) -> float | None:
    """Return the most samples that an extractor does not cut; None for any (transformers 5.23).

    Moss's and dots3-note's make several rows of a longer clip, where a batch needs one for each clip.
    """
    if _takes_longer(extractor):
        return None
    result = [getattr(extractor, name, None) for name in _WINDOWS]
    result.append(rate * getattr(extractor, "default_audio_length", 0))  # CLVP
    options = inspect.signature(extractor.__call__).parameters
    if "truncation" in options and options["truncation"].default is True:  # Gemma 3n
        result.append(getattr(options.get("max_length"), "default", None))
    if type(extractor).__name__ == "ASTFeatureExtractor":  # it cuts frames
        # torchaudio's, where it is installed, have 25 ms each 10 ms; transformers' own have so many samples.
        length, step = (400, 160) if hasattr(extractor, "window") else (rate // 40, rate // 100)
        result.append(length + extractor.max_length * step - 1)
    return min((each for each in result if each and isinstance(each, (int, float))), default=None)


def _check_chance(extractor: Any, count: int) -> None:
    """Refuse several clips where the extractor marks one of them as longer than it is: CLAP's with fusion."""
    if count > 1 and getattr(extractor, "truncation", None) == "fusion":
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            "the model's feature extractor has truncation 'fusion', and of several clips marks one at random "
            "as a long one; send one clip a call",
        )


def _decoded(index: int, data: bytes, rate: int, left_s: float, most_s: float) -> Samples:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without its library
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            "this server cannot read WAV and FLAC; its operator has to install soundfile",
        ) from None

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in ("WAV", "WAVEX", "FLAC"):
                raise _rejected(index, "is neither WAV nor FLAC; convert it to one of these")
            _check_rate(index, file.samplerate, rate)
            if file.channels != 1:
                raise _rejected(index, f"has {file.channels} channels; send one")
            if file.frames > left_s * rate:
                raise _too_long(most_s)
            sound: Samples = np.asarray(file.read(dtype="float32"), np.float32)
    except (soundfile.SoundFileError, OSError, ValueError):
        raise _rejected(index, "cannot be decoded: it is not WAV or FLAC, or it is damaged") from None
    return _checked(index, sound)


def _given(index: int, data: bytes, own_rate: int, rate: int) -> Samples:
    _check_rate(index, own_rate, rate)
    return _checked(index, np.frombuffer(data, "<f4"))


def _checked(index: int, sound: Samples) -> Samples:
    if not sound.size:
        raise _rejected(index, "has no sample")
    if not np.isfinite(sound).all():
        raise _rejected(index, "has samples that are NaN or infinite; remove them")
    return sound


def _check_rate(index: int, own_rate: int, rate: int) -> None:
    if own_rate != rate:
        raise _rejected(
            index, f"has {own_rate:,} samples a second, the model takes {rate:,}; resample it before sending"
        )


def plain_array(value: Any) -> Any:
    """Return an array of a dtype of `exchange`: integers become int64, as torch's callers send them."""
    array = np.ascontiguousarray(value)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def _rejected(index: int, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INPUT_REJECTED, f"clip {index} {problem}", sample=str(index))


def _too_long(limit_s: float) -> ServiceError:
    return ServiceError(
        ErrorReason.REQUEST_TOO_LARGE, f"the clips are longer than {limit_s:g} s together; send fewer"
    )
