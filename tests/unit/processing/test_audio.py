"""Sound and transformers' feature extractors: nothing is cut, and nothing is left to chance."""

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.audio import extract_features
from trocar_server.processing.folder import sound_settings
from trocar_server.processing.sound_lengths import made_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:At least one mel filter:UserWarning",
    "ignore:The given NumPy array is not writable:UserWarning",  # dots3-note's extractor reads it
)

RATE = 16_000
WHOLE_WINDOWS: list[tuple[str, dict[str, Any], int]] = [
    ("WhisperFeatureExtractor", {"chunk_length": 1}, RATE),
    ("ClapFeatureExtractor", {"max_length_s": 1, "truncation": "rand_trunc"}, RATE),
    ("ClapFeatureExtractor", {"max_length_s": 1, "truncation": "fusion"}, RATE),
    ("UnivNetFeatureExtractor", {"max_length_s": 1}, RATE),
    ("ClvpFeatureExtractor", {"default_audio_length": 1}, RATE),
    ("ASTFeatureExtractor", {"max_length": 4}, 400 + 4 * 160 - 1),
    ("Gemma3nAudioFeatureExtractor", {}, 480_000),
    ("MossTranscribeDiarizeFeatureExtractor", {"chunk_length": 1}, RATE),
    ("Dots3NoteFeatureExtractor", {"chunk_length": 1}, RATE),
]
"""transformers' class, its options, and the samples of the longest clip that it takes whole."""


COUNTED = [
    ("Wav2Vec2FeatureExtractor", {}),
    ("Wav2Vec2FeatureExtractor", {"return_attention_mask": True}),
    ("EncodecFeatureExtractor", {}),
    ("SeamlessM4TFeatureExtractor", {}),
    ("Speech2TextFeatureExtractor", {}),
    ("SpeechT5FeatureExtractor", {}),
    ("WhisperFeatureExtractor", {"chunk_length": 2}),
    ("ASTFeatureExtractor", {}),
    ("ClapFeatureExtractor", {"max_length_s": 2, "truncation": "rand_trunc"}),
]
HEAD: dict[str, Any] = {"version": "", "names": None, "most_bytes": 1 << 30}


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def saved(folder: Path, kind: str, options: dict[str, Any]) -> Any:
    extractor: Any = getattr(transformers, kind)(**{"sampling_rate": RATE, **options})
    extractor.save_pretrained(str(folder))
    return extractor


def extracted(folder: Path, clips: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """Return the arrays of clips, given as samples."""
    head = {**HEAD, "folder": str(folder), "most_s": 90, "rates": [RATE] * len(clips)}
    found: dict[str, Any] = extract_features(head, [clip.tobytes() for clip in clips])["arrays"]
    return found


@pytest.mark.parametrize("lengths", [(1, 1), (400, 399), (RATE, 400), (2 * RATE, RATE)])
@pytest.mark.parametrize(("kind", "options"), COUNTED)
def test_no_more_is_counted_than_an_extractor_makes(
    tmp_path: Path, kind: str, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    """Of padded clips; so nothing that fits is refused."""
    extractor = saved(tmp_path, kind, options)
    clips = [noise(length, seed) for seed, length in enumerate(lengths)]
    counted = made_bytes(sound_settings(tmp_path), lengths)
    assert counted == made_bytes(vars(extractor), lengths)
    with suppress(ServiceError):  # too short for it, or longer than its window
        assert counted <= sum(array.nbytes for array in extracted(tmp_path, clips).values())


@pytest.mark.parametrize(("kind", "options", "most"), WHOLE_WINDOWS)
def test_a_clip_is_taken_whole_or_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], most: int
) -> None:
    saved(tmp_path, kind, options)
    assert extracted(tmp_path, [noise(most)])
    with pytest.raises(
        ServiceError, match=r"clip 1 has .* s, and the model takes .* s at most; cut it"
    ) as told:
        extracted(tmp_path, [noise(most), noise(most + 1)])
    assert told.value.reason is ErrorReason.INPUT_REJECTED


@pytest.mark.parametrize("counts", [(RATE // 2,), (2 * RATE,), (2 * RATE, RATE // 2, 3 * RATE)])
def test_clips_longer_than_a_window_that_only_pads_are_taken_whole(
    tmp_path: Path, counts: Sequence[int]
) -> None:
    extractor = saved(tmp_path, "Qwen3ASRFeatureExtractor", {"chunk_length": 1})
    clips = [noise(count, seed) for seed, count in enumerate(counts)]
    padded = [
        np.pad(clip, (0, max(RATE, *counts) - len(clip))) for clip in clips
    ]  # not shorter than a window
    expected = extractor(padded, sampling_rate=RATE, return_tensors="np")["input_features"]
    assert extracted(tmp_path, clips)["input_features"].tolist() == np.asarray(expected).tolist()


def test_the_window_of_an_ast_is_that_of_its_frames() -> None:
    """One sample more than the longest clip makes a frame more than the model takes, which is cut."""
    kind, options, most = WHOLE_WINDOWS[5]
    wide: Any = getattr(transformers, kind)(**{**options, "max_length": 8, "do_normalize": False})
    for count, frames in ((most, 4), (most + 1, 5)):
        values = np.asarray(wide(noise(count), sampling_rate=RATE, return_tensors="np")["input_values"])
        assert np.count_nonzero(values[0].any(axis=1)) == frames


@pytest.mark.parametrize("truncation", ["rand_trunc", "fusion"])
def test_a_clap_draws_no_random_number(tmp_path: Path, truncation: str) -> None:
    extractor = saved(tmp_path, "ClapFeatureExtractor", {"max_length_s": 1, "truncation": truncation})
    clip = noise(RATE)
    expected = extractor(clip, sampling_rate=RATE, return_tensors="np")
    arrays = extracted(tmp_path, [clip])
    assert arrays["is_longer"].dtype == bool
    assert {name: value.tolist() for name, value in arrays.items()} == {
        name: np.asarray(value).tolist() for name, value in expected.items()
    }


def test_several_clips_of_a_clap_with_fusion_are_refused(tmp_path: Path) -> None:
    """transformers marks one of them as longer than it is, at random."""
    saved(tmp_path, "ClapFeatureExtractor", {"max_length_s": 1, "truncation": "fusion"})
    with pytest.raises(ServiceError, match=r"at random.*one clip a call") as told:
        extracted(tmp_path, [noise(RATE), noise(RATE // 2)])
    assert told.value.reason is ErrorReason.INPUT_REJECTED


def test_a_file_that_is_too_long_is_told_the_limit_of_a_call(tmp_path: Path) -> None:
    saved(tmp_path, "WhisperFeatureExtractor", {"chunk_length": 30})
    sink = io.BytesIO()
    soundfile.write(sink, noise(2 * RATE), RATE, format="WAV")
    head = {**HEAD, "folder": str(tmp_path), "most_s": 3.0, "rates": [0, 0]}
    with pytest.raises(ServiceError, match="longer than 3 s together") as told:
        extract_features(head, [sink.getvalue()] * 2)
    assert told.value.reason is ErrorReason.REQUEST_TOO_LARGE
