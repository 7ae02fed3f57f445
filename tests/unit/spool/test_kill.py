"""Processes that are killed while they spool: the next one removes what they left."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.unit.spool.steps import are_equal, gradients, open_spool, small_model

KILLS = int(os.environ.get("TROCAR_SPOOL_KILLS", "10"))
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


def start(parent: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", TRAIN, parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process: "subprocess.Popen[bytes]", steps: int, delay_s: float) -> None:
    """Kill a process a moment after it has done some steps."""
    assert process.stdout is not None
    for _ in range(steps):
        assert process.stdout.readline() == b"step\n"
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()


def test_leftovers_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    chance = random.Random(0)
    neighbour = tmp_path / "trocar-spool-data"
    neighbour.mkdir()
    living = start(tmp_path)
    kept = 0
    for _ in range(KILLS):
        kill(start(tmp_path), chance.randrange(3), chance.random() / 50)
        kept = max(kept, len(list(tmp_path.iterdir())))
        assert len(list(tmp_path.iterdir())) <= 3  # the one before is gone
    assert kept == 3
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        assert are_equal(gradients(model, spool), expected)
        kill(living, 1, 0)
    with open_spool(tmp_path):
        assert list(tmp_path.iterdir()) == [neighbour]
