"""Sound as inputs: features and values equal those of transformers in this process."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from transformers import WhisperFeatureExtractor

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import running_server
from trocar import Client
from trocar.errors import InputRejectedError, NoPreprocessingError, RequestTooLargeError

LAYER = "model.layers.1"
CLIPS = [np.sin(np.arange(size) / 7).astype(np.float32) for size in (16_000, 4_000)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_models.save_feature_extractor(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    model = {"factory": f"{text_models.__name__}:whisper", "input_shape": (8, 100), "processor": folder}
    with (
        running_server(models={"whisper": model}, limits={"max_audio_s": 3}) as server,
        trocar.connect(server.address) as found,
    ):
        yield found


def expected(folder: Path, clips: list[np.ndarray]) -> np.ndarray:
    """Return the last layer's output on clips, by transformers alone."""
    extractor = WhisperFeatureExtractor.from_pretrained(str(folder))
    features = extractor(clips, sampling_rate=16_000, return_tensors="pt")["input_features"]
    found: list[torch.Tensor] = []
    model = text_models.whisper()
    model.get_submodule(LAYER).register_forward_hook(lambda _, __, value: found.append(value))
    with torch.inference_mode():
        model(features)
    return found[0].numpy()


def encoded(clip: np.ndarray, format_: str, rate: int = 16_000) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, clip, rate, format=format_)
    return sink.getvalue()


def test_values_equal_those_of_transformers(client: Client, folder: Path) -> None:
    maps = client.extract("whisper", trocar.audio(CLIPS, 16_000), [LAYER])
    assert np.array_equal(maps[LAYER], expected(folder, CLIPS))
    assert maps.processed[0].lengths == (16_000, 4_000)
    assert maps.processed[0].arguments == ("input_features",)


@pytest.mark.parametrize("format_", ["WAV", "FLAC"])
def test_files_are_decoded(client: Client, folder: Path, tmp_path: Path, format_: str) -> None:
    path = tmp_path / f"clip.{format_.lower()}"
    path.write_bytes(encoded(CLIPS[0], format_))
    decoded, _ = soundfile.read(path, dtype="float32")
    maps = client.extract("whisper", path, [LAYER])
    assert np.array_equal(maps[LAYER], expected(folder, [decoded]))


def test_another_rate_is_refused_with_both(client: Client) -> None:
    with pytest.raises(InputRejectedError, match="clip 0 has 8,000 samples a second, the model takes 16,000"):
        client.extract("whisper", trocar.audio(CLIPS[1], 8_000), [LAYER])


def test_a_clip_that_would_be_cut_is_refused(client: Client) -> None:
    with pytest.raises(InputRejectedError, match=r"clip 1 has 1\.5 s, and the model takes 1 s"):
        client.extract("whisper", trocar.audio([CLIPS[1], np.zeros(24_000)], 16_000), [LAYER])


def test_damaged_and_stereo_files_are_refused(client: Client, tmp_path: Path) -> None:
    damaged, stereo = tmp_path / "damaged.wav", tmp_path / "stereo.wav"
    damaged.write_bytes(b"RIFF no sound")
    stereo.write_bytes(encoded(np.zeros((100, 2), np.float32), "WAV"))
    with pytest.raises(InputRejectedError, match="cannot be decoded"):
        client.extract("whisper", damaged, [LAYER])
    with pytest.raises(InputRejectedError, match="has 2 channels"):
        client.extract("whisper", stereo, [LAYER])


def test_more_seconds_than_allowed_are_refused(client: Client) -> None:
    with pytest.raises(RequestTooLargeError, match="longer than 3 s together"):
        client.extract("whisper", trocar.audio([CLIPS[0]] * 4, 16_000), [LAYER])
    with pytest.raises(InputRejectedError, match="NaN or infinite"):
        client.extract("whisper", trocar.audio(np.full(160, np.nan), 16_000), [LAYER])


def test_texts_are_refused_by_a_model_of_sound(client: Client) -> None:
    with pytest.raises(NoPreprocessingError, match="no tokenizer, so it takes no texts"):
        client.extract("whisper", "hello", [LAYER])


def clap() -> tuple[Any, Any]:
    """Return a CLAP of text and sound, and its feature extractor."""
    text = transformers.ClapTextConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    sound = transformers.ClapAudioConfig(
        hidden_size=16,
        patch_embeds_hidden_size=8,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        spec_size=64,
        num_mel_bins=64,
        patch_size=4,
        patch_stride=[4, 4],
        window_size=4,
    )
    config = transformers.ClapConfig(
        text_config=text.to_dict(), audio_config=sound.to_dict(), projection_dim=8
    )
    return transformers.ClapModel(config).eval(), transformers.ClapFeatureExtractor(
        truncation="rand_trunc", max_length_s=1, hop_length=960
    )


def encodec() -> tuple[Any, Any]:
    """Return an EnCodec, and its feature extractor, which pads and makes a mask."""
    config = transformers.EncodecConfig(
        num_filters=2, hidden_size=8, codebook_dim=8, codebook_size=16, num_lstm_layers=1
    )
    return transformers.EncodecModel(config).eval(), transformers.EncodecFeatureExtractor()


@pytest.mark.parametrize(
    ("make", "path", "counts", "others"),
    [
        (clap, "audio_projection.linear2", [48_000, 30_000], {"input_ids": np.array([[2, 5, 3]] * 2)}),
        (encodec, "encoder.layers.0", [2_400, 1_200], {}),
    ],
)
def test_masks_and_flags_of_sound_reach_the_model(
    tmp_path: Path, make: Any, path: str, counts: list[int], others: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, extractor = make()
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    clips = [np.random.default_rng(count).normal(size=count).astype(np.float32) for count in counts]
    rate = extractor.sampling_rate
    found: list[torch.Tensor] = []
    model.get_submodule(path).register_forward_hook(lambda _, __, value: found.append(value))
    with torch.inference_mode():
        ids = {name: torch.from_numpy(value) for name, value in others.items()}
        model(**ids, **extractor(clips, sampling_rate=rate, return_tensors="pt"))
    with (
        running_server(models={"own": {"source": f"hf:{tmp_path}"}}, device="cpu") as server,
        trocar.connect(server.address) as own,
    ):
        maps = own.extract("own", {**others, "audio": trocar.audio(clips, rate)}, [path])
    np.testing.assert_array_equal(maps[path], found[0].numpy())
