"""`trocar extract` over data sets, as a process of its own that is killed, and against a real server."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file
from structlog.testing import capture_logs

import trocar
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.models.watched_models import WATCH, Watched
from tests.support.servers import warm_python
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt
from tests.unit.client._export.fakes import tree
from trocar._cli import main
from trocar._cli.options.text_options import read_texts
from trocar._export.job import Progress
from trocar.errors import OutputError
from trocar_server.config import PreprocessingConfig

KILLS = int(os.environ.get("TROCAR_TEST_KILLS", "5"))
"""How often the run is killed; set the variable for a longer test."""
PREPROCESSING = PreprocessingConfig(resize=(), crop=(), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
TAPS = ("--tap", "conv", "--tap", "fc")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"plain": custom(Watched, (3, 8, 8), preprocessing=PREPROCESSING)}
    with capture_logs(), running_server(models=models, device="cpu") as running:
        yield running


def write_pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    for index in range(count):
        Image.fromarray(pixels[index]).save(folder / f"{index:03}.png")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred tiny images; two of them are none."""
    folder = write_pictures(tmp_path_factory.mktemp("source") / "pictures", 200)
    (folder / "071.png").write_bytes(b"no image")
    (folder / "150.png").write_bytes((folder / "150.png").read_bytes()[:60])
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("few") / "pictures", 11)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Trocar = Callable[..., Outcome]


