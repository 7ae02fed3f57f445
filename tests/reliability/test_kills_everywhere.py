"""SIGKILL of a server that does everything at once, see `tests.kills`; its auditors find what is wrong.

`TROCAR_SERVER_KILLS=200` kills more often.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import trocar
from tests.kills import SETTINGS, kill
from tests.support.files.scale import SEED, count
from tests.support.killing.audit import leftovers, remaining, torn
from tests.support.killing.moments import Moments
from tests.support.killing.storing import Editing, Uploading
from tests.support.killing.training import Stepping
from tests.support.servers.running_server import RunningServer, running_server

KILLS = count(5, "TROCAR_SERVER_KILLS")


def test_kills_at_random_moments_of_everything_at_once(tmp_path: Path) -> None:
    outcome = kill(KILLS, SEED, tmp_path)
    assert outcome.is_well, str(outcome)
    assert outcome.kills.total() >= KILLS
    assert {"extract", "stream", "steps", "fits", "edits", "datasets"} <= set(outcome.calls)


@pytest.fixture
def used(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(models=SETTINGS["models"], device="cpu", data_dir=tmp_path / "data") as running:
        yield running


def test_callers_miss_what_is_gone(used: RunningServer, tmp_path: Path) -> None:
    moments = Moments()
    editing, uploading, stepping = Editing(moments, 0), Uploading(moments, 0), Stepping(moments, 0, tmp_path)
    with trocar.connect(used.address) as client:
        for caller in (editing, uploading, stepping):
            for _ in range(3):
                caller.work(client)
            caller.check(client)
        client.delete_edits("plain", client.stored_edits()[0].name)
        client.delete_dataset(client.datasets()[0].dataset_id)
        client.trainer(client.trainers()[0].trainer_id).close()
        for caller, problem in ((editing, "gone|not"), (uploading, "lost"), (stepping, "lost")):
            with pytest.raises(AssertionError, match=problem):
                caller.check(client)


def test_callers_see_what_is_changed(used: RunningServer, tmp_path: Path) -> None:
    editing, stepping = Editing(Moments(), 0), Stepping(Moments(), 0, tmp_path)
    with trocar.connect(used.address) as client:
        for _ in range(3):
            editing.work(client)
            stepping.work(client)
        client.store_edits(
            "plain", client.stored_edits()[0].name, trocar.edit("conv", "scale", 9.0), replace=True
        )
        with pytest.raises(AssertionError, match="others"):
            editing.check(client)
        trainer = client.trainer(client.trainers()[0].trainer_id)
        trainer.restore(trainer.checkpoints()[0].number)
        with pytest.raises(AssertionError, match="saved"):
            stepping.check(client)


def test_what_is_torn_or_left_over_is_found(used: RunningServer, tmp_path: Path) -> None:
    data, temporary = tmp_path / "data", tmp_path / "temporary"
    temporary.mkdir()
    with trocar.connect(used.address) as client:
        for caller in (Editing(Moments(), 0), Uploading(Moments(), 0), Stepping(Moments(), 0, tmp_path)):
            caller.work(client)
        client.trainer(client.trainers()[0].trainer_id).publish("model-x")
    spools = {data / "scratch" / path.name for path in (data / "scratch").iterdir()}
    assert set(leftovers(data, temporary)) == spools  # in use
    for path in sorted(path for path in data.rglob("*") if _has_a_hash(path)):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert torn(data), path
        path.write_bytes(content)
        assert torn(data) == [], path
    for name in ("edits/x.partial", "temporary", "published/model-x/weights-0.safetensors"):
        (data / name).write_bytes(b"")
    (data / "trainers" / ("0" * 32)).mkdir()
    dead = leftovers(data, temporary)
    assert len(dead) == len(spools) + 4
    assert remaining(dead) == sorted(dead)


def _has_a_hash(path: Path) -> bool:
    return path.suffix in (".json", ".safetensors", ".edits", ".dataset") and "scratch" not in path.parts
