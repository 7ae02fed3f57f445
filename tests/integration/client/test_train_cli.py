"""`trocar train` and `trocar trainers` against a real server: arguments in, text, files and exit code out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import trocar
from tests.integration.client.test_cli import Outcome, Trocar
from tests.support.servers import warm_python
from tests.support.servers.running_server import running_server
from trocar._cli import main
from trocar._cli.options import connection_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.running_server import RunningServer

CLASSES = ("daisy", "rose", "tulip")
PREPROCESSING = {"resize": (32,), "crop": (32,)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = {"architecture": "resnet18", "weights": "random:0", "preprocessing": PREPROCESSING}
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models={"resnet18": model}, device="cpu", data_dir=data_dir) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected
        for info in connected.trainers():
            connected.trainer(info.trainer_id).close()


@pytest.fixture
def cli(
    server: RunningServer,
    client: trocar.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Trocar:
    """Run `trocar` with these words, connected to the server."""
    monkeypatch.setenv("TROCAR_SERVER", server.address)

    def run(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run


def make_folder(folder: Path, count: int, seed: int) -> Path:
    """Make a folder of class folders; each class has a colour of its own."""
    random = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = random.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            pixels[..., label] += 180
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images") / "flowers", 4, 0)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images") / "others", 2, 1)


def test_the_command_of_the_readme_does_all_that_it_says(
    cli: Trocar, client: trocar.Client, flowers: Path, others: Path, tmp_path: Path
) -> None:
    export, history = tmp_path / "f.safetensors", tmp_path / "h.jsonl"
    train = ("train", "resnet18", flowers, "--head", 3, "--trainable", "layer4", "fc")
    options = ("--clamp", "fc.*=-0.1:0.1", "layer4.**=:0.5", "--spool", "1MiB", "--epochs", 3, "--batch", 6)
    results = ("--publish", "flowers", "--export", export, "--history", history)
    done = cli(*train, *options, "--eval", others, "--lr", 0.01, *results)
    assert done.code == 0, done.err
    assert done.out.count("accuracy") == 4
    assert ", on 6 samples\n" in done.out
    assert "--eval-split" not in done.err
    assert f"wrote {history}" in done.out
    assert f"wrote {export} (" in done.out
    assert "published flowers" in done.out
    assert "layer4" not in done.err
    told = trocar.training.History.load(history)
    assert (told.outcome, len(told.losses), len(told.evaluations)) == ("finished", 6, 3)
    assert set(told.of_kind("step")[0]["changed"]) == {"0", "1"}
    weights = load_file(export)
    assert weights["fc.weight"].shape == (3, 512)
    assert client.model("flowers").categories == CLASSES
    picture = str(others / "rose" / "0.png")
    assert client.extract("flowers", picture, taps="/out")["/out"].shape == (1, 3)
    assert client.trainers() == []
    assert cli("trainers", "unpublish", "flowers").out == "removed flowers\n"


def test_a_trainer_that_is_kept_can_be_looked_at_exported_published_and_closed(
    cli: Trocar, client: trocar.Client, flowers: Path, tmp_path: Path
) -> None:
    done = cli("train", "resnet18", flowers, "--head", 3, "--trainable", "fc", "--keep")
    assert done.code == 0, done.err
    (info,) = client.trainers()
    name = info.trainer_id
    assert f"trainer {name} stays on the server until {info.expires_at:%Y-%m-%d}" in done.out
    assert name in cli("trainers", "list").out
    listed = cli("trainers", "list", "--json").json
    assert [(entry["trainer_id"], entry["state"]) for entry in listed] == [(name, "ready")]
    shown = cli("trainers", "show", name).out
    assert "checkpoint 1" in shown
    assert "1,539 of" in shown
    watched = cli("trainers", "watch", name)
    assert watched.out.splitlines()[-1] == "finished"
    assert "epoch 1: loss" in watched.out
    assert cli("trainers", "export", name, tmp_path / "t.safetensors", "--optimizer").code == 0
    assert any(key.startswith("optimizer.") for key in load_file(tmp_path / "t.safetensors"))
    assert cli("trainers", "publish", name, "kept").out == "published kept\n"
    assert cli("trainers", "unpublish", "kept").code == 0
    assert cli("trainers", "close", name).out == f"closed {name}\n"
    assert "you have no trainers" in cli("trainers", "list").out
    gone = cli("trainers", "close", name)
    assert (gone.code, "UNKNOWN_TRAINER" in gone.err) == (1, True)


def test_a_result_that_is_saved_nowhere_stays_on_the_server_and_every_command_for_it_works(
    cli: Trocar,
    client: trocar.Client,
    server: RunningServer,
    flowers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TROCAR_SERVER")
    done = cli("train", "resnet18", flowers, "--head", 3, "--trainable", "fc", "--server", server.address)
    assert done.code == 0, done.err
    (info,) = client.trainers()
    commands = dict(line.strip().split(":", 1) for line in done.out.splitlines() if line.startswith("  "))
    assert list(commands) == ["publish", "export", "continue", "close"]
    for name, line in commands.items():
        words = shlex.split(line)
        if name == "continue":
            subprocess.run([sys.executable, *words[1:]], check=True)
            assert client.trainer(info.trainer_id).info().update_count == 2 * info.update_count
        else:
            assert words[0] == "trocar"
            ended = cli(*words[1:])
            assert ended.code == 0, ended.err
    assert client.model("resnet18-tuned").categories == CLASSES
    assert load_file(tmp_path / "resnet18-tuned.safetensors")["fc.weight"].shape == (3, 512)
    assert client.trainers() == []
    client.unpublish("resnet18-tuned")


@pytest.mark.parametrize(
    ("words", "is_kept"),
    [
        ((), True),
        (("--keep",), True),
        (("--no-keep",), False),
        (("--export", "w.safetensors"), False),
        (("--export", "w.safetensors", "--keep"), True),
    ],
)
def test_the_end_as_json_says_where_the_result_is(
    cli: Trocar,
    client: trocar.Client,
    flowers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    is_kept: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("train", "resnet18", flowers, "--head", 3, "--trainable", "fc", "--json", *words)
    assert done.code == 0, done.err
    told = done.json
    kept = [info.trainer_id for info in client.trainers()]
    assert kept == ([told["trainer_id"]] if is_kept else [])
    assert bool(told["commands"]) == bool(told["expires_at"]) == is_kept
    assert (told["outcome"], told["published"], told["history"]) == ("finished", None, None)
    assert told["exported"] == ("w.safetensors" if "--export" in words else None)
    assert 0 <= told["evaluation"]["metrics"]["accuracy"] <= 1
    assert "epoch 1: loss" in done.err


def test_commands_connect_as_the_one_that_said_them() -> None:
    """But for the token, which would be read off the screen."""
    given = {"server": "gpu1", "token": "secret", "tls": False, "cert": Path("a b.pem"), "key": Path("k.pem")}
    connection_options._chosen.set(given)
    words = ["--server", "gpu1", "--cert", "a b.pem", "--key", "k.pem"]
    assert connection_options.connection_words() == words
    code = "trocar.connect('gpu1', tls=trocar.TlsOptions(certificate='a b.pem', key='k.pem'))"
    assert connection_options.connection_code() == code
    connection_options._chosen.set({"tls": True, "profile": "lab"})
    assert connection_options.connection_words() == ["--profile", "lab", "--tls"]
    assert connection_options.connection_code() == "trocar.connect(tls=True, profile='lab')"


def test_a_fit_can_be_paused_resumed_and_cancelled(cli: Trocar, client: trocar.Client, flowers: Path) -> None:
    trainer = client.train("resnet18", head=3, trainable="fc")
    name = trainer.trainer_id
    first = trainer.start_fit(flowers, epochs=100_000, batch_size=4)
    assert next(event for event in trainer.watch(first) if event.kind == "step")["step"] == 1
    assert cli("trainers", "pause", name).out == "paused\n"
    assert "paused" in cli("trainers", "list").out
    assert cli("trainers", "resume", name).out == "running\n"
    assert cli("trainers", "cancel", name).out == "ended\n"
    assert cli("trainers", "watch", name).out.splitlines()[-1] == "cancelled"
    assert "UNKNOWN_FIT" in cli("trainers", "pause", name).err


def test_a_data_set_on_the_server_is_trained_on_by_its_id(
    cli: Trocar, client: trocar.Client, flowers: Path
) -> None:
    dataset = client.upload_dataset(flowers)
    before = client.datasets()
    done = cli("train", "resnet18", dataset.dataset_id, "--head", 3, "--trainable", "fc", "--batch", 12)
    assert done.code == 0, done.err
    assert client.datasets() == before


def test_accuracy_on_a_tenth_of_the_samples_is_told_unless_something_else_is_said(
    cli: Trocar, flowers: Path, tmp_path: Path
) -> None:
    def events(*words: object) -> tuple[Outcome, trocar.training.History]:
        path = tmp_path / "h.jsonl"
        done = cli("train", "resnet18", flowers, "--head", 3, "--trainable", "fc", "--history", path, *words)
        assert done.code == 0, done.err
        return done, trocar.training.History.load(path)

    done, history = events("--batch", 1, "--epochs", 2)
    assert [event["sample_count"] for event in history.evaluations] == [1, 1]
    assert len(history.losses) == 22
    accuracy = history.evaluations[-1]["metrics"]["accuracy"]
    assert f"accuracy {accuracy:.4f}, on 1 samples\n" in done.out
    assert "10% of the samples are evaluated and not trained on (--eval-split)" in done.err
    assert events("--eval-split", 0.5)[1].evaluations[0]["sample_count"] == 6
    done, history = events("--eval-split", 0)
    assert (history.evaluations, "eval loss" in done.out, "--eval-split" in done.err) == ([], False, False)


def test_targets_that_are_no_labels_are_not_split(cli: Trocar, client: trocar.Client, tmp_path: Path) -> None:
    images = np.zeros((12, 3, 32, 32), np.float32)
    several = {"first": np.arange(12) % 3, "second": np.arange(12) % 3}
    dataset = client.upload_dataset((images, several))
    done = cli("train", "resnet18", dataset.dataset_id, "--head", 3)
    assert "--eval-split" not in done.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--spool", "lots"), "'lots' is not a size; write for example 256MiB"),
        (("--spool", "256 bananas"), "is not a size"),
        (("--clamp", "fc.*"), "does not look like 'fc.*=-0.1:0.1'"),
        (("--clamp", "fc.*=-0.1"), "does not look like"),
        (("--clamp", "fc.*=low:high"), "does not look like"),
        (("--clamp", "fc.*=nan:1"), "does not look like"),
        (("--clamp", "fc.*=:"), "does not look like"),
        (("--clamp", "=0:1"), "does not look like"),
        (("--clamp", "fc.*=1:-1"), "low above high"),
        (("--optimizer", "adamx"), "--optimizer must be one of sgd, adam"),
        (("--eval", "nowhere"), "--eval: no folder 'nowhere' here, and no data set"),
        (("--export", "no/such/folder/f.safetensors"), "--export: no folder 'no/such/folder'"),
        (("--history", "no/such/folder/h.jsonl"), "--history: no folder"),
        (("--publish", "Flowers!"), "'Flowers!' is not a valid id"),
        (("--publish", "resnet18"), "model 'resnet18' exists"),
        (("--lr", "inf"), "option lr is inf; options are finite numbers"),
        (("--head", "0"), "--head"),
        (("--epochs", "0"), "--epochs"),
        (("--eval-split", "1"), "--eval-split"),
        (("--eval-split", "0.2", "--eval", "."), "--eval-split: there is data to evaluate on, --eval"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_said_before_anything_starts(
    cli: Trocar, client: trocar.Client, flowers: Path, words: tuple[str, ...], expected: str
) -> None:
    done = cli("train", "resnet18", flowers, "--head", 3, *words)
    assert (done.code, done.out) == (2, "")
    assert expected in " ".join(done.err.replace("│", " ").split())
    assert client.trainers() == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("flowres", "no folder 'flowres' here, and no data set of this id on the server"),
        ("./flowres/", "no file or folder './flowres/'"),
        ("no such folder", "no file or folder"),
    ],
)
def test_a_missing_folder_is_no_data_set(
    cli: Trocar, client: trocar.Client, data: str, expected: str
) -> None:
    done = cli("train", "resnet18", data, "--head", 3)
    assert done.code == 2
    assert expected in " ".join(done.err.replace("│", " ").split())
    assert client.trainers() == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--trainable", "layr4"), "TRAINER_INVALID"),
        (("--metric", "accurracy"), "FIT_INVALID"),
        (("--augment", "RandomHorizontalFlop"), "FIT_INVALID"),
        (("--early-stop", "2", "--eval-split", "0"), "FIT_INVALID"),
        (("--eval-split", "0.01"), "FIT_INVALID"),
        (("--head", "2"), "FIT_INVALID"),
    ],
)
def test_what_the_server_refuses_leaves_no_trainer(
    cli: Trocar, client: trocar.Client, flowers: Path, words: tuple[str, ...], reason: str
) -> None:
    done = cli("train", "resnet18", flowers, "--head", 3, *words)
    assert (done.code, f"[{reason}]" in done.err) == (1, True), done.err
    assert client.trainers() == []


def test_a_folder_without_classes_leaves_no_trainer(
    cli: Trocar, client: trocar.Client, tmp_path: Path
) -> None:
    done = cli("train", "resnet18", tmp_path, "--head", 3)
    assert done.code != 0
    assert "class" in done.err
    assert client.trainers() == []


def test_a_fit_that_fails_keeps_its_trainer_and_its_history(
    cli: Trocar, client: trocar.Client, flowers: Path, tmp_path: Path
) -> None:
    history = tmp_path / "h.jsonl"
    words = ("--optimizer", "sgd", "--lr", "1e30", "--epochs", 9, "--history", history)
    done = cli("train", "resnet18", flowers, "--head", 3, *words)
    (info,) = client.trainers()
    assert (done.code, "[NON_FINITE_STEP]" in done.err) == (1, True), done.err
    assert f"trainer {info.trainer_id} stays on the server" in done.err
    assert trocar.training.History.load(history).outcome == "failed"


def training_for_long(server: RunningServer, data: Path, *options: object) -> Any:
    """Start the command in a process of its own, and wait for its first epoch."""
    words = ["train", "resnet18", data, "--head", 3, "--trainable", "fc", "--epochs", 100_000, *options]
    process = warm_python.Popen(
        [sys.executable, "-m", "trocar", *map(str, words)],
        env={**os.environ, "TROCAR_SERVER": server.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "epoch 1" in process.stdout.readline()
    return process


def test_a_fit_that_is_cancelled_elsewhere_publishes_nothing_and_keeps_its_trainer(
    server: RunningServer, client: trocar.Client, flowers: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "w.safetensors"
    process = training_for_long(server, flowers, "--publish", "half", "--export", weights)
    (info,) = client.trainers()
    assert client.trainer(info.trainer_id).cancel() == "ended"
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert out.endswith(f"nothing was published or exported; trainer {info.trainer_id}\n")
    assert [one.trainer_id for one in client.trainers()] == [info.trainer_id]
    assert "half" not in {model.model_id for model in client.models()}
    assert not weights.exists()


def test_the_fit_goes_on_when_the_command_is_interrupted(
    server: RunningServer, client: trocar.Client, flowers: Path, tmp_path: Path
) -> None:
    process = training_for_long(server, flowers, "--history", tmp_path / "h.jsonl")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    (info,) = client.trainers()
    assert process.returncode == 130, out + err
    assert f"`trocar trainers watch {info.trainer_id}` shows it" in err
    assert "Traceback" not in err
    assert info.state == "fitting"
    assert trocar.training.History.load(tmp_path / "h.jsonl").outcome == "running"
    assert client.trainer(info.trainer_id).cancel() == "ended"


def test_numbers_that_json_does_not_have_are_saved_as_json(
    client: trocar.Client, flowers: Path, tmp_path: Path
) -> None:
    optimizer = trocar.training.sgd(lr=1e30)
    with client.train("resnet18", head=3, optimizer=optimizer, on_nonfinite="skip") as trainer:
        history = trainer.fit(flowers, epochs=4, progress=False)
    assert any(event.get("is_skipped") for event in history)
    assert not all(np.isfinite(history.losses))
    history.save(tmp_path / "h.jsonl")

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    for line in (tmp_path / "h.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert np.array_equal(
        trocar.training.History.load(tmp_path / "h.jsonl").losses, history.losses, equal_nan=True
    )


def test_unpublishing_is_for_the_owner_and_for_what_no_trainer_needs(
    server: RunningServer, flowers: Path
) -> None:
    with (
        trocar.connect(server.address, token="alice") as alice,
        trocar.connect(server.address, token="bob") as bob,
    ):
        with alice.train("resnet18", head=3, trainable="fc") as trainer:
            trainer.publish("roses")
        with pytest.raises(trocar.errors.UnknownModelError, match="published no model"):
            bob.unpublish("roses")
        for name in ("resnet18", "nothing", "../roses", ""):
            with pytest.raises(trocar.errors.UnknownModelError):
                alice.unpublish(name)
        with (
            bob.train("roses", trainable="fc"),
            pytest.raises(trocar.errors.ModelConflictError, match="trainer"),
        ):
            alice.unpublish("roses")
        assert bob.extract("roses", str(flowers / "rose" / "0.png"), taps="/out")["/out"].shape == (1, 3)
        alice.unpublish("roses")
        with pytest.raises(trocar.errors.UnknownModelError):
            bob.model("roses")
        with pytest.raises(trocar.errors.UnknownModelError):
            alice.unpublish("roses")
        with alice.train("resnet18", head=2, trainable="fc", seed=1) as trainer:  # the id is free again
            trainer.publish("roses")
        assert alice.extract("roses", str(flowers / "rose" / "0.png"), taps="/out")["/out"].shape == (1, 2)
        alice.unpublish("roses")


def test_what_is_unpublished_does_not_come_back(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "models": {"resnet18": {"weights": "random:0"}},
        "data_dir": tmp_path,
        "device": "cpu",
    }
    with running_server(**settings) as first, trocar.connect(first.address) as client:
        with client.train("resnet18", head=3, trainable="fc") as trainer:
            trainer.publish("gone")
            trainer.publish("stays")
        client.unload("gone")
        client.unpublish("gone")
    with running_server(**settings) as second, trocar.connect(second.address) as client:
        assert [model.model_id for model in client.models()] == ["resnet18", "stays"]
