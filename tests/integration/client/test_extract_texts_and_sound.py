"""Data sets of texts and of sound: rows without padding, equal to those of transformers in this process."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from transformers import (
    AutoModel,
    AutoTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperFeatureExtractor,
    WhisperForAudioClassification,
)

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar import Client
from trocar._cli import main
from trocar._export.options import FormatName
from trocar.errors import InputRejectedError, SourceError

LAYER = "encoder.layer.3"
TEXTS = [
    "the cat sat",
    "a dog sat on the mat, and then it went on to the garden",
    "hello",
    "one two three four five six",
    "cats",
    "an unpadded line",
    "the end",
]
RATE = 16_000
CLIPS = [np.sin(np.arange(size) / 7).astype(np.float32) for size in (4_000, 4_000, 6_000, 8_000, 4_000)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sound = tmp_path_factory.mktemp("wav2vec2")
    window = tmp_path_factory.mktemp("whisper")
    text_models.save_wav2vec2(sound)
    text_models.save_whisper(window)
    return {"mini": text_models.minilm_folder(), "wav2vec2": sound, "whisper": window}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    models = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    with capture_logs(), running_server(models=models) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with trocar.connect(server.address) as found:
        yield found


def expected_texts(folder: Path, batch: Sequence[str]) -> list[np.ndarray]:
    """Return the layer's tokens of each text of one batch, by transformers alone."""
    model, found = AutoModel.from_pretrained(str(folder)).eval(), []
    tokenized = AutoTokenizer.from_pretrained(str(folder))(list(batch), padding=True, return_tensors="pt")
    handle = model.get_submodule(LAYER).register_forward_hook(lambda _, __, value: found.append(value))
    with torch.inference_mode():
        model(**tokenized)
    handle.remove()
    values = found[0][0] if isinstance(found[0], tuple) else found[0]
    mask = tokenized["attention_mask"] != 0
    return [value[own].numpy() for value, own in zip(values, mask, strict=True)]


def expected_sound(folder: Path, layer: str, clip: np.ndarray) -> np.ndarray:
    """Return the layer's frames of one clip, by transformers alone."""
    model, found = Wav2Vec2Model.from_pretrained(str(folder)).eval(), []
    model.get_submodule(layer).register_forward_hook(lambda _, __, value: found.append(value))
    features = Wav2Vec2FeatureExtractor.from_pretrained(str(folder))(
        clip, sampling_rate=RATE, return_tensors="pt"
    )
    with torch.inference_mode():
        model(features["input_values"])
    frames: np.ndarray = (found[0][0] if isinstance(found[0], tuple) else found[0])[0].numpy()
    return frames


@pytest.mark.parametrize("format", ["safetensors", "npy", "zarr", "parquet"])
def test_tokens_equal_those_of_transformers_without_padding(
    client: Client, folders: dict[str, Path], tmp_path: Path, format: FormatName
) -> None:
    mean = trocar.tap("encoder.layer.2", reduce=trocar.pool("avg"), alias="mean")
    taps: list[Any] = [LAYER, "encoder.layer.0.attention/pattern", mean, "/in(input_ids)"]
    report = trocar.extract_dataset(
        client, "mini", TEXTS, taps, tmp_path, batch=3, shard_size=3, format=format
    )
    assert report.shapes[LAYER] == (7, -1, 384)
    features = trocar.read_features(tmp_path)
    expected = [
        row for start in (0, 3, 6) for row in expected_texts(folders["mini"], TEXTS[start : start + 3])
    ]
    for found, own in zip(features[LAYER], expected, strict=True):
        np.testing.assert_array_equal(found, own)
    lengths = [len(own) for own in expected]
    assert [row.shape for row in features["encoder.layer.0.attention/pattern"]] == [
        (12, size, size) for size in lengths
    ]
    assert [row.shape for row in features["/in"]] == [(size,) for size in lengths]
    assert features["mean"].shape == (7, 384)
    chosen = features[LAYER][[6, 1]]
    np.testing.assert_array_equal(chosen[0], expected[6])
    np.testing.assert_array_equal(chosen[1], expected[1])
    with pytest.raises(ValueError, match="the rows differ in size"):
        np.asarray(features[LAYER], np.float32)


