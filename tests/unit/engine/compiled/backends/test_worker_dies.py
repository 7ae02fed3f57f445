"""A process that builds ends with the server that asked for it, though nobody can tell it any more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.servers.waiting import wait_until

ASKS = """
import asyncio, sys
from trocar_server.engine.compiled.backends.builds import build_apart

class Endless:
    def __reduce__(self):  # what whoever unpickles it does
        return exec, (f"import pathlib, signal; pathlib.Path({sys.argv[1]!r}).touch(); signal.pause()",)

asyncio.run(build_apart(Endless()))
"""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_it_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with subprocess.Popen([sys.executable, "-c", ASKS, str(begun)]) as server:
        wait_until(begun.exists)
        (worker,) = children_of(server.pid)
        os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(worker))


def test_it_does_nothing_for_a_server_that_is_dead_already() -> None:
    command = [sys.executable, "-m", "trocar_server.engine.compiled.backends.build_worker", "-1"]
    done = subprocess.run(command, input=b"no job", capture_output=True, check=True)
    assert done.stdout == b""
