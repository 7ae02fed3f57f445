"""Scripts in processes of their own that begin with torch and the spool imported: 0.1 instead of 1.6 s each.

A first process imports both and forks for every script. The script then runs as the main module, and its
process ends as any other: threads are joined, `atexit` is called, the interpreter is taken down.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers import warm_python

_FIRST = """
import faulthandler, json, os, signal, sys, time
import torch
import tests.unit.spool.steps
def waited(pid):
    for _ in range(6000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.killpg(pid, signal.SIGUSR1)  # it hangs, or a child of it: their stacks are among its errors
    time.sleep(1)
    os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(waited(job["wait"])), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        break
    print(pid, flush=True)
else:
    os._exit(0)
for number, path in ((0, os.devnull), (1, job["output"]), (2, job["errors"])):
    opened = os.open(path, os.O_RDWR if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(opened, number)
    os.close(opened)
faulthandler.register(signal.SIGUSR1)
sys.stdin = open(0, closefd=False)
sys.argv[1:] = job["arguments"]
exec(compile(job["script"], "<script>", "exec"))
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, negative for a signal, and what it printed."""

    returncode: int
    output: str
    errors: str


class Processes:
    """Runs scripts, until the context ends."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-W", "error", "-c", _FIRST]
        pipe = subprocess.PIPE
        self._first = warm_python.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._first.communicate(timeout=60)

    def start(self, script: str, arguments: list[str], output: Path, errors: Path) -> int:
        """Start a script; returns its process's id. `output` may be a pipe with a name."""
        job = {"script": script, "arguments": arguments, "output": str(output), "errors": str(errors)}
        return self._ask(job)

    def wait(self, process: int) -> int:
        """Wait until a process has ended; returns its exit code, negative for a signal."""
        return self._ask({"wait": process})

    def run(self, script: str, folder: Path) -> Ended:
        """Run a script that takes the name of a folder, to its end."""
        output, errors = (folder.with_name(f"{folder.name}.{kind}") for kind in ("output", "errors"))
        returncode = self.wait(self.start(script, [str(folder)], output, errors))
        return Ended(returncode, output.read_text(), errors.read_text())

    def _ask(self, job: Mapping[str, object]) -> int:
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        self._first.stdin.write(json.dumps(job) + "\n")
        self._first.stdin.flush()
        return int(self._first.stdout.readline())
