"""Spools that are dropped without `close`: no folder stays, whenever, wherever and however that happens."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.files.scale import count
from tests.support.spool.spool_processes import Processes
from tests.unit.spool.steps import small_step
from trocar_server.spool import Spool, SpoolError
from trocar_server.spool.files import file_pool as pool_module
from trocar_server.spool.files.block_transfer import Transfer
from trocar_server.spool.files.directory import SpoolDirectory
from trocar_server.spool.files.file_pool import ChunkPool
from trocar_server.spool.files.header import Item

DROPS = count(100, "TROCAR_SPOOL_DROPS")


def wait_until_empty(folder: Path) -> None:
    """Wait until the threads of dropped spools have removed what they were making."""
    deadline = time.monotonic() + 60
    while list(folder.iterdir()):
        gc.collect()  # does nothing while another thread collects
        assert time.monotonic() < deadline, sorted(folder.rglob("*"))
        threading.Event().wait(0.002)


class Pause:
    """Stops whoever calls `stop` until `go` is set."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.go.wait(60)


@pytest.fixture
def in_a_new_folder(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """Writers stop when they have made their folder, before anybody else knows of it."""
    pause = Pause()

    def make(parent: Path) -> SpoolDirectory:
        made = SpoolDirectory(parent)
        pause.stop()
        return made

    monkeypatch.setattr(pool_module, "SpoolDirectory", make)
    return pause


def test_many_small_spools_leave_no_folder(tmp_path: Path) -> None:
    for _ in range(DROPS):
        small_step(tmp_path)
    gc.collect()
    wait_until_empty(tmp_path)


def test_a_spool_that_is_dropped_while_its_folder_is_made(tmp_path: Path, in_a_new_folder: Pause) -> None:
    loss = small_step(tmp_path)
    assert in_a_new_folder.reached.wait(60)
    del loss
    assert len(list(tmp_path.iterdir())) == 1
    in_a_new_folder.go.set()
    wait_until_empty(tmp_path)


def test_a_spool_that_is_closed_while_its_folder_is_made(tmp_path: Path, in_a_new_folder: Pause) -> None:
    pool = ChunkPool(tmp_path)
    errors: list[BaseException] = []

    def place() -> None:
        try:
            pool.place(Item("1", torch.uint8, 0, 1), 0)
        except SpoolError as error:
            errors.append(error)

    writer = threading.Thread(target=place)
    writer.start()
    assert in_a_new_folder.reached.wait(60)
    closer = threading.Thread(target=pool.close)
    closer.start()
    in_a_new_folder.go.set()
    writer.join()
    closer.join()
    assert list(tmp_path.iterdir()) == []


def test_the_garbage_collector_may_drop_it_on_the_thread_that_makes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ChunkPool(tmp_path)

    def make(parent: Path) -> SpoolDirectory:
        pool.abandon()
        return SpoolDirectory(parent)

    monkeypatch.setattr(pool_module, "SpoolDirectory", make)
    pool.place(Item("1", torch.uint8, 0, 1), 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpoolError, match="the spool is closed"):
        pool.place(Item("2", torch.uint8, 0, 1), 0)


def test_graphs_that_are_dropped_in_the_middle_of_backward(tmp_path: Path) -> None:
    class StopsError(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise StopsError

    for _ in range(20):
        x = torch.randn(64, requires_grad=True)
        with Spool(tmp_path, 0, min_bytes=64):
            middle = (x * 2).pow(3)
            loss = (middle * middle).sum()
        middle.register_hook(stop)
        del middle
        with pytest.raises(StopsError):
            loss.backward()
        del loss
    gc.collect()
    wait_until_empty(tmp_path)


def test_graphs_that_are_dropped_by_other_threads(tmp_path: Path) -> None:
    def drop(losses: list[torch.Tensor]) -> None:
        while losses:
            losses.pop().backward()

    for _ in range(10):
        losses = [small_step(tmp_path) for _ in range(4)]
        threads = [threading.Thread(target=drop, args=(losses[::2],)), threading.Thread(target=losses.clear)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gc.collect()
    wait_until_empty(tmp_path)


def test_spools_in_cycles_go_with_the_garbage_collector(tmp_path: Path) -> None:
    for _ in range(50):
        loss = small_step(tmp_path)
        cycle: list[object] = [loss]
        cycle.append(cycle)
        del cycle, loss
    gc.collect()
    wait_until_empty(tmp_path)


def test_spools_whose_writer_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("a fault nobody has thought of")

    monkeypatch.setattr(Transfer, "write", fail)
    for _ in range(20):
        small_step(tmp_path)
    gc.collect()
    wait_until_empty(tmp_path)


HEAD = """
import gc, os, sys, threading, warnings
from pathlib import Path
import torch
from tests.unit.spool.steps import small_step
from trocar_server.spool import Spool
from trocar_server.spool.files import file_pool as pool
from trocar_server.spool.files.directory import SpoolDirectory
from trocar_server.spool.files.block_transfer import Transfer

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
folder = Path(sys.argv[1])
"""

ENDINGS = {
    "at once": "small_step(folder)",
    "after many": "for _ in range(50): small_step(folder)",
    "while the folder is made": """
begun = threading.Event()
def make(parent):
    made = SpoolDirectory(parent)
    begun.set()
    threading.Event().wait(0.2)
    return made
pool.SpoolDirectory = make
loss = small_step(folder)
begun.wait()
del loss
""",
    "while it writes": """
begun, write = threading.Event(), Transfer.write
def slow(*arguments):
    begun.set()
    threading.Event().wait(0.2)
    return write(*arguments)
Transfer.write = slow
loss = small_step(folder)
begun.wait()
del loss
""",
    "after a fork": """
loss = small_step(folder)
child = os.fork()
if child == 0:
    del loss
    for _ in range(10): small_step(folder)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
loss.backward()
del loss
for _ in range(10): small_step(folder)
""",
    "in a child that goes on without its parent's spools": """
for _ in range(10): small_step(folder)
if os.fork():
    os.wait()
""",
    "with an error": "loss = small_step(folder); sys.excepthook = lambda *_: None; sys.exit(0)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_that_ends_leaves_no_folder(processes: Processes, tmp_path: Path, name: str) -> None:
    ended = processes.run(HEAD + ENDINGS[name], tmp_path)
    assert (ended.returncode, ended.errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


IMPORTS = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(name, flush=True)
sys.meta_path.insert(0, Finder())
loss = small_step(folder)
while not any(path.name != "lock" for path in folder.glob("*/*")):
    threading.Event().wait(0.001)
loss.backward()
"""


def test_its_threads_import_nothing(processes: Processes, tmp_path: Path) -> None:
    """A fork while another thread imports leaves that module's lock held in the child, for ever."""
    ended = processes.run(HEAD + IMPORTS, tmp_path)
    assert (ended.returncode, ended.output, ended.errors) == (0, "", "")
