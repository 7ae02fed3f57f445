"""Decoding worker, a process of its own: `python -m trocar_server.decoding.worker PARENT`.

It reads one image after another from its standard input, each after a line of JSON, and answers with JSON,
after its length in four bytes, and the pixels: of the whole image, or as resized and cropped for a model. It
ends with its input, or with the process that started it.
`serve` is that loop, for workers of other kinds too.

# Note: [Memory of workers]
The limit is on data (RLIMIT_DATA): memory that is private and can be written. Address space would be no
measure of it: the libraries of torch alone reserve 4 GiB. What a request may become is added for each
request, times the copies that are made on the way, so that a server with small limits has small workers. A
worker that has run out of memory says so, as `REQUEST_TOO_LARGE`, and ends: what its allocator keeps would
fail the next one.
"""

import json
import os
import resource
import select
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from trocar_api.reasons import ErrorReason
from trocar_server import parent_process
from trocar_server.decoding.headers import damaged
from trocar_server.decoding.pixels import Conversion, decode_image, fitted
from trocar_server.decoding.process import READY
from trocar_server.errors import ServiceError

_MAX_MEMORY_BYTES = 1 << 30
"""A picture of 64 MiB with all that libraries keep beside it needs less than half."""
_COPIES = 5
"""Of what a request may become: as given, padded, in other dtypes, and on its way."""

Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], Sequence[Any]]]
"""Returns an answer's head, and buffers with its bytes, for a request's head and bytes."""


def main() -> None:
    """Answer until the input ends; the only argument is the id of the server process."""
    serve(_decode, _MAX_MEMORY_BYTES)


def serve(answer: Answer, own_bytes: int, prepare: Callable[[], object] = bool) -> None:
    """Answer one request after another until the input ends, or a request needs too much memory.

    Args:
        answer: Returns an answer's head and bytes for a request's head and bytes.
        own_bytes: Memory of the process, beside what requests become; see Note: [Memory of workers].
        prepare: Imports what requests need; the process is ready when it has run.
    """
    _end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what libraries print is not the answer
    while line := source.readline():
        head = json.loads(line)
        limit = limit_memory(own_bytes + _COPIES * head.get("most_bytes", 0))
        if head.get(READY):
            prepare()
            _answer(lambda *_: ({}, ()), head, b"", sink, limit)
            continue
        if not _answer(answer, head, source.read(head["byte_count"]), sink, limit):
            return


def limit_memory(byte_count: int) -> int:
    """Limit the data of this process; returns the limit, which is lower where the system sets a lower one."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = byte_count if hard == resource.RLIM_INFINITY else min(byte_count, hard)
    with suppress(OSError, ValueError):  # macOS knows the limit and does not let it be set
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def _answer(answer: Answer, head: dict[str, Any], data: bytes, sink: BinaryIO, limit: int) -> bool:
    """Answer one request; returns whether the process had memory enough."""
    made: Sequence[Any] = ()
    has_memory = True
    try:
        told, made = answer(head, data)
    except Exception as error:
        has_memory = not is_out_of_memory(error)
        if has_memory and not isinstance(error, ServiceError):
            raise
        problem = error if has_memory and isinstance(error, ServiceError) else _too_large(limit)
        told = {"reason": problem.reason, "message": problem.message, "details": problem.details}
    encoded = json.dumps(told).encode()
    sink.write(len(encoded).to_bytes(4))
    sink.write(encoded)
    for part in made:
        sink.write(part)
    sink.flush()
    return has_memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory is short; torch's is no `MemoryError`."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def _too_large(limit: int) -> ServiceError:
    return ServiceError(
        ErrorReason.REQUEST_TOO_LARGE,
        f"the inputs need more memory to be processed than a worker process may have, {limit:,} bytes; send "
        "fewer or smaller ones",
        limit=str(limit),
    )


def _decode(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], Sequence[Any]]:
    try:
        image = decode_image(data, head["max_pixels"], Conversion(head["orient"], head["scale_16_bit"]))
        if head["fits"]:
            image = fitted(image, head["fits"])
        return {"width": image.width, "height": image.height}, (image.tobytes(),)
    except MemoryError:
        raise damaged("encoded") from None


def _end_with(parent: int) -> None:
    """End when the server does, also in the middle of an image, and however it ends."""
    parent_process.end_with(parent)
    threading.Thread(target=_watch_input, daemon=True).start()


def _watch_input() -> None:
    """Exit when the input has no writer any more: decoders let other threads run."""
    poll = select.poll()
    poll.register(0, 0)  # a closed pipe is reported whatever the event mask
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
