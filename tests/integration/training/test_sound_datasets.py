"""Data sets of sound and folders of texts: fits equal the same epochs with transformers and torch alone."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, ClassLabel, Dataset
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    BertForSequenceClassification,
    Wav2Vec2ForAudioFrameClassification,
    WhisperFeatureExtractor,
    WhisperForAudioClassification,
)

import trocar
from tests.support.models.text_models import WORDS, save_text_classifier, save_wav2vec2, save_whisper
from tests.support.models.transformers_folders import realigned
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main
from trocar.errors import DatasetInvalidError, FitInvalidError, SourceError, TargetRejectedError

RATE, BATCH = 16_000, 3
CLASSES = ("bird", "siren")
REVIEWS = ["the cat", "a dog sat on the mat", "hello", "cat sat", "the mat", "a hello dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    whisper = save_whisper(tmp_path_factory.mktemp("whisper"))
    bert = save_text_classifier(tmp_path_factory.mktemp("bert"), BertForSequenceClassification)
    frames = save_wav2vec2(tmp_path_factory.mktemp("frames"), Wav2Vec2ForAudioFrameClassification)
    return {"whisper": whisper, "bert": bert, "frames": frames}


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the operator lists: one of sound with transcripts, one of texts."""
    root = tmp_path_factory.mktemp("listed")
    _save_sound(root / "sounds", _clips())
    for index, text in enumerate(REVIEWS):
        folder = root / "reviews" / ("bad", "good")[index // 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.txt").write_text(text, encoding="utf-8-sig" if index == 1 else "utf-8")
    return root


@pytest.fixture(scope="module")
def running(folders: dict[str, Path], listed: Path) -> Iterator[RunningServer]:
    models: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    datasets = {name: {"path": listed / name} for name in ("sounds", "reviews")}
    with running_server(models=models, device="cpu", limits={"max_audio_s": 4}, datasets=datasets) as started:
        yield started


def _clips(count: int = 7) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        random.standard_normal(size).astype(np.float32) / 4
        for size in random.integers(4_000, 16_000, count).tolist()
    ]


