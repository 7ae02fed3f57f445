"""Disks that are full and files that may grow no more, for real."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.spool.spool_processes import Processes
from tests.unit.spool.steps import (
    are_equal,
    failure,
    files,
    gradients,
    open_spool,
    small_model,
    wait_until_written,
)
from trocar_server.spool import SpoolFullError

LIMITED = """
import resource, sys
from pathlib import Path
import torch
from tests.unit.spool.steps import are_equal, files, gradients, open_spool, small_model, wait_until_written
from trocar_server.spool import SpoolFullError
model = small_model()
expected = gradients(model)
with open_spool(Path(sys.argv[1])) as spool:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_001, resource.RLIM_INFINITY))
    for _ in range(5):
        try:
            gradients(model, spool)
        except SpoolFullError as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("no error")
        wait_until_written(spool)
        spool.report()
        assert not files(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert are_equal(gradients(model, spool), expected)
"""


def test_a_limit_on_the_size_of_files_is_a_full_disk(processes: Processes, tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    ended = processes.run(LIMITED, tmp_path)
    assert (ended.returncode, ended.errors) == (0, "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_fifty_steps_on_a_disk_that_is_full_leave_nothing(small_disk: Path) -> None:
    model = small_model()
    expected = gradients(model)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    with open_spool(small_disk) as spool:
        for _ in range(50):
            assert "No space left" in failure(SpoolFullError, model, spool)
            wait_until_written(spool)
            spool.report()
            assert files(small_disk) == []
        ballast.unlink()
        assert are_equal(gradients(model, spool), expected)