def test_a_shard_holds_the_tokens_of_all_rows_and_the_shape_of_each(client: Client, tmp_path: Path) -> None:
    trocar.extract_dataset(client, "mini", trocar.texts(TEXTS), LAYER, tmp_path)
    arrays = load_file(tmp_path / "features-00000.safetensors")
    shapes = arrays[f"{LAYER}#shapes"]
    assert arrays[LAYER].shape == (shapes[:, 0].sum(), 384)
    assert shapes.tolist() == [[len(row), 384] for row in trocar.read_features(tmp_path)[LAYER]]


def write(kind: str, place: Path) -> Any:
    """Write the texts as a source of a kind."""
    if kind == "folder":
        for index, text in enumerate(TEXTS):
            (place / f"{index}.txt").write_text(text)
        return place
    if kind == "jsonl":
        rows = [json.dumps({"text": text, "label": index}) for index, text in enumerate(TEXTS)]
        (place / "rows.jsonl").write_text("\n".join(rows))
        return place / "rows.jsonl"
    import datasets

    dataset = datasets.Dataset.from_dict({"sentence": TEXTS, "label": list(range(len(TEXTS)))})
    if kind == "parquet":
        dataset.to_parquet(place / "rows.parquet")
        return place / "rows.parquet"
    if kind == "saved":
        dataset.save_to_disk(str(place / "saved"))
        return f"hf:{place / 'saved'}::sentence"
    return dataset


@pytest.mark.parametrize("kind", ["folder", "jsonl", "parquet", "saved", "huggingface"])
def test_every_source_of_texts_gives_the_same_rows(client: Client, tmp_path: Path, kind: str) -> None:
    (tmp_path / "source").mkdir()
    trocar.extract_dataset(client, "mini", TEXTS, LAYER, tmp_path / "memory", batch=4)
    trocar.extract_dataset(client, "mini", write(kind, tmp_path / "source"), LAYER, tmp_path / "out", batch=4)
    found, expected = trocar.read_features(tmp_path / "out"), trocar.read_features(tmp_path / "memory")
    for one, other in zip(found[LAYER], expected[LAYER], strict=True):
        np.testing.assert_array_equal(one, other)