@pytest.fixture
def cli(server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trocar:
    monkeypatch.setenv("TROCAR_SERVER", server.address)

    def run(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run


def killed_again_and_again(
    words: list[str], out: Path, address: str, kills: int, chance: random.Random
) -> None:
    """Run a command until so many kills have hit it, and then until it succeeds."""
    hits = 0
    while True:
        with warm_python.Popen(
            [sys.executable, "-m", "trocar", *words, str(out)],
            env={**os.environ, "TROCAR_SERVER": address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            timers: list[threading.Timer] = []
            if hits < kills:
                # From the moment of a pass of the server, up to 15 ms: it hits any step of the client.
                timers.append(threading.Timer(chance.uniform(0, 0.015), process.kill))
                WATCH.after(chance.randint(1, 6), timers[0].start)
            _, errors = process.communicate(timeout=120)
            WATCH.after(0, int)
            for timer in timers:
                timer.cancel()
        if process.returncode == 0 and hits == kills:
            return
        if process.returncode == 0:
            shutil.rmtree(out)  # it was faster than the kill: once more, from the beginning
            continue
        assert process.returncode == -signal.SIGKILL, errors.decode()
        hits += 1


@pytest.mark.parametrize(
    ("format", "kills"), [("safetensors", KILLS), ("zarr", 2), ("parquet", 2), ("npy", 2)]
)
def test_run_that_is_killed_again_and_again_gives_the_files_of_one_that_is_not(
    server: RunningServer, cli: Trocar, pictures: Path, tmp_path: Path, format: str, kills: int
) -> None:
    words = ["extract", "plain", str(pictures), *TAPS, "--batch", "8", "--shard-size", "20"]
    words += ["--on-error", "skip", "--format", format, "--out"]
    assert cli(*words, tmp_path / "whole").code == 0
    chance = random.Random(f"{format} {kills}")
    killed_again_and_again(words, tmp_path / "out", server.address, kills, chance)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    failed = json.loads((tmp_path / "out" / "manifest.json").read_text())["failed"]
    assert [(entry["key"], entry["reason"]) for entry in failed] == [
        ("071.png", "INVALID_IMAGE"),
        ("150.png", "INVALID_IMAGE"),
    ]


def test_rows_are_those_of_single_calls(
    cli: Trocar, client: trocar.Client, few: Path, tmp_path: Path
) -> None:
    done = cli("extract", "plain", few, *TAPS, "--batch", 4, "--shard-size", 8, "--out", tmp_path / "out")
    assert done.code == 0
    paths = sorted(few.iterdir())
    parts = [client.extract("plain", paths[start : start + 4], ["conv", "fc"]) for start in (0, 4, 8)]
    features = trocar.read_features(tmp_path / "out")
    for name in ("conv", "fc"):
        np.testing.assert_array_equal(features[name], np.concatenate([part[name] for part in parts]))
    first = load_file(tmp_path / "out" / "features-00000.safetensors")
    np.testing.assert_array_equal(first["fc"], features["fc"][:8])
    assert "wrote" in done.out
    assert "11 samples, 2 shards" in done.out


def test_folder_archive_arrays_and_datasets_give_the_same_rows(
    cli: Trocar, client: trocar.Client, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in sorted(few.iterdir()):
            archive.add(path, path.name)
    pixels = np.stack([np.asarray(Image.open(path)) for path in sorted(few.iterdir())])
    np.save(tmp_path / "pixels.npy", pixels)
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(path) for path in sorted(few.iterdir())]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    (tmp_path / "my_pictures.py").write_text(
        "from pathlib import Path\nfrom PIL import Image\n"
        f"def dataset(): return [(Image.open(p), 0) for p in sorted(Path({str(few)!r}).iterdir())]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    sources = [few, "shard.tar", "pixels.npy", f"hf:{tmp_path}/saved", "torch:my_pictures:dataset"]
    found = []
    for number, source in enumerate(sources):
        done = cli("extract", "plain", source, *TAPS, "--batch", 4, "--out", tmp_path / str(number))
        assert done.code == 0, done.err
        found.append(np.asarray(trocar.read_features(tmp_path / str(number))["conv"]))
    decoded = cli("extract", "plain", few, *TAPS, "--batch", 4, "--decode", "client", "--out", tmp_path / "9")
    assert decoded.code == 0
    found.append(np.asarray(trocar.read_features(tmp_path / "9")["conv"]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_arrays_of_the_models_input_are_taken(cli: Trocar, client: trocar.Client, tmp_path: Path) -> None:
    inputs = np.random.default_rng(1).standard_normal((5, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "inputs.npy", inputs)
    assert cli("extract", "plain", tmp_path / "inputs.npy", *TAPS, "--out", tmp_path / "out").code == 0
    features = trocar.read_features(tmp_path / "out")
    np.testing.assert_array_equal(features["fc"], client.extract("plain", inputs, "fc")["fc"])
    assert features.sample_keys[4] == f"{tmp_path}/inputs.npy[4]"


def test_finished_run_says_that_it_was_done(cli: Trocar, few: Path, tmp_path: Path) -> None:
    words = ("extract", "plain", few, *TAPS, "--out", tmp_path / "out")
    first = cli(*words, "--json").json
    assert (first["sample_count"], first["resumed_at"], first["shapes"]["fc"]) == (11, 0, [11, 5])
    again = cli(*words)
    assert again.code == 0
    assert "is complete already: 11 rows, 1 shard" in again.out


def test_other_options_are_refused_and_restart_begins_anew(cli: Trocar, few: Path, tmp_path: Path) -> None:
    words = ("extract", "plain", few, *TAPS, "--out", tmp_path / "out")
    assert cli(*words).code == 0
    done = cli(*words, "--batch", 4)
    assert done.code == 1
    assert "batch: was 16, is now 4" in done.err
    assert cli(*words, "--batch", 4, "--restart").code == 0


def test_sample_that_fails_is_named_with_what_to_do(cli: Trocar, pictures: Path, tmp_path: Path) -> None:
    done = cli("extract", "plain", pictures, *TAPS, "--batch", 8, "--out", tmp_path / "out")
    assert done.code == 1
    assert "[INVALID_IMAGE]" in done.err
    assert "while extracting 064.png to 071.png" in done.err
    assert "image 7 is 071.png" in done.err
    assert "--on-error skip" in done.err
    assert "64 samples are done; run the same command again to resume" in done.err
    assert "Traceback" not in done.err


def test_skipped_samples_are_listed(cli: Trocar, pictures: Path, tmp_path: Path) -> None:
    words = ("extract", "plain", pictures, *TAPS, "--on-error", "skip", "--limit", 100)
    done = cli(*words, "--out", tmp_path / "out")
    assert done.code == 0
    assert "1 sample failed and has no row" in done.err
    assert "071.png: " in done.err


@pytest.mark.parametrize("cast", ["int8", "int8_per_channel"])
def test_a_scale_of_each_batch_is_not_written(
    client: trocar.Client, few: Path, tmp_path: Path, cast: Any
) -> None:
    tap = trocar.tap("conv", cast=cast)
    with pytest.raises(OutputError, match="'conv': the scale of int8 is another one in each batch"):
        trocar.extract_dataset(client, "plain", few, [tap], tmp_path / "out")


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_run_in_which_every_sample_fails_has_failed(
    cli: Trocar, tmp_path: Path, as_json: tuple[str, ...]
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.png").write_bytes(b"no image")
    words = ("extract", "plain", tmp_path / "source", *TAPS, "--on-error", "skip", *as_json)
    assert cli(*words, "--out", tmp_path / "out").code == 1


def test_only_line_ends_separate_texts(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes("\ufefffirst\r\n a\u2028b \n\nlast\x85x\n".encode())
    assert read_texts(["own"], tmp_path / "texts.txt") == ["own", "first", " a\u2028b ", "last\x85x"]


def test_folder_into_one_file_is_what_its_files_are(cli: Trocar, few: Path, tmp_path: Path) -> None:
    words = ("extract", "plain", *TAPS, "--batch", 4)
    assert cli(*words, few, "--limit", 9, "--out", tmp_path / "a.safetensors").code == 0
    assert cli(*words, *sorted(few.iterdir())[:9], "--out", tmp_path / "b.safetensors").code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing", "--out", "out"), "nothing: no such file or folder"),
        (("{few}", "--out", "f.parquet"), "must end in .safetensors, or be a folder"),
        (("{few}", "--out", "f.safetensors", "--format", "zarr"), "need a folder"),
        (("{few}", "--out", "no/f.safetensors"), "no folder no"),
        (("{few}", "--out", "f.safetensors", "--restart"), "need a folder"),
        (("{few}", "--out", "out", "--stats", "mean"), "--stats needs"),
        (("hf:x", "--out", "f.safetensors"), "--out must be a folder"),
        (("{few}", "--out", "out", "--shard-size", "0"), "--shard-size"),
        (("{few}", "--out", "out", "--limit", "0"), "--limit"),
        (("{few}", "--out", "out", "--on-error", "ignore"), "--on-error"),
    ],
)
def test_wrong_command_line_exits_with_2(
    cli: Trocar,
    few: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("extract", "plain", *TAPS, *(word.format(few=few) for word in words))
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".txt"])
def test_a_folder_of_sound_or_texts_is_not_for_a_model_of_images(
    cli: Trocar, tmp_path: Path, suffix: str
) -> None:
    source = tmp_path / "samples"
    source.mkdir()
    (source / f"a{suffix}").write_bytes(b"x")
    done = cli("extract", "plain", source, *TAPS, "--out", tmp_path / "f.safetensors")
    assert (done.code, done.out) == (2, "")
    what = "a text" if suffix == ".txt" else "sound"
    assert f"a{suffix} is {what}, and plain takes images" in " ".join(done.err.split())


def test_a_folder_with_the_name_of_a_file_is_refused_at_once(cli: Trocar, few: Path, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    done = cli("extract", "plain", few, *TAPS, "--out", tmp_path / "x.safetensors")
    assert (done.code, "is a folder" in " ".join(done.err.split())) == (2, True), done.err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torch:no_such_module:x", "No module named"),
        ("empty", "no image below empty"),
        ("broken.tar", "not an uncompressed tar archive"),
    ],
)
def test_source_that_cannot_be_read_is_explained(
    cli: Trocar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.tar").write_bytes(b"x" * 2000)
    done = cli("extract", "plain", source, *TAPS, "--out", "out")
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_model_published_again_is_not_taken_for_the_one_before(serve: Serve, tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((6, *SHAPE)).astype(np.float32)
    out = tmp_path / "out"
    server = serve(models={"tiny": custom(TinyNet, SHAPE)}, data_dir=tmp_path / "data")
    with trocar.connect(server.address) as own, own.train("tiny", seed=1) as trainer:

        def extract() -> trocar.DatasetReport:
            return trocar.extract_dataset(own, "tuned", images, ["fc"], out, batch=2)

        trainer.publish("tuned")
        extract()
        own.unpublish("tuned")
        trainer.publish("tuned")
        assert extract().resumed_at == len(images)  # the weights are the same
        own.unpublish("tuned")
        trainer.step(images, np.array([0, 1, 2, 3, 0, 1]))
        trainer.publish("tuned")
        with pytest.raises(OutputError, match=r"model: other .*weights"):
            extract()
        trocar.extract_dataset(own, "tuned", images, ["fc"], out, batch=2, restart=True)
        expected = np.concatenate([own.extract("tuned", images[at : at + 2], "fc")["fc"] for at in (0, 2, 4)])
        np.testing.assert_array_equal(trocar.read_features(out)["fc"][:], expected)


@pytest.mark.parametrize("is_same", [True, False])
def test_half_a_run_is_not_filled_up_with_rows_of_other_weights(
    serve: Serve, tmp_path: Path, is_same: bool
) -> None:
    """A file of weights is replaced, and the model loaded again."""
    weights, arrays = tmp_path / "own.safetensors", np.ones((6, *SHAPE), np.float32)
    state = rebuilt(TinyNet).state_dict()
    save_file(state, weights)
    server = serve(models={"tiny": custom(TinyNet, SHAPE, weights=str(weights))})
    words: tuple[Any, ...] = ("tiny", arrays, ["fc"], tmp_path / "out")
    with trocar.connect(server.address) as own:
        with pytest.raises(KeyboardInterrupt):
            trocar.extract_dataset(own, *words, batch=2, shard_size=2, progress=stop_at(2))
        own.unload("tiny")
        save_file(state if is_same else {name: value + 1 for name, value in state.items()}, weights)
        own.load("tiny")
        if is_same:
            assert trocar.extract_dataset(own, *words, batch=2, shard_size=2).resumed_at == 2
        else:
            with pytest.raises(OutputError, match=r"model: other .*weights"):
                trocar.extract_dataset(own, *words, batch=2, shard_size=2)


def stop_at(sample_count: int) -> Callable[[Progress], None]:
    """Return a `progress` that stops the run when so many samples are done."""

    def told(progress: Progress) -> None:
        if progress.sample_count >= sample_count:
            raise KeyboardInterrupt

    return told
