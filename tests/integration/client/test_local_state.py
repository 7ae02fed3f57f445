"""What a server in this process keeps, and what is left when it ends: nothing that is not asked for."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers import warm_python

CPU = {"device": "cpu"}
WAIT_S = 120.0
LABELS = np.array([0, 1])


class TinyNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own; nothing of a server is set in the environment."""
    for name in [name for name in os.environ if name.startswith(("TROCAR_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def trained(client: trocar.Client, steps: int = 1) -> trocar.training.Trainer:
    trainer = client.train("tinynet")
    for _ in range(steps):
        trainer.step(noise(2, 3, 8, 8), LABELS)
    return trainer


@pytest.mark.usefixtures("home")
def test_a_second_server_of_the_process_trains_as_well() -> None:
    for _ in range(2):
        with trocar.connect("local", models=TinyNet(), settings=CPU) as client:
            assert trained(client).info().update_count == 1


def test_what_is_kept_goes_with_the_client(home: Path) -> None:
    with trocar.connect("local", models=TinyNet(), settings=CPU) as client:
        trained(client).save()
        client.upload_dataset((noise(4, 3, 8, 8), np.arange(4)))
        assert any(name.endswith("trainer.json") for name in files(home))
    assert files(home) == []


def test_a_data_dir_that_is_named_is_kept_and_let_go(home: Path) -> None:
    options = {**CPU, "data_dir": str(home / "mine")}
    models = {"tinynet": {"factory": f"{__name__}:TinyNet", "input_shape": (3, 8, 8), "weights": "random:0"}}
    with trocar.connect("local", models=models, settings=options) as client:
        trainer_id = trained(client, 2).trainer_id
    with trocar.connect("local", models=models, settings=options) as client:
        (found,) = client.trainers()
    assert (found.trainer_id, found.update_count) == (trainer_id, 2)  # saved though nobody asked for it


def test_trainers_of_strangers_are_not_seen(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in (".cache/trocar", ".local/state/trocar"):
        path = home / folder / "trainers" / ("0" * 32)
        path.mkdir(parents=True)
        (path / "trainer.json").write_text("a stranger's")
    before = files(home)
    with trocar.connect("local", models=TinyNet(), settings=CPU) as client:
        assert client.trainers() == []
    assert files(home) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("home")
def test_modules_without_ids_are_named_after_their_classes() -> None:
    with trocar.connect("local", models=TinyNet(), settings=CPU) as client:
        assert [model.model_id for model in client.models()] == ["tinynet"]
    several = [TinyNet(), "resnet18=random:0", TinyNet()]
    with trocar.connect("local", models=several, settings=CPU) as client:
        assert [model.model_id for model in client.models()] == ["resnet18", "tinynet", "tinynet-2"]
        found = client.extract("tinynet-2", noise(1, 3, 8, 8), "4")["4"]
    assert found.shape == (1, 2)


# --- The end of the program -------------------------------------------------------------------------------

SETUP = """
import threading, time
import numpy as np
import trocar
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        if not x.is_meta and x.shape[0] == 7:
            print("busy", flush=True)
            while True:
                self.fc(x)
        return self.fc(x)

client = trocar.connect("local", models={"net": {"module": Net(), "input_shape": (3,)}})
x = np.ones((2, 3), "float32")
def background(work):
    def run():
        try:
            work()
        except trocar.TrocarError:
            pass
    threading.Thread(target=run, daemon=True).start()
"""

FIT = '(np.ones((64, 3), "float32"), np.zeros(64, "int64"))'
ENDED = f"""
client.extract("net", x, "fc")
client.store_edits("net", "none", [trocar.edit("fc", "zero")])
stored = trocar.training.save_on_disk(budget_bytes=1, min_bytes=1)
client.train("net", saved_tensors=stored).step(x, np.array([0, 1]))
trainer = client.train("net")
trainer.step(x, np.array([0, 1]))
trainer.save()
trainer.fit({FIT}, epochs=1, progress=False)
"""
UNDER_WAY = f"""
client.train("net").start_fit({FIT}, epochs=100000)
stream = client.extract_stream("net", (x for _ in range(1000000)), "fc")
next(iter(stream))
trainer = client.train("net")
background(lambda: trainer.step(np.ones((7, 3), "float32"), np.zeros(7, "int64")))
background(lambda: client.extract("net", np.ones((7, 3), "float32"), ["fc", "/out"]))
"""
CLOSED = "\nclient.close()"
PROGRAMS = {
    "nothing": "",
    "all that has ended": ENDED,
    "all that has ended, closed": ENDED + CLOSED,
    "all that is under way": UNDER_WAY,
    "all that is under way, closed": UNDER_WAY + CLOSED,
    "two clients": 'other = trocar.connect("local", models={"net": {"module": Net(), "input_shape": (3,)}})\n'
    't = other.train("net"); u = client.train("net")',
    "a thread that goes on": 't = client.train("net")\n'
    "def work():\n    threading.main_thread().join()\n"
    '    t.step(x, np.array([0, 1])); t.save(); print("saved")\n'
    "threading.Thread(target=work).start()",
}
SAID = {"a thread that goes on": "saved"}


def run(source: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TROCAR_")}
    (folder / "tmp").mkdir()
    environment |= {"TMPDIR": str(folder / "tmp"), "HOME": str(folder), "TROCAR_DEVICE": "cpu"}
    environment["MPLCONFIGDIR"] = str(folder.parent / "matplotlib")
    command = [sys.executable, "-W", "error", "-c", source]
    return warm_python.run(
        command, capture_output=True, text=True, env=environment, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_ends_without_a_word_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    ended = run(f"{SETUP}\n{PROGRAMS[case]}\n", tmp_path)
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout.replace("busy", "").strip() == SAID.get(case, "")
    assert files(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []
