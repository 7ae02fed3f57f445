"""gRPC-Web framing: what a body may be, however it is cut."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.servers.grpc_web import framed
from trocar._page.frames import FramingError, message_frame, messages, trailers_frame

LIMIT = 100


def parsed(parts: Iterable[bytes]) -> list[bytes]:
    async def given_parts() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def collect() -> list[bytes]:
        return [message async for message in messages(given_parts(), LIMIT)]

    return asyncio.run(collect())


@given(
    st.lists(st.binary(max_size=LIMIT), max_size=5),
    st.lists(st.integers(min_value=1, max_value=20), min_size=1),
)
def test_messages_come_out_as_they_went_in(sent: list[bytes], cuts: list[int]) -> None:
    body, parts = framed(*sent), []
    for cut in cuts * (len(body) + 1):
        parts.append(body[:cut])
        body = body[cut:]
        if not body:
            break
    assert parsed(parts) == sent


def test_a_frame_of_a_message_is_read_back() -> None:
    assert parsed([message_frame(b"abc"), message_frame(b"")]) == [b"abc", b""]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\x00\x00\x00\x00", "within a frame"),
        (b"\x00\x00\x00\x00\x03ab", "within a frame"),
        (b"\x80\x00\x00\x00\x00", "flags 0x80"),
        (b"\x01\x00\x00\x00\x00", "flags 0x1"),
        (b"\x00\x00\x00\x00\x65", "101 bytes, more than the 100"),
        (b"\x00\xff\xff\xff\xff", "more than the 100"),
    ],
)
def test_other_bodies_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(FramingError, match=words):
        parsed([body])


def test_trailers_are_headers_in_a_frame() -> None:
    frame = trailers_frame(5, "no model 'ü'\r\n100%", [("x-bin", b"\x00\xff"), ("y", "z")])
    assert frame[:5] == b"\x80" + (len(frame) - 5).to_bytes(4, "big")
    assert frame[5:].decode() == (
        "grpc-status: 5\r\ngrpc-message: no model '%C3%BC'%0D%0A100%25\r\nx-bin: AP8\r\ny: z\r\n"
    )
