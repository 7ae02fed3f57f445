"""The other end of shared memory, by hand: a caller that may do anything."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from tests.support.wire.wire import CALL_TIMEOUT_S, request, send
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import shared_memory_pb2 as wire

FOLDER = Path("/dev/shm")
SHARE = "/trocar_api.v1.SharedMemoryService/ShareMemory"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the header of a token: without a token file every token is a principal of its own."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class Stream:
    """One call of `ShareMemory`."""

    def __init__(self, channel: grpc.Channel, token: str = "") -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        method: Any = channel.stream_stream(SHARE, None, None)
        self.call = method(iter(self._requests.get, None), timeout=CALL_TIMEOUT_S, metadata=bearer(token))

    def ask(self, **part: Any) -> wire.ShareMemoryResponse:
        """Send a message and return the answer."""
        return self.ask_bytes(wire.ShareMemoryRequest(**part).SerializeToString())

    def ask_bytes(self, message: bytes) -> wire.ShareMemoryResponse:
        """Send bytes and return the answer."""
        self._requests.put(message)
        return wire.ShareMemoryResponse.FromString(next(self.call))

    def open(self, byte_count: int) -> wire.Segment:
        """Open a segment without mapping it."""
        return self.ask(open=wire.OpenSegment(byte_count=byte_count)).segment

    def mapped(self, byte_count: int) -> tuple[wire.Segment, mmap.mmap]:
        """Open a segment and map it."""
        segment = self.open(byte_count)
        memory = map_file(segment)
        assert self.ask(mapped=segment.id).ready == segment.id
        return segment, memory

    def end(self) -> None:
        """Half-close and read to the end, when everything has been taken back."""
        self._requests.put(None)
        for _ in self.call:
            pass

    def cancel(self) -> None:
        """End it from this side at once."""
        self._requests.put(None)
        self.call.cancel()


@contextmanager
def stream(channel: grpc.Channel, token: str = "") -> Iterator[Stream]:
    """Keep a call of `ShareMemory` for the length of the context."""
    opened = Stream(channel, token)
    try:
        yield opened
    finally:
        opened.cancel()


def map_file(segment: wire.Segment) -> mmap.mmap:
    """Map a segment by its name."""
    descriptor = os.open(FOLDER / segment.name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, segment.byte_count)
    finally:
        os.close(descriptor)


def place(segment_id: str, byte_count: int, offset: int = 0) -> wire.SegmentRange:
    """Name bytes of a segment."""
    return wire.SegmentRange(segment_id=segment_id, offset=offset, byte_count=byte_count)


def row_request(**fields: Any) -> pb.ExtractRequest:
    """Ask the model `identity` for a row of three numbers, without chunks."""
    return request(chunks=[], **fields)


def send_as(token: str, channel: grpc.Channel, message: pb.ExtractRequest) -> list[pb.ExtractResponse]:
    """Make one Extract call as the principal of a token.

    Raises:
        TrocarError: As the client would raise it.
    """
    own = grpc.intercept_channel(channel, _Bearer(token)) if token else channel
    return [pb.ExtractResponse.FromString(found) for found in send(own, message)]


class _Bearer(grpc.StreamStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        details = client_call_details._replace(metadata=bearer(self._token))
        return continuation(details, request_iterator)
