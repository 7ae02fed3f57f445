"""Child process of a supervisor: takes settings, is ready with an address, stops at the end of its input.

child = ChildProcess("trocar_server.cluster.replica_server", settings, on_line=print)
address = child.wait_ready()
child.stop(timeout_s=310.0)
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

from trocar_server.cluster.lines import decode, encode

Line = dict[str, Any]


class ChildFailedError(RuntimeError):
    """A child process ended, or never became ready; the message says why."""


class ChildProcess:
    """A Python module that runs as a process of its own.

    Args:
        module: Its name; it speaks the lines of `ParentLines`.
        settings: Its first line.
        on_line: Called on a thread with each of its lines.
        on_end: Called on that thread when it has ended.
    """

    starts: Callable[..., "subprocess.Popen[str]"] = staticmethod(subprocess.Popen)
    """Starts processes; tests replace it."""

    def __init__(
        self,
        module: str,
        settings: Line,
        on_line: Callable[[Line], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_line, self._on_end = on_line, on_end
        self._ready = Event()
        self._address = ""
        self._problem = ""
        self._writing = Lock()
        self._process = self.starts(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self.send(settings)
        self._reader = Thread(target=self._read, name="child-lines", daemon=True)
        self._reader.start()

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def problem(self) -> str:
        """Why it ended."""
        return self._problem or f"the process ended with status {self._process.poll()}"

    def wait_ready(self) -> str:
        """Wait until it is ready; returns its address.

        Raises:
            ChildFailedError: It ended before.
        """
        self._ready.wait()
        if not self._address:
            self._process.wait()
            raise ChildFailedError(self.problem)
        return self._address

    def send(self, line: Line) -> None:
        """Send a line; no effect once it has ended."""
        assert self._process.stdin is not None
        with self._writing, suppress(OSError, ValueError):
            self._process.stdin.write(encode(line))
            self._process.stdin.flush()

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop and wait for its end; after `timeout_s` seconds it is killed."""
        assert self._process.stdin is not None
        with self._writing, suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for text in lines:
                line = decode(text)
                self._problem = line.get("problem", self._problem)
                self._on_line(line)
                if "ready" in line:
                    self._address = line["ready"]
                    self._ready.set()
        self._ready.set()
        self._on_end()
