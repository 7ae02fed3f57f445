"""Bytes that come in order or not at all."""

from collections.abc import Iterable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk
from trocar_server.errors import ServiceError
from trocar_server.rpc.transfer.messages import (
    PayloadReceiver,
    are_whole,
    whole_payloads,
)


def chunk(data: bytes, index: int = 0, offset: int = 0) -> Chunk:
    return Chunk(index, offset, memoryview(data))


def _received(receiver: PayloadReceiver, chunks: Iterable[Chunk]) -> None:
    receiver.feed(chunks)
    receiver.finish()


def refused(counts: list[int], *chunks: Chunk) -> ServiceError:
    receiver = PayloadReceiver(counts)
    with pytest.raises(ServiceError) as caught:
        _received(receiver, chunks)
    assert caught.value.reason is ErrorReason.INVALID_TENSOR
    assert caught.value.details["field"] == "chunks"
    return caught.value


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.lists(st.integers(1, 17), min_size=1, max_size=60),
)
def test_bytes_arrive_whole_however_they_are_cut(counts: list[int], sizes: list[int]) -> None:
    payloads = [bytes(range(index, index + count)) for index, count in enumerate(counts)]
    receiver, cuts = PayloadReceiver(counts), cycle(sizes)
    for index, payload in enumerate(payloads):
        offset = 0
        while offset < len(payload):
            size = next(cuts)
            receiver.feed([chunk(payload[offset : offset + size], index, offset)])
            offset += size
    assert [found.tobytes() for found in receiver.finish()] == payloads


def test_payloads_without_bytes_are_complete_from_the_start() -> None:
    receiver = PayloadReceiver([0, 0])
    assert receiver.is_complete
    assert [payload.nbytes for payload in receiver.finish()] == [0, 0]


def test_payloads_are_writable_so_that_torch_takes_them_without_a_copy() -> None:
    receiver = PayloadReceiver([3])
    receiver.feed([chunk(b"abc")])
    (payload,) = receiver.finish()
    assert payload.flags.writeable
    assert payload.flags.owndata


@pytest.mark.parametrize(
    ("counts", "chunks"),
    [
        ([4], []),
        ([4], [chunk(b"abc")]),
        ([4, 4], [chunk(b"abcd")]),
        ([4], [chunk(b"abcde")]),
        ([4], [chunk(b"abcd"), chunk(b"e", 0, 4)]),
        ([4], [chunk(b"abcd"), chunk(b"abcd", 1)]),
        ([4], [chunk(b"")]),
        ([4], [chunk(b"cd", 0, 2)]),
        ([4], [chunk(b"ab"), chunk(b"ab")]),
        ([4], [chunk(b"ab"), chunk(b"d", 0, 3)]),
        ([4, 4], [chunk(b"abcd", 1)]),
        ([4, 4], [chunk(b"ab"), chunk(b"abcd", 1)]),
        ([4], [chunk(b"ab", 2**64 - 1)]),
        ([4], [chunk(b"ab", 0, 2**64 - 1)]),
        ([0], [chunk(b"a")]),
    ],
)
def test_bytes_that_do_not_fit_the_plan_are_refused(counts: list[int], chunks: list[Chunk]) -> None:
    refused(counts, *chunks)


@pytest.mark.parametrize(
    ("counts", "chunks", "expected"),
    [
        ([], [], True),
        ([4], [chunk(b"abcd")], True),
        ([4, 2], [chunk(b"abcd"), chunk(b"ef", 1)], True),
        ([4], [], False),
        ([4], [chunk(b"abc")], False),
        ([4], [chunk(b"abcde")], False),
        ([4], [chunk(b"ab"), chunk(b"cd", 0, 2)], False),
        ([4, 2], [chunk(b"ef", 1), chunk(b"abcd")], False),
        ([4, 4], [chunk(b"abcd"), chunk(b"abcd")], False),
        ([4], [chunk(b"abcd", 0, 4)], False),
        ([4, 0], [chunk(b"abcd")], False),
        ([0], [chunk(b"")], False),
    ],
)
def test_payloads_are_whole_where_each_came_in_one_chunk(
    counts: list[int], chunks: list[Chunk], *, expected: bool
) -> None:
    assert are_whole(counts, chunks) is expected
    if expected:
        receiver = PayloadReceiver(counts)
        receiver.feed(chunks)
        assert [found.tobytes() for found in whole_payloads(chunks)] == [
            found.tobytes() for found in receiver.finish()
        ]


def test_whole_payloads_are_copies_that_torch_may_write_to() -> None:
    (payload,) = whole_payloads([chunk(b"abcd")])
    assert payload.flags.writeable
    assert payload.flags.owndata


def test_missing_bytes_are_told_by_number() -> None:
    assert "ends after 3 of 4 bytes" in refused([4], chunk(b"abc")).message


def test_a_gap_is_told_by_position() -> None:
    message = refused([8], chunk(b"ab"), chunk(b"ef", 0, 4)).message
    assert "expected payload 0 from byte 2, got payload 0 from byte 4" in message


def test_a_refused_chunk_changes_nothing() -> None:
    receiver = PayloadReceiver([4])
    receiver.feed([chunk(b"ab")])
    with pytest.raises(ServiceError):
        receiver.feed([chunk(b"cdef", 0, 2)])
    receiver.feed([chunk(b"cd", 0, 2)])
    assert np.array_equal(receiver.finish()[0], np.frombuffer(b"abcd", np.uint8))