def _save_sound(root: Path, clips: list[Any]) -> tuple[list[Any], list[int]]:
    """Save clips by class, as WAV and FLAC; return what is read of them, in the order of a folder."""
    for number, clip in enumerate(clips):
        folder = root / CLASSES[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "flac" if number % 3 else "wav"
        soundfile.write(folder / f"{number}.{suffix}", clip, RATE)
        (folder / f"{number}.txt").write_text("a transcript, which is left out")
    files = [
        (path, label)
        for label, name in enumerate(CLASSES)
        for path in sorted((root / name).glob("*"))
        if path.suffix != ".txt"
    ]
    return [soundfile.read(path, dtype="float32")[0] for path, _ in files], [label for _, label in files]


def _fitted_plainly(folder: Path, clips: list[Any], labels: list[int]) -> Any:
    """Run one epoch in order with transformers and torch alone."""
    extractor: Any = WhisperFeatureExtractor.from_pretrained(str(folder))
    model = realigned(WhisperForAudioClassification.from_pretrained(folder))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    for start in range(0, len(clips), BATCH):
        features = extractor(clips[start : start + BATCH], sampling_rate=RATE, return_tensors="pt")
        optimizer.zero_grad()
        logits = model(features["input_features"]).logits
        cross_entropy(logits, torch.tensor(labels[start : start + BATCH])).backward()
        optimizer.step()
    return model


def _assert_weights(trainer: trocar.training.Trainer, model: Any, path: Path) -> None:
    found = load_file(trainer.export(path))
    expected = model.state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def _trainer(client: trocar.Client, model: str) -> trocar.training.Trainer:
    return client.train(model, losses="cross_entropy", optimizer=trocar.training.sgd(lr=0.1), seed=0)


def test_a_fit_on_a_folder_of_sound_equals_torch(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    clips, labels = _save_sound(tmp_path / "sounds", _clips())
    dataset = client.upload_dataset(tmp_path / "sounds")
    assert (dataset.has_sound, dataset.has_images, dataset.has_texts, dataset.inputs) == (
        True,
        False,
        False,
        None,
    )
    assert (dataset.sample_count, client.dataset(dataset.dataset_id).categories) == (7, CLASSES)
    with _trainer(client, "whisper") as trainer:
        history = trainer.fit(dataset, batch_size=BATCH, shuffle=False, eval=dataset)
        assert history.outcome == "finished"
        assert 0 <= history.evaluations[-1]["metrics"]["accuracy"] <= 1
        model = _fitted_plainly(folders["whisper"], clips, labels)
        _assert_weights(trainer, model, tmp_path / "fitted.safetensors")


def test_the_operators_folders_of_sound_and_texts_are_trained_on(
    client: trocar.Client, folders: dict[str, Path], listed: Path, tmp_path: Path
) -> None:
    found = {dataset.dataset_id: dataset for dataset in client.datasets() if dataset.is_listed}
    assert (found["sounds"].has_sound, found["sounds"].sample_count) == (True, 7)
    assert found["reviews"].has_texts
    assert client.dataset("reviews").categories == ("bad", "good")
    files = sorted((listed / "sounds").glob("*/*.wav")) + sorted((listed / "sounds").glob("*/*.flac"))
    files.sort(key=lambda path: path.relative_to(listed).as_posix())
    clips = [soundfile.read(path, dtype="float32")[0] for path in files]
    labels = [CLASSES.index(path.parent.name) for path in files]
    with _trainer(client, "whisper") as trainer:
        trainer.fit("sounds", batch_size=BATCH, shuffle=False)
        _assert_weights(
            trainer, _fitted_plainly(folders["whisper"], clips, labels), tmp_path / "w.safetensors"
        )
    with _trainer(client, "bert") as trainer:
        losses = trainer.fit("reviews", batch_size=6, shuffle=False).losses
    with _trainer(client, "bert") as trainer:
        assert losses[0] == trainer.step(REVIEWS, [0, 0, 0, 1, 1, 1]).loss


@pytest.mark.parametrize("form", ["wav", "flac", "path", "samples", "objects"])
def test_sound_of_a_hugging_face_dataset_is_that_of_its_clips(
    client: trocar.Client, tmp_path: Path, form: str
) -> None:
    clips, labels = _clips(4), [0, 1, 1, 0]
    values: list[dict[str, Any]]
    if form in ("wav", "flac", "path"):
        suffix = "flac" if form == "flac" else "wav"
        paths = [tmp_path / f"{index}.{suffix}" for index in range(4)]
        for path, clip in zip(paths, clips, strict=True):
            soundfile.write(path, clip, RATE)
        values = [
            {"bytes": None if form == "path" else path.read_bytes(), "path": str(path)} for path in paths
        ]
        expected: Any = paths
    else:
        values = [{"array": clip, "sampling_rate": RATE} for clip in clips]
        expected = trocar.audio(clips, RATE)
    given: Any = Dataset.from_dict({"audio": values, "label": labels})
    given = given.cast_column("label", ClassLabel(names=list(CLASSES)))
    if "bytes" in values[0]:
        given = given.cast_column("audio", Audio(sampling_rate=RATE))
    if form == "objects":
        given = [(trocar.audio(clip, RATE), label) for clip, label in zip(clips, labels, strict=True)]
    dataset = client.upload_dataset(given, name="clips", categories=CLASSES)
    assert (dataset.has_sound, dataset.sample_count, dataset.categories) == (True, 4, CLASSES)
    same = client.upload_dataset((expected, labels), name="clips", categories=CLASSES)
    assert same.dataset_id == dataset.dataset_id  # the same bytes in all shards


def test_other_formats_of_sound_are_refused_with_the_row(client: trocar.Client) -> None:
    values = [{"bytes": b"ID3\x04 an mp3", "path": ""}]
    given = Dataset.from_dict({"audio": values}).cast_column("audio", Audio())
    with pytest.raises(SourceError, match="sample 0: it is neither WAV nor FLAC; convert it"):
        client.upload_dataset(given)


@pytest.mark.parametrize("form", ["arrays", "files"])
def test_clips_in_memory_and_lists_of_files_are_data_sets(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path, form: str
) -> None:
    clips, labels = _clips(4), [0, 1, 1, 0]
    if form == "files":
        paths = [tmp_path / f"{index}.wav" for index in range(4)]
        for path, clip in zip(paths, clips, strict=True):
            soundfile.write(path, clip, RATE, subtype="FLOAT")
        given: Any = (paths, labels)
    else:
        given = (trocar.audio(clips, RATE), labels)
    with _trainer(client, "whisper") as trainer:
        history = trainer.fit(given, batch_size=BATCH, shuffle=False)
        assert history.outcome == "finished"
        model = _fitted_plainly(folders["whisper"], clips, labels)
        _assert_weights(trainer, model, tmp_path / "fitted.safetensors")


def test_a_folder_of_texts_is_the_data_set_of_its_texts(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    texts = [" ".join(random.choice(WORDS[:7], size=1 + index % 5)) for index in range(6)]
    for index, text in enumerate(texts):
        folder = tmp_path / "reviews" / ("bad", "good")[index // 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.txt").write_text(text, encoding="utf-8-sig" if index == 1 else "utf-8")
    (tmp_path / "reviews" / "good" / "readme.md").write_text("left out")
    dataset = client.upload_dataset(tmp_path / "reviews")
    assert dataset.has_texts
    assert client.dataset(dataset.dataset_id).categories == ("bad", "good")
    labels = [0, 0, 0, 1, 1, 1]
    same = client.upload_dataset((texts, labels), name="reviews", categories=("bad", "good"))
    assert same.dataset_id == dataset.dataset_id  # the same manifest
    tokenizer: Any = AutoTokenizer.from_pretrained(folders["bert"])
    model: Any = BertForSequenceClassification.from_pretrained(folders["bert"])
    torch.manual_seed(0)  # dropout's, as the trainer's
    with torch.no_grad():
        logits = model.train()(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    with _trainer(client, "bert") as trainer:
        history = trainer.fit(dataset, batch_size=6, shuffle=False)
    wanted = cross_entropy(logits, torch.tensor(labels)).item()
    assert history.losses[0] == pytest.approx(wanted, rel=1e-5)


def test_folders_of_sound_and_texts_are_trained_on_from_the_command_line(
    running: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", running.address)
    _save_sound(tmp_path / "sounds", _clips(4))
    for name in ("a", "b"):
        (tmp_path / "words" / name).mkdir(parents=True)
        (tmp_path / "words" / name / "1.txt").write_text(WORDS[0])

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        captured = capsys.readouterr()
        assert not stopped.value.code, captured.err
        return captured.out

    run("train", "whisper", str(tmp_path / "sounds"), "--batch", "2")
    run("train", "bert", str(tmp_path / "words"), "--batch", "2")
    run("datasets", "upload", str(tmp_path / "sounds"))
    listed = run("datasets", "list")
    assert "sound" in listed
    assert "texts" in listed


def test_sound_that_cannot_be_used_is_refused_with_its_place(client: trocar.Client, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    (damaged / "bird").mkdir(parents=True)
    (damaged / "bird" / "1.wav").write_bytes(b"no sound")
    with pytest.raises(DatasetInvalidError, match="clip 0 of a shard cannot be used: it is neither a WAV"):
        client.upload_dataset(damaged)
    quiet = np.zeros(20_000, np.float32)
    slow, long = trocar.audio([quiet] * 2, 8_000), trocar.audio([quiet[:4_000], quiet], RATE)
    with _trainer(client, "whisper") as trainer:
        with pytest.raises(FitInvalidError, match=r"sample 0 of the data set .*: clip 0 has 8,000 samples"):
            trainer.fit((slow, [0, 1]), batch_size=1, shuffle=False)
        with pytest.raises(FitInvalidError, match=r"sample 1 .*: clip 1 has 1\.25 s, .* takes 1 s"):
            trainer.fit((long, [0, 1]), batch_size=2, shuffle=False)
    with (
        _trainer(client, "bert") as trainer,
        pytest.raises(FitInvalidError, match="no feature extractor, so it takes no sound"),
    ):
        trainer.fit((trocar.audio(_clips(2), RATE), [0, 1]), batch_size=2)
    with pytest.raises(ValueError, match="there are 2 clips, and targets for 3; each clip has one"):
        client.upload_dataset((trocar.audio(_clips(2), RATE), [0, 1, 1]))


def test_folders_that_are_no_data_set_are_refused(client: trocar.Client, tmp_path: Path) -> None:
    for folder, name, data in (
        ("empty", "1.txt", b""),
        ("latin", "1.txt", "caf\u00e9".encode("latin-1")),
        ("short", "1.txt", b"a"),
        ("nothing", "1.md", b"a"),
    ):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / name).write_bytes(data)
    (tmp_path / "short" / "b").mkdir()
    for folder, message in (
        ("empty", "1.txt is empty, not a text"),
        ("latin", r"1.txt is no text in UTF-8 \(byte 3\)"),
        ("short", "no text below .*b: other classes have .txt files, it has none"),
        ("nothing", "no image below"),
    ):
        with pytest.raises(SourceError, match=message):
            client.upload_dataset(tmp_path / folder)


def _frame_scores(folder: Path, clip: Any) -> torch.Tensor:
    """Compute the scores (1, frames, 2) of a clip's frames with transformers alone."""
    extractor: Any = AutoFeatureExtractor.from_pretrained(folder)
    model = realigned(Wav2Vec2ForAudioFrameClassification.from_pretrained(folder)).eval()
    with torch.no_grad():
        scores: torch.Tensor = model(**extractor([clip], sampling_rate=RATE, return_tensors="pt")).logits
    return scores


def test_targets_of_frames_may_be_of_clips_of_any_length(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    random = np.random.default_rng(1)
    for size in (6_000, 16_000):
        clip = random.standard_normal(size).astype(np.float32)
        scores, given = _frame_scores(folders["frames"], clip), trocar.audio([clip], RATE)
        targets, labels = random.random(scores.shape, np.float32), random.integers(0, 2, scores.shape[:2])
        with client.train(
            "frames", losses="bce_with_logits", optimizer=trocar.training.sgd(lr=0.1)
        ) as trainer:
            wanted = binary_cross_entropy_with_logits(scores, torch.from_numpy(targets)).item()
            assert trainer.evaluate(given, targets).loss == pytest.approx(wanted, rel=1e-5)
            with pytest.raises(TargetRejectedError, match=rf"that of the value, \(1, {scores.shape[1]}, 2\)"):
                trainer.step(given, targets[:, 1:])
            assert trainer.fit((given, targets), batch_size=1).outcome == "finished"
        losses: list[Any] = ["token_cross_entropy", trocar.training.loss_term("mse", teacher="frames")]
        with client.train("frames", losses=losses, optimizer=trocar.training.sgd(lr=0.1)) as trainer:
            wanted = cross_entropy(scores[0], torch.from_numpy(labels[0])).item()
            assert trainer.evaluate(given, labels).loss == pytest.approx(wanted, rel=1e-5)
            assert trainer.step(given, labels).is_update
