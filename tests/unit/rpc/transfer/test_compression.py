"""gzip in messages is unpacked within bounds; Python's own gzip is the oracle."""

import gzip
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.transfer.compression import MAX_BYTES, unpacked

MIB = 1 << 20


@given(st.binary(max_size=2000))
def test_what_was_packed_comes_out(plain: bytes) -> None:
    assert unpacked(gzip.compress(plain)) == plain


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, MAX_BYTES])
def test_sizes_around_the_boundaries_come_out(size: int) -> None:
    assert unpacked(gzip.compress(b"x" * size)) == b"x" * size


@given(st.builds(pb.ExtractRequest, model_id=st.text(), start_at=st.text()))
def test_messages_of_protobuf_stay_as_they_are(message: pb.ExtractRequest) -> None:
    encoded = message.SerializeToString()
    assert unpacked(encoded) is encoded


def reason_of(message: bytes) -> ErrorReason:
    with pytest.raises(ServiceError) as caught:
        unpacked(message)
    return caught.value.reason


@pytest.mark.parametrize("size", [MAX_BYTES + 1, MAX_BYTES + MIB, 200 * MIB])
def test_what_becomes_too_large_is_refused_without_its_memory(size: int) -> None:
    packed = gzip.compress(bytes(size))
    tracemalloc.start()
    try:
        reason = reason_of(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reason is ErrorReason.REQUEST_TOO_LARGE
    assert peak < MAX_BYTES + 4 * MIB


def test_a_lie_about_the_size_does_not_help() -> None:
    packed = gzip.compress(bytes(200 * MIB))[:-4] + (10).to_bytes(4, "little")
    assert reason_of(packed) is ErrorReason.REQUEST_TOO_LARGE


@given(st.binary(max_size=200))
def test_bytes_that_only_begin_like_gzip_are_refused(rest: bytes) -> None:
    assert reason_of(b"\x1f\x8b\xff" + rest + bytes(4)) is ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize("spoil", [lambda p: p[:-1], lambda p: p + b"x", lambda p: p[:20], lambda p: p + p])
def test_what_is_cut_off_or_goes_on_is_refused(spoil) -> None:  # type: ignore[no-untyped-def]
    refused = (ErrorReason.INVALID_ARGUMENT, ErrorReason.REQUEST_TOO_LARGE)
    assert reason_of(spoil(gzip.compress(bytes(range(256)) * 50))) in refused
