"""A process that forks: the child leaves the parent's files alone and gets a folder of its own."""

from pathlib import Path

import pytest

from tests.support.spool.spool_processes import Processes

HEAD = """
import gc, os, sys, warnings
from pathlib import Path
import torch
from tests.unit.spool.steps import are_equal, batch, files, gradients
from tests.unit.spool.steps import open_spool, small_model, wait_until_written
from trocar_server.spool import Spool, SpoolReadError

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
parent = Path(sys.argv[1])
model = small_model()
expected = gradients(model)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(processes: Processes, script: str, folder: Path) -> None:
    ended = processes.run(HEAD + script, folder)
    assert ended.returncode == 0, ended.errors


def test_parent_and_child_train_side_by_side(processes: Processes, tmp_path: Path) -> None:
    run(
        processes,
        """
with open_spool(parent) as spool:
    assert are_equal(gradients(model, spool), expected)
    def work():
        for _ in range(3):
            assert are_equal(gradients(model, spool), expected)
        assert len(list(parent.iterdir())) == 2
        spool.close()
        assert len(list(parent.iterdir())) == 1
    in_child(work)
    assert are_equal(gradients(model, spool), expected)
""",
        tmp_path,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_ends_takes_nothing_of_its_parents(processes: Processes, tmp_path: Path) -> None:
    run(
        processes,
        """
spool = Spool(parent, 0, min_bytes=1024)
with spool:
    loss = model(batch()).square().sum()
wait_until_written(spool)
count = len(files(parent))
def work():
    global spool, loss
    del spool, loss
    gc.collect()
in_child(work)
assert len(files(parent)) == count > 0
model.zero_grad()
loss.backward()
assert are_equal([p.grad for p in model.parameters()], expected)
""",
        tmp_path,
    )


def test_what_is_on_the_parents_disk_cannot_be_read_by_the_child(
    processes: Processes, tmp_path: Path
) -> None:
    run(
        processes,
        """
with open_spool(parent) as spool, open_spool(parent, 1 << 30) as roomy:
    with spool:
        loss = model(batch()).square().sum()
    with roomy:
        held = model(batch()).square().sum()
    wait_until_written(spool)
    def work():
        try:
            loss.backward()
        except SpoolReadError as error:
            assert "belong to the parent process" in str(error)
        else:
            raise AssertionError("no error")
        model.zero_grad()
        held.backward()
        assert are_equal([p.grad for p in model.parameters()], expected)
    in_child(work)
    model.zero_grad()
    loss.backward()
    assert are_equal([p.grad for p in model.parameters()], expected)
""",
        tmp_path,
    )


def test_a_living_child_does_not_keep_the_folder_of_a_killed_parent(
    processes: Processes, tmp_path: Path
) -> None:
    run(
        processes,
        """
import signal
reader, writer = os.pipe()
middle = os.fork()
if middle == 0:
    spool = Spool(parent, 0, min_bytes=1024)
    gradients(model, spool)
    if os.fork() == 0:
        os.write(writer, f"{os.getpid()}\\n".encode())
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(middle, 0)
child = int(os.read(reader, 100))
assert len(list(parent.iterdir())) == 1
with open_spool(parent):
    assert list(parent.iterdir()) == []
os.kill(child, signal.SIGKILL)
""",
        tmp_path,
    )


LOCKS = ["spool._lock", "spool.packer._counting", "spool.packer.tiers._lock", "tier._mutex"]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_that_another_thread_has_at_the_fork_does_not_hold_up_the_child(
    processes: Processes, tmp_path: Path, lock: str
) -> None:
    run(
        processes,
        f"""
import threading
from tests.support.spool.spool_devices import LateCopier
from trocar_server.spool.blocks.device_tier import DeviceTier
spool = Spool(parent, 0, min_bytes=1024, modules=[model])
tier = DeviceTier(spool.store, LateCopier(), 0)
spool.packer.tiers._homes[torch.device("meta")] = tier
has_lock, may_end = threading.Event(), threading.Event()
def hold():
    with {lock}:
        has_lock.set()
        may_end.wait()
thread = threading.Thread(target=hold)
thread.start()
has_lock.wait()
def work():
    assert are_equal(gradients(model, spool), expected)
in_child(work)
may_end.set()
thread.join()
assert are_equal(gradients(model, spool), expected)
spool.close()
""",
        tmp_path,
    )


def test_a_child_leaves_the_contexts_of_other_threads_to_its_parent(
    processes: Processes, tmp_path: Path
) -> None:
    run(
        processes,
        """
import threading
spool = Spool(parent, 0, min_bytes=1024, modules=[model])
is_inside, may_end = threading.Event(), threading.Event()
def stay():
    with spool:
        is_inside.set()
        may_end.wait()
thread = threading.Thread(target=stay)
thread.start()
is_inside.wait()
def work():
    assert not model._forward_hooks
    assert are_equal(gradients(model, spool), expected)
    assert not model._forward_hooks
in_child(work)
def work_inside():
    assert model._forward_hooks
with spool:
    in_child(work_inside)
assert model._forward_hooks
may_end.set()
thread.join()
assert not model._forward_hooks
spool.close()
""",
        tmp_path,
    )


def test_a_child_limits_its_freed_memory_though_a_thread_of_its_parent_was_checking(
    processes: Processes, tmp_path: Path
) -> None:
    run(
        processes,
        """
import threading
from trocar_server.spool.freed_memory import freed_memory, limit_freed_memory
if not limit_freed_memory():
    sys.exit()
limit = freed_memory()
is_checking, may_end = threading.Event(), threading.Event()
def check():
    with limit._checking:
        is_checking.set()
        may_end.wait()
thread = threading.Thread(target=check)
thread.start()
is_checking.wait()
def work():
    limit.check()
    assert len(limit._step.growths) == 1
in_child(work)
may_end.set()
thread.join()
""",
        tmp_path,
    )
