"""A process that builds ends with the server that asked for it, and leaves the server its processors."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.servers import warm_python
from tests.support.servers.waiting import wait_until
from trocar_server.engine.compiled.backends.builds import build_apart

ASKS = """
import asyncio, sys
from trocar_server.engine.compiled.backends.builds import build_apart

class Endless:
    def __reduce__(self):  # what whoever unpickles it does
        return exec, (f"import pathlib, signal; pathlib.Path({sys.argv[1]!r}).touch(); signal.pause()",)

asyncio.run(build_apart(Endless()))
"""


STARTS_A_CHILD = """
import pathlib, signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path({path!r}).write_text(str(child.pid))
signal.pause()
"""


class EndlessWithChild:
    """A job that starts a process and never ends, in whatever process unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (STARTS_A_CHILD.format(path=str(self._path)),)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tasks_of(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_it_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with warm_python.Popen([sys.executable, "-c", ASKS, str(begun)]) as server:
        wait_until(begun.exists)
        (worker,) = children_of(server.pid)
        os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(worker))


def test_it_does_nothing_for_a_server_that_is_dead_already() -> None:
    command = [sys.executable, "-m", "trocar_server.engine.compiled.backends.build_worker", "-1"]
    done = subprocess.run(command, input=b"no job", capture_output=True, check=True)
    assert done.stdout == b""


def test_it_knows_its_parent_before_it_loads_torch() -> None:
    loaded = "import sys, trocar_server.engine.compiled.backends.build_worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"  # at its priority a build takes minutes to load it on a busy machine


@asynccontextmanager
async def endless_build(folder: Path) -> AsyncIterator[tuple[int, int]]:
    """Yield the ids of a build process and of a child of it; cancel the build afterwards."""
    begun = folder / "begun"
    building = asyncio.create_task(build_apart(EndlessWithChild(begun)))  # type: ignore[arg-type]
    await asyncio.to_thread(wait_until, lambda: begun.exists() and begun.read_text() != "")
    child = int(begun.read_text())
    try:
        yield os.getpgid(child), child
    finally:
        building.cancel()
        with suppress(asyncio.CancelledError):
            await building


async def test_a_cancelled_build_is_killed_with_its_children(tmp_path: Path) -> None:
    async with endless_build(tmp_path) as (worker, child):
        assert worker in children_of(os.getpid())
    await asyncio.to_thread(wait_until, lambda: not (is_alive(worker) or is_alive(child)))


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
async def test_a_build_gets_what_the_server_leaves(tmp_path: Path) -> None:
    async with endless_build(tmp_path) as (worker, child):
        policies = {os.sched_getscheduler(task) for task in (*tasks_of(worker), child)}
        sessions = {os.getsid(worker), os.getsid(child)}
    assert policies == {os.SCHED_IDLE}
    assert sessions == {os.getsid(0)}  # priorities do not count between sessions
