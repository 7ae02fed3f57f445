"""A real disk of 32 MiB: trainers spool and save until it is full, and are as before when it is not."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import trocar
from tests.support.files.scale import count
from tests.support.oracles.tiny_training import MODELS, assert_weights, batches, make_trainer, stepped_plainly
from tests.support.servers.running_server import running_server

FAILURES = count(50)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_failed_saves_on_a_full_disk_leave_the_trainer_and_no_file(small_disk: Path, tmp_path: Path) -> None:
    given = batches(3)
    with (
        running_server(models=MODELS, device="cpu", data_dir=small_disk / "data") as server,
        trocar.connect(server.address) as client,
    ):
        trainer = make_trainer(client)
        trainer.step(*given[0])
        trainer.save()
        with (small_disk / "filler").open("wb") as filler:
            _fill(filler.fileno())
            before = _files(small_disk)
            for _ in range(FAILURES):
                with pytest.raises((trocar.errors.StorageFullError, trocar.errors.SpoolFailedError)):
                    trainer.save()
            assert _files(small_disk) == before
            trainer.step(*given[1])
        (small_disk / "filler").unlink()
        trainer.step(*given[2])
        assert trainer.save().update_count == 3
        assert_weights(trainer, stepped_plainly(given), tmp_path)


def _fill(file: int) -> None:
    """Write until nothing more fits."""
    size = 1 << 20
    while size:
        try:
            os.write(file, bytes(size))
        except OSError:
            size //= 2


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
