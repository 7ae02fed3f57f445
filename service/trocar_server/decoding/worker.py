"""Decoding worker, a process of its own: `python -m trocar_server.decoding.worker PARENT`.

It reads one image after another from its standard input, each after a line of JSON, and answers with JSON,
after its length in four bytes, and the pixels: of the whole image, or as resized and cropped for a model. It
ends with its input, or with the process that started it.
`serve` is that loop, for workers of other kinds too.
"""

import json
import os
import resource
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from trocar_server import parent_process
from trocar_server.decoding.headers import damaged
from trocar_server.decoding.pixels import Conversion, decode_image, fitted
from trocar_server.errors import ServiceError

_MAX_MEMORY_BYTES = 2 << 30
"""Of address space: a picture of 64 MiB with all that libraries keep beside it needs less than a quarter."""

Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]
"""Returns an answer's head and bytes for a request's head and bytes."""


def main() -> None:
    """Answer until the input ends; the only argument is the id of the server process."""
    serve(_decode, _MAX_MEMORY_BYTES)


def serve(answer: Answer, max_memory_bytes: int) -> None:
    """Answer one request after another until the input ends.

    Args:
        answer: Returns an answer's head and bytes for a request's head and bytes.
        max_memory_bytes: Most bytes of address space.
    """
    _end_with(int(sys.argv[1]))
    limit = min(max_memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1] % (1 << 63) or max_memory_bytes)
    with suppress(OSError, ValueError):  # macOS knows the limit and does not let it be set
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what libraries print is not the answer
    while line := source.readline():
        head = json.loads(line)
        _answer(answer, head, source.read(head["byte_count"]), sink)


def _answer(answer: Answer, head: dict[str, Any], data: bytes, sink: BinaryIO) -> None:
    made = b""
    try:
        told, made = answer(head, data)
    except ServiceError as error:
        told = {"reason": error.reason, "message": error.message, "details": error.details}
    encoded = json.dumps(told).encode()
    sink.write(len(encoded).to_bytes(4))
    sink.write(encoded)
    sink.write(made)
    sink.flush()


def _decode(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        image = decode_image(data, head["max_pixels"], Conversion(head["orient"], head["scale_16_bit"]))
        if head["fits"]:
            image = fitted(image, head["fits"])
        return {"width": image.width, "height": image.height}, image.tobytes()
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
