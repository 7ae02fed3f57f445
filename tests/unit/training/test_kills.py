"""Servers that are killed while they write: nothing torn, nothing lost that was acknowledged, no orphans.

The kills are SIGKILLs of real processes: at every operation that changes the disk (`operations`), and at
random moments (`moments`; more of them with TROCAR_STORE_KILLS=200).
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.support import ROOT
from tests.support.files.scale import count
from tests.support.servers import warm_python
from tests.support.servers.killed_stores import KEEP, SCENARIOS, weights
from tests.unit.training.stores import ID, OTHER_ID, assert_same_state, make_state, tree
from trocar_server.models.weights.weights_file import read_weights
from trocar_server.training.files.trainer_storage import TrainingStorage

KILLS = count(25, "TROCAR_STORE_KILLS")


def killed(*arguments: object) -> Any:
    command = [sys.executable, "-m", "tests.support.servers.killed_stores", *map(str, arguments)]
    run = warm_python.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=240)
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def at_operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What became of each scenario, killed at each operation; torch is imported once for all."""
    results: dict[str, list[dict[str, Any]]] = killed("operations", tmp_path_factory.mktemp("killed"))
    return results


def restarted(data: Path) -> dict[str, Any]:
    """Open a data directory as a new server does, and return what is there; everything must be whole."""
    storage = TrainingStorage(data, KEEP)
    found: dict[str, Any] = {"trainers": {}, "numbers": [], "models": {}}
    expected = ["trainers/lock"]
    for record in storage.trainers.entries():
        found["trainers"][record.trainer_id] = record.facts
        expected.append(f"trainers/{record.trainer_id}/trainer.json")
    for checkpoint in storage.checkpoints.entries(ID) if ID in found["trainers"] else ():
        state = storage.checkpoints.load(ID, checkpoint.number).state
        assert_same_state(state, make_state(cast("int", state.facts["step"])))
        found["numbers"].append(checkpoint.number)
        expected += [
            f"trainers/{ID}/checkpoint-{checkpoint.number:08}{end}" for end in (".json", ".safetensors")
        ]
    for model in storage.published.entries():
        path = data / "published" / model.model_id / model.weights_file
        values = read_weights(path, model.sha256)["w"]
        seed = int(values[0])
        assert torch.equal(values, weights(seed)["w"])
        found["models"][model.model_id] = seed
        expected += [str(path.relative_to(data)), f"published/{model.model_id}/model.json"]
    assert sorted([*tree(data), "trainers/lock"]) == sorted(expected)
    storage.close()
    return found


BEFORE: dict[str, Any] = {"trainers": {ID: {}}, "numbers": [1, 2], "models": {"flowers": 1}}
AFTER: dict[str, dict[str, Any]] = {
    "save": {"numbers": [2, 3]},
    "create": {"trainers": {ID: {}, OTHER_ID: {}}},
    "update": {"trainers": {ID: {"new": 1}}},
    "publish": {"models": {"flowers": 1, "birds": 2}},
    "replace": {"models": {"flowers": 2}},
    "remove": {"models": {}},
    "delete": {"trainers": {}, "numbers": []},
    "delete_checkpoint": {"numbers": [1]},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_server_killed_at_any_operation_has_the_old_or_the_new(
    tmp_path: Path, at_operations: dict[str, list[dict[str, Any]]], scenario: str
) -> None:
    results = at_operations[scenario]
    assert len(results) > 3
    after = {**BEFORE, **AFTER[scenario]}
    between = [{**BEFORE, "numbers": [1, 2, 3]}] if scenario == "save" else []  # the oldest not dropped yet
    outcomes = []
    for result in results:
        data = tmp_path / Path(result["folder"]).name
        shutil.copytree(result["folder"], data)
        found = restarted(data)
        assert found in (BEFORE, after, *between)
        outcomes.append(found)
        if result["said"]:
            assert found == after
    assert outcomes[0] == BEFORE
    assert outcomes[-1] == after
    assert results[-1]["said"] == ["done"]


def test_a_server_killed_at_any_moment_has_what_it_acknowledged(tmp_path: Path) -> None:
    results = killed("moments", KILLS, 0, tmp_path)
    assert all(result["was_killed"] for result in results)
    said = [line.split() for result in results for line in result["said"]]
    saved = max(int(number) for what, number in said if what == "saved")
    published = max(int(number) for what, number in said if what == "published")
    found = restarted(tmp_path / "data")
    assert found["numbers"][-1] in (saved, saved + 1)
    assert found["models"]["flowers"] >= published
    assert len(said) > 2 * KILLS


def test_a_killed_server_is_followed_by_one_that_saves_on(
    tmp_path: Path, at_operations: dict[str, list[dict[str, Any]]]
) -> None:
    for result in at_operations["save"]:
        data = tmp_path / Path(result["folder"]).name
        shutil.copytree(result["folder"], data)
        storage = TrainingStorage(data, KEEP)
        last = storage.checkpoints.entries(ID)[-1].number
        number = storage.checkpoints.save(ID, make_state(9)).number
        assert number > last
        assert_same_state(storage.checkpoints.load(ID, number).state, make_state(9))
        assert [one.number for one in storage.checkpoints.entries(ID)] == [last, number]
        storage.close()
