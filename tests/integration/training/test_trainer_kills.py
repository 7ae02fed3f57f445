"""kill -9 at random moments, and SIGTERM: after the restart nothing is torn, lost, doubled or left over.

`TROCAR_KILLS=200` and `TROCAR_STOPS=20` run more of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import trocar
from tests.support.files.scale import SEED, count
from tests.support.oracles.tiny_training import (
    MODELS,
    PlainTrainer,
    assert_weights,
    fitted_plainly,
    make_trainer,
    samples,
)
from tests.support.servers.server_processes import ServerProcess, ServerProcesses, server_processes
from trocar_server.config import Limits

KILLS = count(25, "TROCAR_KILLS")
STOPS = count(5, "TROCAR_STOPS")
KEPT = Limits().max_checkpoints
"""Of those that were asked for; the last one may be there though nobody was told so."""
STOP_LIMIT_S = 60.0
"""More than the grace of 10 s, and a slow machine."""
SETTINGS: dict[str, Any] = {"models": MODELS, "grace_s": 10.0}
DATA, BATCH, EPOCHS = samples(40, 11), 4, 12


@pytest.fixture(scope="module")
def processes() -> Iterator[ServerProcesses]:
    with server_processes() as started:
        yield started


def killed_later(server: ServerProcess, work: Callable[[], None], delay_s: float) -> None:
    """Run work against a server that is killed meanwhile."""
    timer = threading.Timer(delay_s, server.kill)  # the moment is what varies
    timer.start()
    with suppress(trocar.TrocarError):
        while timer.is_alive():
            work()
    timer.join()


def watch_on(server: ServerProcess, trainer_id: str, first: int, seen: list[Any]) -> None:
    """Watch from the first event that was not seen."""
    with trocar.connect(server.address, retries=0) as client:
        for event in client.trainer(trainer_id).watch(first + len(seen)):
            seen.append(event)


def assert_tidy(data_dir: Path, trainer_ids: set[str]) -> None:
    """Nothing lies around that belongs to nobody."""
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".partial"] == []
    assert [path for path in files if "scratch" in path.parts] == []
    assert {path.name for path in (data_dir / "trainers").iterdir()} - {"lock"} == trainer_ids
    assert {path.stem for path in (data_dir / "fits").glob("*")} <= trainer_ids


def test_steps_and_checkpoints_survive_kills(processes: ServerProcesses, tmp_path: Path) -> None:
    """Steps, saves, exports and publishing without end; each restart goes on from what was acknowledged."""
    data, chance = tmp_path / "data", random.Random(1 + SEED)
    server = processes.start(data, **SETTINGS)
    spool = trocar.training.save_on_disk(budget_bytes=0, min_bytes=1)
    with trocar.connect(server.address, retries=0) as client:
        trainer_id = make_trainer(client, saved_tensors=spool).trainer_id
        client.trainer(trainer_id).save()
    acknowledged, published = 0, set[str]()
    for kill in range(KILLS // 2):

        def work(server: ServerProcess = server, kill: int = kill) -> None:
            nonlocal acknowledged
            with trocar.connect(server.address, retries=0) as client:
                trainer = client.trainer(trainer_id)
                while True:
                    for _ in range(chance.randrange(4)):
                        seed = trainer.info().next_number
                        trainer.step(*samples(4, seed))
                    acknowledged = trainer.save().update_count
                    if chance.random() < 0.3:
                        trainer.export(tmp_path / "export.safetensors")
                    name = f"model-{kill}"
                    if chance.random() < 0.3 and name not in published:
                        published.add(trainer.publish(name))

        killed_later(server, work, 0.02 + chance.random() * 0.3)
        server = processes.start(data, **SETTINGS)
        with trocar.connect(server.address) as client:
            trainer = client.trainer(trainer_id)
            reached = trainer.info()
            assert reached.update_count >= acknowledged
            assert reached.next_number == reached.update_count
            plain = PlainTrainer()
            for number in range(reached.next_number):
                plain.step(samples(4, number))
            assert_weights(trainer, plain.model, tmp_path)
            assert published <= {model.model_id for model in client.models() if model.state == "loaded"}
            assert_tidy(data, {trainer_id})
        assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]
    assert server.terminate() == 0


def test_fits_go_on_after_kills_as_if_there_had_been_none(processes: ServerProcesses, tmp_path: Path) -> None:
    """Killed again and again until it has come to its end, watched all the time."""
    data, chance, kills = tmp_path / "data", random.Random(2 + SEED), 0
    expected, losses = fitted_plainly(DATA, EPOCHS, BATCH)
    server = processes.start(data, **SETTINGS)
    while kills < KILLS - KILLS // 2:
        with trocar.connect(server.address, retries=0) as client:
            trainer = make_trainer(client)
            trainer_id = trainer.trainer_id
            first = trainer.start_fit(
                DATA, epochs=EPOCHS, batch_size=BATCH, eval=samples(8), checkpoint_every=3
            )
        seen: list[Any] = []
        while not seen or seen[-1].kind != "finished":
            watch = partial(watch_on, server, trainer_id, first, seen)

            if kills < KILLS - KILLS // 2:
                killed_later(server, watch, 0.02 + chance.random() * 0.5)
                kills += 1
                server = processes.start(data, **SETTINGS)
            else:
                watch()
        assert [event.number for event in seen] == list(range(first, first + len(seen)))
        steps = [event for event in seen if event.kind == "step"]
        assert [event["step"] for event in steps] == list(range(1, len(losses) + 1))
        assert [event["loss"] for event in steps] == losses
        with trocar.connect(server.address) as client:
            found = client.trainer(trainer_id)
            assert [(e.number, e.kind) for e in found.watch(first)] == [(e.number, e.kind) for e in seen]
            assert_weights(found, expected, tmp_path)
            assert_tidy(data, {trainer_id})
            found.close()
    assert server.terminate() == 0


def stepping(server: ServerProcess, trainer_id: str, said: list[trocar.training.StepResult]) -> None:
    """Step without end, and note what is acknowledged."""
    with trocar.connect(server.address, retries=0) as client:
        trainer = client.trainer(trainer_id)
        number = trainer.info().next_number
        while True:
            said.append(trainer.step(*samples(4, number), number=number))
            number += 1


def saving(server: ServerProcess, trainer_id: str, said: list[trocar.training.Checkpoint]) -> None:
    """Save without end, and note what is acknowledged."""
    with trocar.connect(server.address, retries=0) as client:
        while True:
            said.append(client.trainer(trainer_id).save())


def extracting(server: ServerProcess, said: set[bytes]) -> None:
    """Extract without end, and note what is answered."""
    with trocar.connect(server.address, retries=0) as client:
        while True:
            said.add(client.extract("tiny", samples(4)[0], "fc")["fc"].tobytes())


def until_it_stops(work: Callable[[], None]) -> threading.Thread:
    """Work until the server lets nobody in any more."""

    def run() -> None:
        with suppress(trocar.TrocarError):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_stopped_server_loses_nothing(processes: ServerProcesses, tmp_path: Path) -> None:
    """SIGTERM under load: the exit code is 0, fits go on, every acknowledged step and checkpoint is there."""
    data, chance, epochs = tmp_path / "data", random.Random(3 + SEED), 8 * STOPS
    server = processes.start(data, **SETTINGS)
    expected, losses = fitted_plainly(DATA, epochs, BATCH)
    with trocar.connect(server.address) as client:
        trainer_id, fitting = make_trainer(client).trainer_id, make_trainer(client)
        first = fitting.start_fit(DATA, epochs=epochs, batch_size=BATCH)
    seen, answers, saved, longest_s = list[Any](), set[bytes](), 0, 0.0
    for _ in range(STOPS):
        steps, saves = list[trocar.training.StepResult](), list[trocar.training.Checkpoint]()
        threads = [
            until_it_stops(partial(stepping, server, trainer_id, steps)),
            until_it_stops(partial(saving, server, trainer_id, saves)),
            until_it_stops(partial(extracting, server, answers)),
            until_it_stops(partial(watch_on, server, fitting.trainer_id, first, seen)),
        ]
        threading.Event().wait(0.05 + chance.random() * 0.3)  # the moment is what varies
        begun = time.monotonic()
        assert server.terminate() == 0
        longest_s = max(longest_s, time.monotonic() - begun)
        for thread in threads:
            thread.join()
        server = processes.start(data, **SETTINGS)
        with trocar.connect(server.address) as client:
            found = client.trainer(trainer_id)
            assert found.info().update_count == found.info().next_number
            assert found.info().update_count >= max((step.update_count for step in steps), default=0)
            kept = {one.number: one.sha256 for one in found.checkpoints()}
            saved += len(saves)
            newest = {one.number: one.sha256 for one in saves[1 - KEPT :]}
            assert newest.items() <= kept.items()
    assert longest_s < STOP_LIMIT_S
    assert len(answers) == 1
    with trocar.connect(server.address) as client:
        found = client.trainer(fitting.trainer_id)
        seen += list(found.watch(first + len(seen)))
        assert [event["loss"] for event in seen if event.kind == "step"] == losses
        assert [event.number for event in seen] == list(range(first, first + len(seen)))
        assert_weights(found, expected, tmp_path)
        plain, reached = PlainTrainer(), client.trainer(trainer_id).info().next_number
        for number in range(reached):
            plain.step(samples(4, number))
        assert_weights(client.trainer(trainer_id), plain.model, tmp_path)
        assert load_file(tmp_path / "exported.safetensors")
    assert server.terminate() == 0
    print(f"the longest stop: {longest_s:.1f} s; {len(seen)} events, {reached} steps, {saved} saves")
