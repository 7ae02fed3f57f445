"""A full disk: what does not fit is refused, and the trainer is as before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    fitted_plainly,
    make_trainer,
    samples,
    stepped_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve
    from trocar_server.training.files.event_log import NewEvent

FAILURES = 50


class FullDisk:
    """Lets writes below a folder fail while it is full; reading and removing go on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._write = os.path.realpath(folder), os.open, os.write
        self._path_open = Path.open
        self.is_full = False
        self.refused = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of what opens files for writing."""
        monkeypatch.setattr(os, "write", self.write)
        for function in ("pwrite", "pwritev", "writev", "posix_fallocate", "ftruncate"):
            if hasattr(os, function):
                monkeypatch.setattr(os, function, self._failing(getattr(os, function)))
        monkeypatch.setattr(Path, "open", self._opening())

    def write(self, descriptor: int, data: Any) -> int:
        """Write, or fail."""
        self._check(descriptor)
        return self._write(descriptor, data)

    def path_open(self, path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        """Open for reading, or fail."""
        if self.is_full and mode not in ("r", "rb") and str(path).startswith(self._folder):
            raise self._error()
        return self._path_open(path, mode, *arguments, **options)

    def _opening(self) -> Any:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            return self.path_open(path, *arguments, **options)

        return call

    def _failing(self, function: Any) -> Any:
        def call(descriptor: int, *arguments: Any) -> Any:
            self._check(descriptor)
            return function(descriptor, *arguments)

        return call

    def _check(self, descriptor: int) -> None:
        if self.is_full and str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self._folder):
            raise self._error()

    def _error(self) -> OSError:
        self.refused += 1
        return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data")


@pytest.fixture
def disk(running: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    found = FullDisk(tmp_path / "data")
    found.install(monkeypatch)
    return found


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_steps_that_cannot_be_spooled_leave_no_trace(
    client: trocar.Client, disk: FullDisk, tmp_path: Path
) -> None:
    given = batches(4)
    trainer = make_trainer(client, saved_tensors=trocar.training.save_on_disk(budget_bytes=0, min_bytes=1))
    assert trainer.step(*given[0]).written_bytes > 0
    trainer.save()
    before = files(tmp_path / "data")
    for batch in given[1:]:
        disk.is_full = True
        for _ in range(FAILURES // 3 + 1):
            with pytest.raises((trocar.errors.SpoolFailedError, trocar.errors.StorageFullError)):
                trainer.step(*batch)
        assert set(files(tmp_path / "data")) <= set(before)
        assert not list((tmp_path / "data" / "scratch").rglob("*.safetensors"))
        disk.is_full = False
        trainer.step(*batch)
    assert disk.refused
    assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_a_save_that_does_not_fit_leaves_what_is_there(
    client: trocar.Client, disk: FullDisk, tmp_path: Path
) -> None:
    given, trainer = batches(3), make_trainer(client)
    trainer.step(*given[0])
    saved = trainer.save()
    trainer.step(*given[1])
    before = files(tmp_path / "data")
    disk.is_full = True
    for _ in range(FAILURES):
        with pytest.raises(trocar.errors.StorageFullError):
            trainer.save()
    with pytest.raises(trocar.errors.StorageFullError):
        trainer.publish("tuned")
    with pytest.raises(trocar.errors.StorageFullError):
        make_trainer(client)
    assert files(tmp_path / "data") == before
    assert [entry.number for entry in trainer.checkpoints()] == [saved.number]
    assert len(client.trainers()) == 1
    disk.is_full = False
    trainer.step(*given[2])
    trainer.save()
    assert trainer.publish("tuned") == "tuned"
    assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_a_fit_that_cannot_be_saved_says_so_and_leaves_a_trainer(
    client: trocar.Client, disk: FullDisk, tmp_path: Path
) -> None:
    trainer, data = make_trainer(client), samples(16)
    dataset = client.upload_dataset(data).dataset_id
    disk.is_full = True
    with pytest.raises(trocar.errors.StorageFullError):
        trainer.start_fit(dataset, batch_size=4)
    disk.is_full = False
    first = trainer.start_fit(dataset, epochs=1000, batch_size=4)
    seen = []
    for event in trainer.watch(first):
        seen.append(event)
        if event.kind == "step" and event["step"] == 6:
            disk.is_full = True
    assert (seen[-1].kind, seen[-1]["reason"]) == ("failed", "STORAGE_FULL")
    assert [event.number for event in seen] == list(range(first, first + len(seen)))
    disk.is_full = False
    assert trainer.info().state == "ready"
    assert trainer.step(*samples(4)).is_update
    trainer.restore()
    history = trainer.fit(dataset, epochs=2, batch_size=4)
    assert history[0].number == seen[-1].number + 1
    assert history.outcome == "finished"


def test_events_that_could_not_be_written_are_there_after_a_restart(
    disk: FullDisk, client: trocar.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trocar_server.training.files.event_log import EventLog

    add = EventLog.add

    async def add_while_full(log: EventLog, events: Sequence[NewEvent]) -> None:
        """Fill the disk for the log alone: by the caller's clock, the fit may long be over."""
        disk.is_full = any(event.kind == "step" and event.facts["step"] in range(5, 15) for event in events)
        await add(log, events)
        disk.is_full = False

    monkeypatch.setattr(EventLog, "add", add_while_full)
    trainer, data = make_trainer(client), samples(16)
    expected, losses = fitted_plainly(data, 6, 4)
    first = trainer.start_fit(data, epochs=6, batch_size=4, checkpoint_every=1000)
    events = list(trainer.watch(first))
    assert events[-1].kind == "finished"
    assert disk.refused
    assert_weights(trainer, expected, tmp_path)
    log = EventLog(tmp_path / "data" / "fits" / f"{trainer.trainer_id}.jsonl")
    log.load()
    assert [event.number for event in log.since(0)] == list(range(events[-1].number + 1))
    assert [event.facts["loss"] for event in log.since(0) if event.kind == "step"] == losses
