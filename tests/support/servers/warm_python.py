"""Python programs that begin with torch, the client and the server imported: 0.1 instead of 3 s each.

    with Popen([sys.executable, "-m", "trocar", "serve", "resnet18"], stdout=PIPE, text=True) as process: ...
    done = run([sys.executable, "-c", program], capture_output=True, text=True)

A first process imports and forks for every program, which then runs as the main module with its own
descriptors, folder and environment, and ends as any other: threads are joined, `atexit` is called, the
interpreter is taken down. A program that is about imports, memory or the interpreter's own settings needs
`subprocess`.
"""

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ALSO = "TROCAR_TEST_IMPORTS"
"""Variable with the names of more modules that are imported before all programs."""
_MESSAGE_BYTES = 1 << 17
_MOST_PASSED = 8
_LAST_DESCRIPTOR = 4096
_ROOT = Path(__file__).parents[3]
_CLEAN = ("PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONHOME")
"""What the interpreter reads as it starts: a program's must be those of the tests."""


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of Python: `-W`, then `-c`, `-m` or a file; no preexec_fn, user, umask."""

    _status: socket.socket

    def _execute_child(  # noqa: PLR0917 - as it is called
        self,
        args: Sequence[Any],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        *rest: Any,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        assert args[0] == sys.executable
        assert all(environment.get(name) == os.environ.get(name) for name in _CLEAN)
        job = {
            "words": [os.fspath(word) for word in args[1:]],
            "environment": environment,
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),  # noqa: PTH109 - as it is sent
            "is_leader": start_new_session,
            "passed": list(pass_fds),
        }
        self._status, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = [p2cread, c2pwrite, errwrite]
        with other:
            own = [own if found == -1 else found for own, found in enumerate(given)]
            self.pid = _first().start(job, [*own, other.fileno(), *pass_fds], self._status)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = int(self._status.recv(16) or -signal.SIGKILL)
                self._status.close()
        return int(self.returncode)

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode


def run(
    words: Sequence[Any],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Do what `subprocess.run` does, without its `input`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class _First:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.servers.warm_python", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                cwd=_ROOT,  # a test may be in another folder, where there is no package `tests`
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no threads before a fork
            )

    def start(self, job: Mapping[str, Any], descriptors: list[int], status: socket.socket) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(job).encode()], descriptors)
            return int(status.recv(16))

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


_running: list[_First] = []
_starting = threading.Lock()


def _first() -> _First:
    with _starting:
        if not _running:
            _running.append(_First())
        return _running[0]


def close() -> None:
    """End the process that forks, if there is one; programs that run go on."""
    while _running:
        _running.pop().close()


# --- The process that forks -------------------------------------------------------------------------------


def _imports() -> None:
    from trocar_server.app.quick_imports import without_dynamo

    with without_dynamo():
        for name in ("trocar_server.app.app", "trocar_server.__main__", "trocar._cli.app", "trocar.aio"):
            import_module(name)
    for name in os.environ.get(ALSO, "").split():
        import_module(name)
    gc.collect()
    gc.freeze()  # or a program's end takes 1 s: it looks for garbage in what it shares with the others


def _next_program(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns its program in a fork, None once nobody can ask any more."""
    children: dict[int, tuple[int, int]] = {}  # by process descriptor: its id, and whom to tell
    while True:
        watched: list[Any] = [control, *children]
        for ready in select.select(watched, [], [])[0]:
            if ready is not control:
                pid, status = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ready)
                with suppress(BrokenPipeError), socket.socket(fileno=status) as telling:
                    telling.send(str(code).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4 + _MOST_PASSED)
            if not message:
                return None
            job: dict[str, Any] = json.loads(message)
            pid = os.fork()
            if pid == 0:
                _become(job, descriptors[:3], descriptors[4:])
                return job
            status = descriptors.pop(3)
            os.write(status, str(pid).encode())
            children[os.pidfd_open(pid)] = (pid, status)
            for descriptor in descriptors:
                os.close(descriptor)


def _become(job: Mapping[str, Any], descriptors: Sequence[int], passed: Sequence[int]) -> None:
    if job["is_leader"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    # Its own numbers may be those that the program knows others by.
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_DESCRIPTOR) for descriptor in passed]
    os.closerange(3, _LAST_DESCRIPTOR)
    for number, descriptor in zip(job["passed"], aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    paths = job["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    tempfile.tempdir = None


def _run(words: list[str]) -> None:
    """Run a program as Python does with these words behind its name."""
    import runpy
    import warnings

    while words[0] == "-W":
        warnings._setoption(words[1])  # type: ignore[attr-defined]
        sys.warnoptions.append(words[1])
        del words[:2]
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]  # noqa: PTH109 - as Python does
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(words[0]), words  # noqa: PTH120 - as Python does
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _imports()
    _control = socket.socket(fileno=int(sys.argv[1]))
    _job = _next_program(_control)
    if _job is not None:
        _control.detach()
        _run(_job["words"])
