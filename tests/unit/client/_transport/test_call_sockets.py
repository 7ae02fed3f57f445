"""Slots of prepared calls: each is free again once its call has ended, however that was."""

from __future__ import annotations

import asyncio
import mmap
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from trocar._transport.call_sockets import (
    AsyncCallSocket,
    CallSocket,
    NotPreparedError,
    PreparedCallError,
    SlotMemory,
)
from trocar_api.descriptors import CALL, DESCRIPTOR_BYTES, DONE, Answer, Ask, SlotLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOTS = 2
REQUEST_ID = "0" * 32


class Lease:
    """The call that keeps the slots."""

    def cancel(self) -> None:
        """End it."""


@pytest.fixture
def memory() -> SlotMemory:
    layout = SlotLayout(64, 64, 64)
    return SlotMemory(mmap.mmap(-1, layout.slot_bytes * SLOTS), layout, SLOTS)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end, and the server's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def answer_all(server: socket.socket) -> None:
    """Answer every call that has come; calls that were given up first are answered as well."""
    server.setblocking(False)
    try:
        while True:
            ask = Ask.from_bytes(server.recv(DESCRIPTOR_BYTES), SLOTS)
            if ask.kind == CALL:
                server.send(Answer(DONE, ask.slot, ask.number, 0).to_bytes())
    except BlockingIOError:
        pass


async def answered_call(
    calls: AsyncCallSocket, server: socket.socket, timeout_s: float
) -> asyncio.Task[bytes]:
    """Begin a call whose answer waits on the socket, unread."""
    slot = calls.take()
    assert slot is not None
    call = asyncio.create_task(calls.call(slot, REQUEST_ID, timeout_s))
    await asyncio.sleep(0)
    answer_all(server)
    return call


async def test_a_slot_whose_answer_came_with_the_deadline_is_free(memory: SlotMemory, ends: Any) -> None:
    ours, server = ends
    calls = AsyncCallSocket(Lease(), ours, memory)
    for _ in range(2 * SLOTS):
        call = await answered_call(calls, server, 0.01)
        until = time.monotonic() + 0.02
        while time.monotonic() < until:  # the program computes: the loop sees both at once
            pass
        with pytest.raises(PreparedCallError, match="deadline"):
            await call
    assert calls.is_open
    calls.close()


@pytest.mark.parametrize("is_answered_first", [True, False])
async def test_a_slot_whose_answer_came_as_its_task_was_cancelled_is_free(
    memory: SlotMemory, ends: Any, is_answered_first: bool
) -> None:
    ours, server = ends
    calls = AsyncCallSocket(Lease(), ours, memory)
    for _ in range(2 * SLOTS):
        call = await answered_call(calls, server, 30.0)
        for happens in (calls._deliver, call.cancel)[:: 1 if is_answered_first else -1]:
            happens()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert calls.is_open
    calls.close()


@pytest.mark.parametrize("ends_it", ["client", "server"])
async def test_a_call_on_a_connection_that_has_ended_does_not_wait(
    memory: SlotMemory, ends: Any, ends_it: str
) -> None:
    ours, server = ends
    calls = AsyncCallSocket(Lease(), ours, memory)
    slot = calls.take()
    assert slot is not None
    calls.close() if ends_it == "client" else server.close()
    with pytest.raises(NotPreparedError):
        await calls.call(slot, REQUEST_ID, 1.0)


def test_a_slot_whose_answer_came_with_ctrl_c_is_free(
    memory: SlotMemory, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, server = ends
    calls = CallSocket(Lease(), ours, memory)
    send, receive = calls._send, calls._receive_all

    def answered(*arguments: Any) -> None:
        send(*arguments)
        answer_all(server)

    def interrupted() -> None:
        receive()
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "_send", answered)
    for _ in range(2 * SLOTS):
        slot = calls.take()
        assert slot is not None
        monkeypatch.setattr(calls, "_receive_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.call(slot, REQUEST_ID, 30.0)
        monkeypatch.setattr(calls, "_receive_all", receive)
    assert calls.is_open
    calls.close()
