"""Prepared calls of a connection: what bounds them, and when everything is released."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trocar_api.descriptors import CALL, DONE, Answer, Ask, SlotLayout
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.services.prepared_calls import PreparedCalls
from trocar_server.rpc.transfer.shared_payloads import SharedPayloads
from trocar_server.shared_memory import Segment

LAYOUT = SlotLayout(8, 8, 8192)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = Segment(tmp_path, LAYOUT.slot_bytes)
    yield made
    made.release()
    assert not made.retain(), "whoever used it has released it"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's end, which it closes, and the client's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        yield ours, theirs
    assert ours.fileno() == -1


Answering = Callable[[bytes | None], None]


async def at_once(_ask: Ask, _lent: SharedPayloads, answer: Answering) -> None:
    answer(b"head")


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_unread_answers_end_the_connection(
    ends: tuple[socket.socket, socket.socket], segment: Segment
) -> None:
    ours, theirs = ends
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    calls = PreparedCalls(ours, segment, LAYOUT, 1, at_once)
    sent = 0
    while sent < 100_000 and not calls._has_ended.is_set():
        theirs.send(Ask(CALL, 0, sent).to_bytes())
        sent += 1
        await turns()
    assert 0 < sent < 100_000
    calls.close()
    assert calls.problem == ""


async def test_a_waiting_end_is_told(ends: tuple[socket.socket, socket.socket], segment: Segment) -> None:
    ours, theirs = ends
    calls = PreparedCalls(ours, segment, LAYOUT, 1, at_once)
    waiting = asyncio.create_task(calls.ended(idle_s=60.0))
    theirs.send(Ask(CALL, 0, 1).to_bytes())
    await turns()
    assert Answer.from_bytes(theirs.recv(65)) == Answer(DONE, 0, 1, 4)
    theirs.shutdown(socket.SHUT_RDWR)
    await waiting
    calls.close()


async def test_idle_connections_end(ends: tuple[socket.socket, socket.socket], segment: Segment) -> None:
    calls = PreparedCalls(ends[0], segment, LAYOUT, 1, at_once)
    await calls.ended(idle_s=0.0)
    calls.close()


async def test_memory_is_kept_until_the_last_call_has_ended(
    ends: tuple[socket.socket, socket.socket], segment: Segment
) -> None:
    ours, theirs = ends
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn(_ask: Ask, _lent: SharedPayloads, answer: Answering) -> None:
        has_begun.set()
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            await may_end.wait()  # as work does that must not be abandoned
        answer(b"head")

    calls = PreparedCalls(ours, segment, LAYOUT, 1, stubborn)
    theirs.send(Ask(CALL, 0, 1).to_bytes())
    await has_begun.wait()
    calls.close()
    await turns()
    assert segment.is_borrowed
    assert ours.fileno() != -1
    may_end.set()
    await turns()
    assert not segment.is_borrowed


async def test_memory_is_released_once_where_several_last_calls_end_together(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    ours, theirs = ends
    segment = Segment(tmp_path, 2 * LAYOUT.slot_bytes)

    async def until_cancelled(_ask: Ask, _lent: SharedPayloads, _answer: Answering) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ServiceError(ErrorReason.CANCELLED, "it was cancelled") from None

    calls = PreparedCalls(ours, segment, LAYOUT, 2, until_cancelled)
    for slot in range(2):
        theirs.send(Ask(CALL, slot, 1).to_bytes())
    await turns()
    assert len(calls._running) == 2
    calls.close()
    await turns()
    assert segment.retain(), "it is the lender's yet"
    segment.release()
    segment.release()
    assert not segment.retain()


async def test_finishing_waits_for_running_calls_and_takes_no_more(
    ends: tuple[socket.socket, socket.socket], segment: Segment
) -> None:
    ours, theirs = ends
    has_begun, may_end, count = asyncio.Event(), asyncio.Event(), []

    async def held(ask: Ask, _lent: SharedPayloads, answer: Answering) -> None:
        count.append(ask.number)
        has_begun.set()
        await may_end.wait()
        answer(b"head")

    calls = PreparedCalls(ours, segment, LAYOUT, 1, held)
    theirs.send(Ask(CALL, 0, 1).to_bytes())
    await has_begun.wait()
    finishing = asyncio.create_task(calls.finish())
    await turns()
    theirs.send(Ask(CALL, 0, 2).to_bytes())
    may_end.set()
    await finishing
    assert Answer.from_bytes(theirs.recv(65)) == Answer(DONE, 0, 1, 4)
    calls.close()
    assert count == [1]
