"""Compressed messages: unpacked as gzip would, and no further than allowed."""

import gzip
import random
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.unpacking import unpacked

LIMIT = 10_000


async def reason(message: bytes, limit: int = LIMIT) -> ErrorReason:
    with pytest.raises(ServiceError) as caught:
        await unpacked(message, limit)
    return caught.value.reason


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
async def test_what_fits_is_unpacked(size: int) -> None:
    content = bytes(range(256)) * 40
    assert await unpacked(gzip.compress(content[:size]), LIMIT) == content[:size]


@pytest.mark.parametrize("size", [LIMIT + 1, LIMIT * 2, 100 << 20])
async def test_what_does_not_fit_is_refused(size: int) -> None:
    assert await reason(gzip.compress(bytes(size))) is ErrorReason.REQUEST_TOO_LARGE


async def test_a_message_that_says_less_than_it_holds_is_damaged() -> None:
    packed = gzip.compress(bytes(100 << 20))
    assert await reason(packed[:-4] + (100).to_bytes(4, "little")) is ErrorReason.INVALID_ARGUMENT


async def test_a_large_message_is_unpacked_on_another_thread_with_the_same_result() -> None:
    content = random.Random(0).randbytes(200_000)
    packed = gzip.compress(content, 1)
    assert len(packed) > 16 << 10
    assert await unpacked(packed, 1 << 20) == content


async def test_plain_messages_stay_as_they_are() -> None:
    message = pb.ExtractRequest(model_id="m", payload_digest=b"\x1f\x8b").SerializeToString()
    assert await unpacked(message, 1) is message
    assert await unpacked(b"", 1) == b""


@pytest.mark.parametrize("end", [2, 5, 11, 20, -1, -4, -8])
async def test_a_message_that_is_cut_off_is_refused(end: int) -> None:
    """What then stands at its end may say any size."""
    packed = gzip.compress(b"content" * 50)[:end]
    assert await reason(packed, 1 << 32) is ErrorReason.INVALID_ARGUMENT


async def test_a_message_with_something_behind_it_is_damaged() -> None:
    size = (7).to_bytes(4, "little")
    assert await reason(gzip.compress(b"content") + size) is ErrorReason.INVALID_ARGUMENT


@given(st.binary(max_size=300), st.integers(0, 310), st.integers(1, 255))
async def test_a_changed_byte_is_found_or_changes_nothing(content: bytes, position: int, change: int) -> None:
    packed = bytearray(gzip.compress(content))
    packed[position % len(packed)] ^= change
    with suppress(ServiceError):
        # What the head says of the file is no part of what is unpacked, and without its mark it is no gzip.
        assert await unpacked(bytes(packed), LIMIT) in (content, bytes(packed))


@given(st.binary(max_size=500), st.integers(0, 9))
async def test_what_zlib_packs_comes_back(content: bytes, level: int) -> None:
    packing = zlib.compressobj(level, wbits=31)
    assert await unpacked(packing.compress(content) + packing.flush(), LIMIT) == content
