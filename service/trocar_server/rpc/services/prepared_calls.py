"""Prepared calls: the calls on one call socket, each a call of `ExtractionService.Extract`."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from trocar_api.descriptors import (
    CANCEL,
    DESCRIPTOR_BYTES,
    DONE,
    FAILED,
    NO_ROOM,
    Answer,
    Ask,
    DescriptorError,
    SlotLayout,
)
from trocar_api.reasons import ErrorReason
from trocar_api.v1.shared_memory_pb2 import SegmentRange
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.status import status_details
from trocar_server.rpc.transfer.shared_payloads import SharedPayloads
from trocar_server.shared_memory import Segment, Slot

Serve = Callable[[Ask, SharedPayloads, Callable[[bytes | None], None]], Awaitable[None]]
"""Makes the call of a descriptor; hands over the reply but for its values, None if these lack room.

What is recorded about a call is done after that. Raises `ServiceError` for a call that failed.
"""


class PreparedCalls:
    """The calls of one connection. Belongs to the event loop, which reads the socket itself.

        calls = PreparedCalls(connection, segment, layout, slot_count, serve)
        await calls.ended(idle_s=600.0)
        calls.close()

    A descriptor that is wrong in any way ends the connection: its client is defective or hostile. So does one
    for a slot whose call is running, which bounds both the calls and the unread answers.

    Args:
        connection: The socket; closed in the end.
        segment: The memory of the slots.
        layout: Of each slot.
        slot_count: Number of slots.
        serve: Makes a call.

    Attributes:
        problem: Why the server ended the connection; empty where it did not.
    """

    def __init__(
        self, connection: socket.socket, segment: Segment, layout: SlotLayout, slot_count: int, serve: Serve
    ) -> None:
        segment.retain()  # until the last call has ended
        self.problem = ""
        self._connection, self._segment, self._layout, self._serve = connection, segment, layout, serve
        starts = range(0, slot_count * layout.slot_bytes, layout.slot_bytes)
        self._slots = [Slot(segment, start, layout.slot_bytes) for start in starts]
        self._lent = [_lent(slot, layout) for slot in self._slots]
        self._running: dict[int, tuple[int, asyncio.Task[None]]] = {}
        """Number and task of the call in each slot that has one."""
        self._used_at = time.monotonic()
        self._has_ended = asyncio.Event()
        self._is_closed = self._is_released = False
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection, self._read)

    async def ended(self, idle_s: float) -> None:
        """Wait until the connection has ended, or no call was made for so many seconds."""
        while not self._has_ended.is_set():
            left_s = idle_s if self._running else self._used_at + idle_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._has_ended.wait()
            except TimeoutError:
                continue

    async def finish(self) -> None:
        """Take no more calls, and wait for those that are running."""
        self._stop_reading()
        if tasks := [task for _, task in self._running.values()]:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """Cancel what is running; with the last call the socket is closed and the memory released."""
        self._end()
        self._is_closed = True
        for _, task in self._running.values():
            task.cancel()
        if not self._running:
            self._release()

    def _release(self) -> None:
        """Release everything once: several last calls may end in the same turn of the loop."""
        if not self._is_released:
            self._is_released = True
            self._connection.close()
            self._segment.release()

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)

    def _read(self) -> None:
        """Read the descriptors that have come, and so many at most that other connections get their turn."""
        try:
            for _ in self._slots:
                data = self._connection.recv(DESCRIPTOR_BYTES + 1, socket.MSG_DONTWAIT)
                if not data:
                    self._end()
                    return
                self._take(Ask.from_bytes(data, len(self._slots)))
        except BlockingIOError:
            return
        except OSError:
            self._end()
        except DescriptorError as error:
            self._end(str(error))

    def _take(self, ask: Ask) -> None:
        number, task = self._running.get(ask.slot, (0, None))
        if ask.kind == CANCEL:
            if task is not None and number == ask.number:
                task.cancel()
            return
        if task is not None:
            raise DescriptorError(f"the call in slot {ask.slot} is not answered yet")
        task = asyncio.get_running_loop().create_task(self._run(ask))
        self._running[ask.slot] = ask.number, task
        task.add_done_callback(partial(self._forget, ask))

    async def _run(self, ask: Ask) -> None:
        try:
            await self._serve(ask, self._lent[ask.slot], partial(self._answer, ask, DONE))
        except ServiceError as error:
            self._answer(ask, FAILED, status_details(error, ask.request_id.hex()))

    def _answer(self, ask: Ask, kind: int, head: bytes | None) -> None:
        """Write a reply or a status into the slot of a call, and tell its client."""
        if head is None or len(head) > self._layout.head_bytes:
            answer = Answer(NO_ROOM, ask.slot, ask.number)
        else:
            self._slots[ask.slot].write(self._layout.head_offset, np.frombuffer(head, np.uint8))
            answer = Answer(kind, ask.slot, ask.number, len(head))
        del self._running[ask.slot]  # first: the client may use the slot as soon as it is told
        try:
            self._connection.send(answer.to_bytes(), socket.MSG_DONTWAIT)
        except OSError:  # it has gone, or does not read its answers
            self._end()

    def _forget(self, ask: Ask, task: asyncio.Task[None]) -> None:
        """Answer a call that was cancelled before it began; release everything after the last one."""
        self._used_at = time.monotonic()
        is_unanswered = self._running.get(ask.slot, (0, None))[1] is task
        if task.cancelled() and is_unanswered:
            error = ServiceError(ErrorReason.CANCELLED, "the call was cancelled")
            self._answer(ask, FAILED, status_details(error, ask.request_id.hex()))
        elif not task.cancelled() and (failure := task.exception()) is not None:  # its memory was truncated
            if is_unanswered:
                del self._running[ask.slot]
            self._end(str(failure))
        if self._is_closed and not self._running:
            self._release()

    def _end(self, problem: str = "") -> None:
        if not self._has_ended.is_set():
            self.problem = problem
            self._stop_reading()
            self._has_ended.set()


def _lent(slot: Slot, layout: SlotLayout) -> SharedPayloads:
    """Describe where a call's payloads are in its slot, and where the values of its reply belong."""
    payload = SegmentRange(offset=0, byte_count=layout.payload_bytes)
    reply = SegmentRange(offset=layout.reply_offset, byte_count=layout.reply_bytes)
    return SharedPayloads((slot, payload), (slot, reply))
