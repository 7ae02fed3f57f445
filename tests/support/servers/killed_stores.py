"""A process that opens a data directory again and again, in children that are killed: see `test_kills`.

    python -m tests.support.servers.killed_stores operations FOLDER
    python -m tests.support.servers.killed_stores moments COUNT SEED FOLDER

torch is imported once; each child is a fork. Before it is killed, a child writes what it was told is done to
a pipe, as an answer to a client would go out.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.training.stores import ID, OTHER_ID, SPEC, Fuse, make_state
from trocar_server.models import HostedModel, ModelSpec, load_model
from trocar_server.training.files.trainer_storage import TrainingStorage

KEEP = 2
BASE = ModelSpec("net", "tests.unit.models.factories:Net", "random:1", arguments=(6,), input_shape=(3, 8, 8))

Tell = Callable[[str], None]


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(2000.0) + seed}


def prepare(storage: TrainingStorage, base: HostedModel) -> None:
    storage.trainers.create(ID, "alice", SPEC, "net", "")
    for seed in (1, 2):
        storage.checkpoints.save(ID, make_state(seed))
    storage.published.publish("flowers", "alice", base, weights(1))


def _save(storage: TrainingStorage, base: HostedModel) -> None:
    storage.checkpoints.save(ID, make_state(3))


def _create(storage: TrainingStorage, base: HostedModel) -> None:
    storage.trainers.create(OTHER_ID, "bob", SPEC, "net", "")


def _update(storage: TrainingStorage, base: HostedModel) -> None:
    storage.trainers.update(ID, {"new": 1})


def _publish(storage: TrainingStorage, base: HostedModel) -> None:
    storage.published.publish("birds", "bob", base, weights(2))


def _replace(storage: TrainingStorage, base: HostedModel) -> None:
    storage.published.publish("flowers", "bob", base, weights(2), is_replacing=True)


def _remove(storage: TrainingStorage, base: HostedModel) -> None:
    storage.published.remove("flowers")


def _delete(storage: TrainingStorage, base: HostedModel) -> None:
    storage.trainers.delete(ID)


def _delete_checkpoint(storage: TrainingStorage, base: HostedModel) -> None:
    storage.checkpoints.delete(ID, 2)


SCENARIOS = {
    "save": _save,
    "create": _create,
    "update": _update,
    "publish": _publish,
    "replace": _replace,
    "remove": _remove,
    "delete": _delete,
    "delete_checkpoint": _delete_checkpoint,
}


def killed_at_operations(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run every scenario in children that die at their first, second, ... operation, until one does not."""
    base = load_model(BASE, torch.device("cpu"), folder)
    start = folder / "start"
    storage = TrainingStorage(start, KEEP)
    prepare(storage, base)
    storage.close()
    setattr(os, "fsync", lambda _: None)  # noqa: B010 - to save the time: no power will be cut
    return {scenario: _killed_in(scenario, base, start, folder / scenario) for scenario in SCENARIOS}


def _killed_in(scenario: str, base: HostedModel, start: Path, folder: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    while not results or results[-1]["was_killed"]:
        data = folder / f"{len(results)}"
        shutil.copytree(start, data)

        def work(tell: Tell, data: Path = data, at: int = len(results)) -> None:
            storage = TrainingStorage(data, KEEP)
            Fuse(at, _die).install(setattr)
            SCENARIOS[scenario](storage, base)
            tell("done")

        results.append({"folder": str(data), **_run_child(work, None)})
    return results


def killed_at_moments(count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Save, and publish, without end in children that are killed after a random time."""
    base = load_model(BASE, torch.device("cpu"), folder)
    chance = random.Random(seed)
    data = folder / "data"
    storage = TrainingStorage(data, KEEP)
    prepare(storage, base)
    storage.close()
    results = []
    for _ in range(count):

        def work(tell: Tell) -> None:
            storage = TrainingStorage(data, KEEP)
            latest = storage.checkpoints.load(ID).checkpoint.number
            while True:
                latest += 1
                storage.checkpoints.save(ID, make_state(latest), is_automatic=False)
                tell(f"saved {latest}")
                storage.published.publish("flowers", "alice", base, weights(latest), is_replacing=True)
                tell(f"published {latest}")

        results.append({"folder": str(data), **_run_child(work, chance.random() * 0.1)})
    return results


def _die(operation: str, arguments: tuple[Any, ...]) -> None:
    """Die as by SIGKILL; a write is half done."""
    if operation == "write":
        half = memoryview(arguments[1])[: len(arguments[1]) // 2]
        os.writev(arguments[0], [half])
    os.kill(os.getpid(), signal.SIGKILL)


def _run_child(work: Callable[[Tell], None], delay_s: float | None) -> dict[str, Any]:
    """Run work in a fork, which is killed after a delay from its first word on, if any."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as answers:
                work(lambda text: print(text, file=answers))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    said = b""
    if delay_s is not None:
        said = os.read(reading, 1 << 16)
        time.sleep(delay_s)  # the moment is what varies
        os.kill(child, signal.SIGKILL)
    while piece := os.read(reading, 1 << 16):
        said += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not was_killed and status:
        raise SystemExit(f"a child ended with {status}")
    return {"was_killed": was_killed, "said": said.decode().split("\n")[:-1]}


def main() -> None:
    kind, *arguments, folder = sys.argv[1:]
    if kind == "operations":
        print(json.dumps(killed_at_operations(Path(folder))))
    else:
        print(json.dumps(killed_at_moments(int(arguments[0]), int(arguments[1]), Path(folder))))


if __name__ == "__main__":
    main()
