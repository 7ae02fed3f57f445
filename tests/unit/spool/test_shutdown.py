"""The interpreter ends in the middle of things: exit code 0, nothing on stderr, nothing on disk."""

import signal
from pathlib import Path

import pytest

from tests.support.spool.spool_processes import Processes

HEAD = """
import atexit, gc, os, sys, threading
import torch
from torch import nn
from tests.unit.spool.steps import batch, small_model, wait_until_written
from trocar_server.spool import Spool
from trocar_server.spool.files.block_transfer import Transfer

torch.set_num_threads(1)
spool = Spool(sys.argv[1], 0, min_bytes=1024)
model = small_model()

def forward():
    with spool:
        return model(batch()).square().sum()

def slowly(name, seconds=0.05):
    inner = getattr(Transfer, name)
    def slow(*arguments):
        threading.Event().wait(seconds)
        return inner(*arguments)
    setattr(Transfer, name, slow)
"""

ENDINGS = {
    "without use": "",
    "graphs alive": "losses = [forward() for _ in range(3)]; wait_until_written(spool)",
    "while it writes": "slowly('write'); losses = [forward()]",
    "while it reads ahead": """
slowly('read')
loss = forward()
wait_until_written(spool)
next(iter([loss.grad_fn])).next_functions
held = [spool.packer.pack(torch.randn(1000)) for _ in range(5)]
wait_until_written(spool)
spool.store.ledger.budget_bytes = 1 << 20
held[-1].unpack()
""",
    "in the middle of backward": """
loss = forward()
class Stops(Exception): pass
def stop(_): raise Stops
model[2].weight.register_hook(stop)
try:
    loss.backward(retain_graph=True)
except Stops:
    pass
""",
    "inside of the context": "spool.__enter__(); y = model(batch())",
    "graph in a cycle": """
class Holder: pass
holder = Holder(); holder.me = holder; holder.loss = forward()
del holder
""",
    "graph in a module": "sys.modules['kept'] = forward()",
    "backward at exit": """
loss = forward()
atexit.register(lambda: loss.backward())
""",
    "backward in a thread that goes on": """
losses = [forward() for _ in range(3)]
slowly('read', 0.01)
threading.Thread(target=lambda: [loss.backward() for loss in losses]).start()
""",
    "an uncaught error": """
loss = forward()
sys.excepthook = lambda *_: os.write(1, b'caught')
raise SystemExit(0)
""",
}

DAEMON = """
begun = threading.Event()
def train():
    while True:
        forward().backward()
        begun.set()
threading.Thread(target=train, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("name", ENDINGS)
def test_the_process_ends_well(processes: Processes, tmp_path: Path, name: str) -> None:
    ended = processes.run(HEAD + ENDINGS[name], tmp_path)
    assert (ended.returncode, ended.errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_thread_that_goes_on_leaves_nothing_on_disk(processes: Processes, tmp_path: Path) -> None:
    """torch 2.14 aborts processes that end while a daemon thread is in backward, also without a spool."""
    ended = processes.run(HEAD + DAEMON, tmp_path)
    assert ended.returncode in (0, -signal.SIGABRT), ended.errors
    assert ended.returncode == 0 or "terminate called without an active exception" in ended.errors
    assert list(tmp_path.iterdir()) == []
