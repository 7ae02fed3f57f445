"""Processes that are killed while they spool: the next one removes what they left."""

import os
import random
import signal
import threading
from pathlib import Path

from tests.support.files.scale import count
from tests.support.spool.spool_processes import Processes
from tests.unit.spool.steps import are_equal, gradients, open_spool, small_model

KILLS = count(10, "TROCAR_SPOOL_KILLS")
TRAIN = """
import sys
from pathlib import Path
from tests.unit.spool.steps import gradients, open_spool, small_model
model = small_model()
with open_spool(Path(sys.argv[1])) as spool:
    print("ready", flush=True)
    while True:
        gradients(model, spool)
        print("step", flush=True)
"""


class Training:
    """A process that trains with a spool until it is killed."""

    def __init__(self, processes: Processes, parent: Path, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._processes = processes
        self._id = processes.start(TRAIN, [str(parent)], pipe, Path(os.devnull))
        self._lines = pipe.open()
        assert self._lines.readline() == "ready\n"

    def kill(self, steps: int, delay_s: float) -> None:
        """Kill it a moment after it has done some steps."""
        for _ in range(steps):
            assert self._lines.readline() == "step\n"
        threading.Event().wait(delay_s)
        os.kill(self._id, signal.SIGKILL)
        assert self._processes.wait(self._id) == -signal.SIGKILL
        self._lines.close()


def test_leftovers_of_killed_processes_are_removed_by_the_next(processes: Processes, tmp_path: Path) -> None:
    chance = random.Random(0)
    parent = tmp_path / "spools"
    neighbour = parent / "trocar-spool-data"
    neighbour.mkdir(parents=True)
    living = Training(processes, parent, tmp_path / "living")
    kept = 0
    for index in range(KILLS):
        killed = Training(processes, parent, tmp_path / f"{index}")
        killed.kill(chance.randrange(3), chance.random() / 50)
        kept = max(kept, len(list(parent.iterdir())))
        assert len(list(parent.iterdir())) <= 3  # the one before is gone
    assert kept == 3
    model = small_model()
    expected = gradients(model)
    with open_spool(parent) as spool:
        assert are_equal(gradients(model, spool), expected)
        living.kill(1, 0)
    with open_spool(parent):
        assert list(parent.iterdir()) == [neighbour]
