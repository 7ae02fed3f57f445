"""The other end of prepared calls, by hand: a caller that may do anything."""

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from tests.support.wire.sharing import FOLDER, bearer
from tests.support.wire.wire import CALL_TIMEOUT_S
from trocar_api.descriptors import CALL, Answer, Ask, SlotLayout
from trocar_api.v1 import prepared_pb2 as pb

PREPARE = "/trocar_api.v1.PreparedCallService/PrepareCalls"


def prepare(channel: grpc.Channel, request: pb.PrepareCallsRequest, token: str = "") -> Any:
    """Begin a call of `PrepareCalls`; its replies are bytes."""
    method: Any = channel.unary_stream(PREPARE, None, None)
    return method(request.SerializeToString(), timeout=CALL_TIMEOUT_S, metadata=bearer(token))


class PreparedByHand:
    """A call of `PrepareCalls`, and the socket and memory that it leads to."""

    def __init__(self, channel: grpc.Channel, request: pb.PrepareCallsRequest, token: str = "") -> None:
        self.call = prepare(channel, request, token)
        self.prepared = pb.PrepareCallsResponse.FromString(next(self.call)).prepared
        self.layout = SlotLayout(
            self.prepared.payload_byte_count, self.prepared.reply_byte_count, self.prepared.head_byte_count
        )
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.settimeout(CALL_TIMEOUT_S)
            self.socket.connect(os.fspath(FOLDER / self.prepared.socket_name))
            _, (self.file,), _, _ = socket.recv_fds(self.socket, 64, 4)
        except BaseException:
            self.socket.close()
            self.call.cancel()
            raise
        self.memory = mmap.mmap(self.file, self.layout.slot_bytes * self.prepared.slot_count)

    def ask(self, slot: int = 0, number: int = 1, kind: int = CALL, timeout_s: float = 60.0) -> None:
        """Send a descriptor."""
        self.socket.send(Ask(kind, slot, number, timeout_s).to_bytes())

    def answer(self) -> Answer:
        """Receive a descriptor."""
        return Answer.from_bytes(self.socket.recv(65))

    def has_ended(self) -> bool:
        """Whether the server closes the connection, whatever it still answers before."""
        try:
            while self.socket.recv(65):
                pass
        except ConnectionError:
            pass
        return True

    def status(self) -> grpc.StatusCode:
        """Wait for the end of the call, and return its status."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = self.call.code()
        return code

    def close(self) -> None:
        """End it from this side."""
        self.socket.close()
        self.call.cancel()
        self.memory.close()
        os.close(self.file)


@contextmanager
def prepared_by_hand(
    channel: grpc.Channel, request: pb.PrepareCallsRequest, token: str = ""
) -> Iterator[PreparedByHand]:
    """Prepare a request for the length of the context."""
    opened = PreparedByHand(channel, request, token)
    try:
        yield opened
    finally:
        opened.close()
