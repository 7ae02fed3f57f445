"""Call sockets: prepared calls through memory that a server on this host shares, for both clients.

    calls = await AsyncCallSocket.open(method, request, metadata)
    slot = calls.take()                      # None: every slot has a call
    calls.memory.payloads[slot][:] = payload
    reply = await calls.call(slot, request_id, timeout_s)    # its values: calls.memory.values[slot]
    calls.give_back(slot)                    # only after a call that has returned a reply

A slot whose call was given up is free once the server has answered: until then it may still write there.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # ships no types

from trocar._transport.channel import trace_headers
from trocar._transport.rpc_errors import DETAILS_KEY
from trocar._transport.segments import FOLDER
from trocar_api.descriptors import (
    CALL,
    CANCEL,
    DESCRIPTOR_BYTES,
    DONE,
    NO_ROOM,
    Answer,
    Ask,
    DescriptorError,
    SlotLayout,
)
from trocar_api.v1 import prepared_pb2 as pb

if TYPE_CHECKING:
    from trocar._base.tensors import Bytes

ANSWER_WITHIN_S = 10.0
"""How long the server may take to prepare a request."""
_NAME = re.compile(r"trocar-[0-9a-f]{32}\.calls")
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NO_TRACE = (bytes(16), bytes(8), 0)


class NotPreparedError(Exception):
    """The server makes no prepared calls for this client, or no longer; other calls may be made."""


class NoRoomError(Exception):
    """The reply to a prepared call is larger than its slot."""


class PreparedCallError(grpc.RpcError):
    """A prepared call that the server has refused or ended, with gRPC's status of it.

    Args:
        code: The status code.
        details: The status message.
        serialized: The `google.rpc.Status`; empty where this client ended the call.
    """

    def __init__(self, code: grpc.StatusCode, details: str, serialized: bytes = b"") -> None:
        self._code, self._details, self._serialized = code, details, serialized

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the status message."""
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Return the status with its reason as gRPC would bring it."""
        return ((DETAILS_KEY, self._serialized),) if self._serialized else ()


class SlotMemory:
    """The slots that a server shares.

    Args:
        memory: The mapping; it lives as long as an array on it.
        layout: Of each slot.
        slot_count: Number of slots.

    Attributes:
        slot_count: As given.
        payloads: Of each slot, where the payloads of a call belong, one after the other.
        values: Where the values of a reply are, each aligned to 64 bytes.
        heads: Where the rest of a reply is.
    """

    def __init__(self, memory: mmap.mmap, layout: SlotLayout, slot_count: int) -> None:
        self.slot_count = slot_count
        starts = range(0, slot_count * layout.slot_bytes, layout.slot_bytes)
        self.payloads = [_part(memory, start, layout.payload_bytes) for start in starts]
        self.values = [_part(memory, start + layout.reply_offset, layout.reply_bytes) for start in starts]
        self.heads = [_part(memory, start + layout.head_offset, layout.head_bytes) for start in starts]


def _part(memory: mmap.mmap, start: int, byte_count: int) -> Bytes:
    return np.frombuffer(memory, np.uint8)[start : start + byte_count]


def connect_socket(prepared: pb.PreparedCalls, folder: Path = FOLDER) -> tuple[socket.socket, SlotMemory]:
    """Connect to a server's call socket, and map the memory that it hands over.

    Raises:
        OSError: There is none: another host, or another namespace.
        ValueError: It is not one of a server of this user.
    """
    if not _NAME.fullmatch(prepared.socket_name):
        raise ValueError(f"{prepared.socket_name!r} is not a valid name of a call socket")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ANSWER_WITHIN_S)
        connection.connect(os.fspath(folder / prepared.socket_name))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise ValueError("the call socket belongs to another user")
        _, descriptors, _, _ = socket.recv_fds(connection, DESCRIPTOR_BYTES, 4)
        try:
            memory = _mapped(prepared, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection, memory


def _mapped(prepared: pb.PreparedCalls, descriptors: list[int]) -> SlotMemory:
    layout = SlotLayout(prepared.payload_byte_count, prepared.reply_byte_count, prepared.head_byte_count)
    byte_count = layout.slot_bytes * prepared.slot_count
    result = os.fstat(descriptors[0]) if len(descriptors) == 1 else None
    if result is None or not stat.S_ISREG(result.st_mode) or not 0 < byte_count <= result.st_size:
        raise ValueError("the server has not handed over the memory that it announced")
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return SlotMemory(mmap.mmap(descriptors[0], byte_count, flags), layout, prepared.slot_count)


def _begun(method: Any, request: pb.PrepareCallsRequest, metadata: tuple[tuple[str, str], ...]) -> Any:
    try:
        return method(request, metadata=metadata)
    except (ValueError, grpc.aio.UsageError) as error:  # gRPC's own for a closed channel
        raise NotPreparedError from error


def _prepared(answer: object) -> pb.PreparedCalls:
    if not (isinstance(answer, pb.PrepareCallsResponse) and answer.HasField("prepared")):
        raise NotPreparedError
    return answer.prepared


class _Slots:
    """Slots of a connection: what is free, what was given up, and what an answer means."""

    def __init__(self, lease: Any, connection: socket.socket, memory: SlotMemory) -> None:
        self.memory = memory
        self._lease, self._connection = lease, connection
        self._free = deque(range(memory.slot_count))
        self._given_up: set[int] = set()
        self._numbers = [0] * memory.slot_count
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return not self._is_closed

    def give_back(self, slot: int) -> None:
        """Return a slot whose reply was read, or that had no call."""
        self._free.append(slot)

    def _send(self, slot: int, request_id: str, timeout_s: float) -> None:
        number = self._numbers[slot] = (self._numbers[slot] + 1) & 0xFFFFFFFF
        ask = Ask(CALL, slot, number, timeout_s, bytes.fromhex(request_id), *_trace())
        self._send_bytes(ask.to_bytes())

    def _give_up(self, slot: int) -> None:
        """Tell the server that nobody waits for a call any more."""
        self._given_up.add(slot)
        if not self._is_closed:
            self._send_bytes(Ask(CANCEL, slot, self._numbers[slot]).to_bytes())

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._connection.send(data, socket.MSG_DONTWAIT)
        except OSError:  # the server has ended it: seen by whoever waits for an answer
            self._break()

    def _received(self) -> Answer | None:
        """Return the next answer that somebody waits for; None where none has come, or at the end."""
        while not self._is_closed:
            try:
                data = self._connection.recv(DESCRIPTOR_BYTES + 1, socket.MSG_DONTWAIT)
                answer = Answer.from_bytes(data)
            except BlockingIOError:
                return None
            except (OSError, DescriptorError):
                break
            if answer.slot >= len(self._numbers) or answer.number != self._numbers[answer.slot]:
                break
            if answer.slot not in self._given_up:
                return answer
            self._given_up.discard(answer.slot)
            self._free.append(answer.slot)
        self._break()
        return None

    def _read(self, answer: Answer) -> bytes:
        """Return the message of a reply.

        Raises:
            NoRoomError: It is larger than the slot.
            PreparedCallError: The call has failed.
        """
        head = self.memory.heads[answer.slot][: answer.head_byte_count]
        if answer.kind == DONE:
            return head.tobytes()
        problem = NoRoomError() if answer.kind == NO_ROOM else _failure(head.tobytes())
        self.give_back(answer.slot)
        raise problem

    def _break(self) -> None:
        """Note that the connection has ended."""
        self._is_closed = True
        self._lease.cancel()


class AsyncCallSocket(_Slots):
    """Prepared calls with asyncio; made by `open`."""

    def __init__(self, lease: Any, connection: socket.socket, memory: SlotMemory) -> None:
        super().__init__(lease, connection, memory)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._deliver)

    @classmethod
    async def open(
        cls, method: Any, request: pb.PrepareCallsRequest, metadata: tuple[tuple[str, str], ...]
    ) -> AsyncCallSocket:
        """Have a request prepared.

        Raises:
            NotPreparedError: It is not.
        """
        lease = _begun(method, request, metadata)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                prepared = _prepared(await lease.read())
                return cls(lease, *await asyncio.to_thread(connect_socket, prepared))
        except (grpc.RpcError, TimeoutError, OSError, ValueError) as error:
            lease.cancel()
            raise NotPreparedError from error
        except BaseException:
            lease.cancel()
            raise

    def take(self) -> int | None:
        """Return a free slot, which is then in use, or None."""
        return self._free.pop() if self._free else None

    async def call(self, slot: int, request_id: str, timeout_s: float) -> bytes:
        """Make the call whose payloads are in a slot, and return its reply but for the values there.

        Raises:
            NotPreparedError: The connection has ended; the call may be made in another way.
            NoRoomError: The reply is larger than the slot.
            PreparedCallError: The call has failed.
        """
        if self._is_closed:  # while the payloads were written: nobody would end the wait
            raise NotPreparedError
        answered = self._waiting[slot] = self._loop.create_future()
        try:
            self._send(slot, request_id, timeout_s)
            async with asyncio.timeout(timeout_s):
                return self._read(await answered)
        except TimeoutError:
            self._leave(slot)
            raise _late() from None
        except asyncio.CancelledError:
            self._leave(slot)
            raise
        finally:
            self._waiting.pop(slot, None)

    def close(self) -> None:
        """End the connection; calls that wait end with it."""
        self._break()

    def _leave(self, slot: int) -> None:
        """Give a call up, unless its answer came at the same moment: before or after it was cancelled."""
        if slot in self._waiting:
            self._give_up(slot)
        else:
            self.give_back(slot)

    def _deliver(self) -> None:
        while (answer := self._received()) is not None:
            answered = self._waiting.pop(answer.slot, None)
            if answered is not None and not answered.done():
                answered.set_result(answer)

    def _break(self) -> None:
        if self._is_closed:
            return
        super()._break()
        self._loop.remove_reader(self._connection)
        self._connection.close()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(NotPreparedError())


class CallSocket(_Slots):
    """Prepared calls with threads; made by `open`. One of the threads that wait reads for all."""

    def __init__(self, lease: Any, connection: socket.socket, memory: SlotMemory) -> None:
        super().__init__(lease, connection, memory)
        self._answers: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self._is_read = False
        """Whether a thread waits for the socket."""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        finalize(self, _end, lease, connection).atexit = False

    @classmethod
    def open(
        cls, method: Any, request: pb.PrepareCallsRequest, metadata: tuple[tuple[str, str], ...]
    ) -> CallSocket:
        """Have a request prepared.

        Raises:
            NotPreparedError: It is not.
        """
        lease = _begun(method, request, metadata)
        timer = threading.Timer(ANSWER_WITHIN_S, lease.cancel)
        timer.start()
        try:
            return cls(lease, *connect_socket(_prepared(next(lease))))
        except (grpc.RpcError, StopIteration, OSError, ValueError) as error:
            lease.cancel()
            raise NotPreparedError from error
        except BaseException:
            lease.cancel()
            raise
        finally:
            timer.cancel()

    def take(self) -> int | None:
        """Return a free slot, which is then in use, or None."""
        with self._changed:
            if not self._free and self._given_up and not self._is_read:
                self._receive_all()
            return self._free.pop() if self._free else None

    def call(self, slot: int, request_id: str, timeout_s: float) -> bytes:
        """Make the call whose payloads are in a slot, and return its reply but for the values there.

        Raises:
            NotPreparedError: The connection has ended; the call may be made in another way.
            NoRoomError: The reply is larger than the slot.
            PreparedCallError: The call has failed.
        """
        deadline = time.monotonic() + timeout_s
        self._send(slot, request_id, timeout_s)
        with self._changed:
            try:
                while (answer := self._answers.pop(slot, None)) is None:
                    self._wait(deadline)
            except NotPreparedError:
                raise
            except BaseException:
                if self._answers.pop(slot, None) is None:
                    self._give_up(slot)
                else:  # it was answered at the same moment
                    self.give_back(slot)
                raise
        return self._read(answer)

    def close(self) -> None:
        """End the connection; calls that wait end with it."""
        self._break()

    def _wait(self, deadline: float) -> None:
        """Wait until something has come, for whichever call; the lock is held, but not meanwhile."""
        if self._is_closed:
            raise NotPreparedError
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _late()
        if self._is_read:
            self._changed.wait(left_s)
            return
        self._is_read = True
        self._changed.release()
        try:
            self._poll.poll(left_s * 1000 + 1)
        finally:
            self._changed.acquire()
            self._is_read = False
            self._receive_all()
            self._changed.notify_all()
            if self._is_closed:
                self._connection.close()

    def _receive_all(self) -> None:
        while (answer := self._received()) is not None:
            self._answers[answer.slot] = answer

    def _break(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            super()._break()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
            if not self._is_read:  # otherwise that thread does it: its number could be another file's by then
                self._connection.close()


def _end(lease: Any, connection: socket.socket) -> None:
    lease.cancel()
    connection.close()


def _trace() -> tuple[bytes, bytes, int]:
    """Return the trace context that is active now: trace id, span id and flags."""
    headers = dict(trace_headers())
    if "traceparent" not in headers:
        return _NO_TRACE
    _, trace_id, span_id, flags = headers["traceparent"].split("-")
    return bytes.fromhex(trace_id), bytes.fromhex(span_id), int(flags, 16)


def _failure(serialized: bytes) -> PreparedCallError:
    try:
        status = status_pb2.Status.FromString(serialized)
    except DecodeError:
        return PreparedCallError(grpc.StatusCode.INTERNAL, "the server sent no readable status")
    return PreparedCallError(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, serialized)


def _late() -> PreparedCallError:
    return PreparedCallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
