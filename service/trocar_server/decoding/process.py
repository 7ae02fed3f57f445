"""Worker process, server side: started on demand, killed even in the middle of its work."""

import fcntl
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Any

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import ImageHeader
from trocar_server.decoding.pixels import Conversion
from trocar_server.errors import ServiceError

_PACKAGES = Path(__file__).parents[2]
_MAX_HEAD_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20


READY = "is_ready"
"""The word of a request that a process answers once it is ready for others."""


class EndedError(Exception):
    """A worker process ended before its answer."""


class WorkerProcess:
    """A process that answers one request at a time; see `worker` for its other end.

        process = WorkerProcess("trocar_server.processing.worker")
        answer = process.ask({"folder": "mini"}, data, lambda answer: answer["byte_count"])
        process.kill()                  # from any thread; `ask` raises, and the next one starts it anew

    `ask` blocks, so it needs its own thread.

    Args:
        module: What the process runs.
        arguments: Its arguments, after the id of this process.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (module, *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._ready: subprocess.Popen[bytes] | None = None
        """The process that has said that it is ready."""
        self._used: subprocess.Popen[bytes] | None = None
        """The process that has answered a request."""
        self._is_killed = False
        self._is_spent = False
        """Whether the process was killed, even if it looks alive for a moment."""
        self._lock = Lock()

    @property
    def pid(self) -> int | None:
        """The process's id; None where none runs."""
        return self._process.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        """Whether the process that runs has started."""
        return self._process is not None and self._process is self._ready

    @property
    def is_killed(self) -> bool:
        """Whether it was killed since `renew`."""
        return self._is_killed

    def renew(self) -> None:
        """Let `ask` be called again after `kill`; no call of it is under way."""
        self._is_spent = self._is_spent or self._is_killed
        self._is_killed = False

    def kill(self) -> None:
        """Kill the process at once, and let no `ask` start."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def start(self) -> None:
        """Start the process, unless one runs, and wait until it is ready for requests.

        Raises:
            EndedError: It could not start, or was killed.
        """
        try:
            process = self._running()
            if process is not self._ready:
                self._exchange(process, {READY: True, "byte_count": 0}, b"", lambda _: 0)
                self._ready = process
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.end()
            raise EndedError from error

    def ask(
        self, request: dict[str, Any], data: bytes | memoryview, size: Callable[[dict[str, Any]], int]
    ) -> tuple[dict[str, Any], bytearray]:
        """Return the answer's head and its bytes.

        Args:
            request: What is asked; `byte_count` is added.
            data: The bytes that go with it.
            size: Checks the answer's head and returns the number of its bytes. It may raise a
                `ServiceError`: the answer is then not read, and the process ends.

        A process of an earlier request may have died idle, and the kernel may not say so yet: of one with
        threads, `poll` returns None for a moment after the kill. So only a new process blames what was asked.

        Raises:
            ServiceError: As the worker raised it, or `size`.
            EndedError: The process ended over it, or was killed, or its answer is none.
        """
        process = self._process
        is_reused = process is not None and process is self._used
        try:
            process = self._running()
            answer = self._exchange(process, {**request, "byte_count": len(data)}, data, size)
            self._used = process
            return answer
        except ServiceError:
            self._used = process
            raise
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.end()
            if is_reused and not self._is_killed:
                self.start()
                return self.ask(request, data, size)
            raise EndedError from error

    def end(self) -> None:
        """Kill it, and wait for its end."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None
        self._is_spent = False

    def _running(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_killed:
                raise OSError("killed")
            if self._is_spent or (self._process is not None and self._process.poll() is not None):
                self._end()
            if self._process is None:
                self._process = _start(self._command)
                self._finalizer = weakref.finalize(self, _end, self._process)
            return self._process

    def _exchange(
        self,
        process: "subprocess.Popen[bytes]",
        request: dict[str, Any],
        data: bytes | memoryview,
        size: Callable[[dict[str, Any]], int],
    ) -> tuple[dict[str, Any], bytearray]:
        assert process.stdin is not None
        assert process.stdout is not None
        _write(process.stdin, json.dumps(request).encode() + b"\n")
        _write(process.stdin, data)
        head_bytes = int.from_bytes(_read(process.stdout, 4))
        if head_bytes > _MAX_HEAD_BYTES:
            raise ValueError("no answer")
        answer = json.loads(_read(process.stdout, head_bytes))
        if "reason" in answer:
            details = {str(key): str(value) for key, value in answer.get("details", {}).items()}
            raise ServiceError(ErrorReason(answer["reason"]), str(answer["message"]), **details)
        try:
            byte_count = size(answer)
        except ServiceError:
            self.end()
            raise
        return answer, _read(process.stdout, byte_count)


def decode(
    process: WorkerProcess,
    data: bytes | memoryview,
    header: ImageHeader,
    max_pixels: int,
    conversion: Conversion,
    fits: Sequence[Sequence[int]] = (),
) -> tuple[int, int, bytearray]:
    """Return width, height and the RGB values of an image, decoded by a process of `worker`.

    Args:
        process: The process.
        data: The encoded image.
        header: Its header.
        max_pixels: The most pixels of one image.
        conversion: How it is converted to RGB.
        fits: How it is resized and cropped, see `pixels.fitted`; the whole image without any.

    Raises:
        ServiceError: As `decode_image`; `INVALID_IMAGE`, the process ended over it; `CANCELLED`, it was
            killed.
    """
    request = {
        "max_pixels": max_pixels,
        "orient": conversion.orient,
        "scale_16_bit": conversion.scale_16_bit,
        "fits": fits,
    }
    sizes = [(header.width, header.height), (header.height, header.width)]
    if fits:
        sizes = [(right - left, bottom - top) for *_, left, top, right, bottom, _ in fits]

    def size(answer: dict[str, Any]) -> int:
        if (answer["width"], answer["height"]) not in sizes:
            raise ValueError("the process answered another request")
        return int(answer["width"] * answer["height"] * 3)

    try:
        answer, pixels = process.ask(request, data, size)
    except EndedError as error:
        if process.is_killed:
            raise ServiceError(ErrorReason.CANCELLED, "the decoding of the image was stopped") from None
        raise ServiceError(
            ErrorReason.INVALID_IMAGE,
            f"the {header.format} image ended the decoding process, so it is probably damaged; save it again",
        ) from error
    return answer["width"], answer["height"], pixels


def _write(sink: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def _read(source: IO[bytes], byte_count: int) -> bytearray:
    pixels = bytearray(byte_count)
    view, done = memoryview(pixels), 0
    while done < byte_count:
        count = source.readinto(view[done:])  # type: ignore[attr-defined]  # a BufferedReader has it
        if not count:
            raise EOFError
        done += count
    return pixels


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a process by exec: a fork of a process with threads of gRPC and torch may crash."""
    result = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_PACKAGES), *([result] if result else [])])
    process = subprocess.Popen(
        [sys.executable, "-m", command[0], str(os.getpid()), *command[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path},
    )
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # more than this user may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