def test_pairs_of_a_table_are_chosen_by_columns(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("question,answer\nis it?,it is\nwho,the cat\n")
    trocar.extract_dataset(client, "mini", path, LAYER, tmp_path / "out", column="question,answer")
    maps = client.extract("mini", trocar.texts([("is it?", "it is"), ("who", "the cat")]), [LAYER])
    for found, expected in zip(
        trocar.read_features(tmp_path / "out")[LAYER], maps.samples(LAYER), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(SourceError, match="has no column 'other'; available: question, answer"):
        trocar.extract_dataset(client, "mini", path, LAYER, tmp_path / "out2", column="other")


def test_long_texts_fail_by_name_or_are_cut(client: Client, tmp_path: Path) -> None:
    long = [*TEXTS[:2], "many words " * 300]
    with pytest.raises(InputRejectedError) as caught:
        trocar.extract_dataset(client, "mini", long, LAYER, tmp_path / "stop")
    assert "text 2 is 2" in caught.value.__notes__
    report = trocar.extract_dataset(client, "mini", long, LAYER, tmp_path / "skip", on_error="skip")
    assert [failure.key for failure in report.failed] == ["2"]
    trocar.extract_dataset(client, "mini", long, LAYER, tmp_path / "cut", truncate=True, max_tokens=8)
    assert max(map(len, trocar.read_features(tmp_path / "cut")[LAYER])) == 8


@pytest.mark.parametrize("kind", ["memory", "wav", "flac"])
def test_clips_are_never_padded(client: Client, folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    source: Any = trocar.audio(CLIPS, RATE)
    clips = CLIPS
    if kind != "memory":
        source = tmp_path / "clips"
        source.mkdir()
        for index, clip in enumerate(CLIPS):
            subtype = "FLOAT" if kind == "wav" else "PCM_24"
            soundfile.write(source / f"{index}.{kind}", clip, RATE, subtype=subtype)
        clips = [soundfile.read(source / f"{i}.{kind}", dtype="float32")[0] for i in range(len(CLIPS))]
    layer = "encoder.layers.1"
    taps: list[Any] = [layer, trocar.tap(layer, reduce=trocar.pool("avg"), alias="mean")]
    report = trocar.extract_dataset(client, "wav2vec2", source, taps, tmp_path / "out", batch=4)
    assert report.shapes == {layer: (5, -1, 16), "mean": (5, 16)}
    features = trocar.read_features(tmp_path / "out")
    for found, mean, clip in zip(features[layer], features["mean"], clips, strict=True):
        expected = expected_sound(folders["wav2vec2"], layer, clip)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mean, expected.mean(0), rtol=1e-4, atol=1e-5)


def test_windows_of_one_length_are_batched(client: Client, folders: dict[str, Path], tmp_path: Path) -> None:
    taps = ["encoder.layers.1"]
    trocar.extract_dataset(client, "whisper", trocar.audio(CLIPS, RATE), taps, tmp_path, batch=5)
    features = WhisperFeatureExtractor.from_pretrained(str(folders["whisper"]))(
        CLIPS, sampling_rate=RATE, return_tensors="pt"
    )["input_features"]
    model, found = WhisperForAudioClassification.from_pretrained(str(folders["whisper"])).eval(), []
    model.get_submodule(taps[0]).register_forward_hook(lambda _, __, value: found.append(value))
    with torch.inference_mode():
        model(features)
    values = found[0][0] if isinstance(found[0], tuple) else found[0]
    np.testing.assert_array_equal(np.asarray(trocar.read_features(tmp_path)[taps[0]]), values.numpy())


def test_the_command_line_takes_texts_and_tables(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    (tmp_path / "rows.csv").write_text("title,body\nx,the cat sat\ny,hello\n")
    words = ["extract", "mini", str(tmp_path / "rows.csv"), "--column", "body", "--tap", LAYER]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(tmp_path / "table")])
    assert stopped.value.code == 0
    assert "(2, *, 384)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                *words[:2],
                "--text",
                "the cat sat",
                "--text",
                "hello",
                *words[-2:],
                "--out",
                str(tmp_path / "texts"),
            ]
        )
    assert stopped.value.code == 0
    found, expected = (trocar.read_features(tmp_path / name)[LAYER] for name in ("texts", "table"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--limit", "1"), 0), (("--truncate", "--max-tokens", "4"), 0), (("--column", "body"), 2)],
)
def test_options_of_texts_that_go_into_one_file(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str], code: int
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    out = tmp_path / "texts.safetensors"
    words = ["extract", "mini", "--text", "the cat sat", "--text", "hello", "--tap", LAYER, *options]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(out)])
    assert stopped.value.code == code
    if code == 0:
        assert len(load_file(out)[LAYER]) == (1 if "--limit" in options else 2)


@pytest.mark.parametrize(
    ("model_id", "suffix"), [("wav2vec2", ".wav"), ("wav2vec2", ".flac"), ("mini", ".txt")]
)
def test_a_folder_of_sound_or_texts_needs_a_folder(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_id: str,
    suffix: str,
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    source = tmp_path / "samples"
    source.mkdir()
    (source / f"a{suffix}").write_bytes(b"x")
    words = ["extract", model_id, str(source), "--tap", "/out", "--out", str(tmp_path / "f.safetensors")]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "samples differ in length, so --out must be a folder" in " ".join(capsys.readouterr().err.split())
