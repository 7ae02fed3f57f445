"""Worker process: Python, controlled by pickles over its standard input and output."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from trocar.errors import TrocarError

_TAIL_CHARACTERS = 400
_CLOSE_LIMIT_S = 10


class HelperError(TrocarError):
    """A benchmark's process is gone, or could not run its job."""


class Helper:
    """Worker process; the module's `main` reads from `Commands`.

        with Helper("trocar._bench.worker") as helper:
            helper.send(job)
            result = helper.receive()

    Not `multiprocessing`, which would run the caller's own main module in each of them first, and has one
    interpreter for all.

    Args:
        module: Module whose `main` it runs.
        python: The interpreter; this one when empty.
        environment: Set in its environment, beside what this process has.
    """

    def __init__(self, module: str, python: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process is
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            # Not `-m`: the module would be `__main__`, and its classes others than those that are unpickled.
            [python or sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **paths, **(environment or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()  # it may import torch for seconds before it sees that its pipe is closed
        self.close()

    @property
    def process_id(self) -> int:
        """The operating system's process id."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            HelperError: The process is gone.
        """
        try:
            pickle.dump(message, self._to)
            self._to.flush()
        except (BrokenPipeError, ConnectionError):
            raise self._gone() from None

    def receive(self) -> Any:
        """Return the next message of the process.

        Raises:
            HelperError: The process is gone.
        """
        try:
            return pickle.load(self._from)
        except EOFError:
            raise self._gone() from None

    def ask(self, message: object) -> Any:
        """Send a message and return the answer.

        Raises:
            HelperError: The process is gone.
        """
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """Wait for the process to end, and terminate it if it does not."""
        with suppress(OSError):
            self._to.close()
        try:
            self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()
        self._errors.close()

    def _gone(self) -> HelperError:
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip()[-_TAIL_CHARACTERS:]
        return HelperError(f"a process of the benchmark ended with code {code}: {tail}")


class Commands:
    """Child's end of the pipes: commands in, answers out."""

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose end closes this process
        self._to = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print must not corrupt the pipe

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield pickle.load(sys.stdin.buffer)
            except EOFError:
                return

    def answer(self, message: object) -> None:
        """Send a message to the parent."""
        pickle.dump(message, self._to)
        self._to.flush()
