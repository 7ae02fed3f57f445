"""The hand-written codec against protobuf itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar._request.inputs import wire_inputs
from trocar._wire.requests import ExtractCall, extract_call
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tap_pb2
from trocar_api.v1.tensor_pb2 import TensorChunk
from trocar_api.wire import Chunk, Layout, WireError, chunk_parts, split_message, split_payload

CHUNKS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.binary(max_size=300)), max_size=5
)


@given(head=st.builds(pb.ExtractRequest, model_id=st.text(max_size=20)), chunks=CHUNKS)
def test_hand_built_messages_are_protobufs_own_bytes(
    head: pb.ExtractRequest, chunks: list[tuple[int, int, bytes]]
) -> None:
    parts = [chunk_parts(index, offset, memoryview(data)) for index, offset, data in chunks]
    by_hand = head.SerializeToString() + b"".join(piece for part in parts for piece in part)
    head.chunks.extend(
        TensorChunk(payload_index=index, offset_bytes=offset, data=data) for index, offset, data in chunks
    )
    assert by_hand == head.SerializeToString()


@given(head=st.builds(pb.ExtractResponse, stopped_at=st.text(max_size=20)), chunks=CHUNKS)
def test_protobufs_messages_are_split_into_what_they_hold(
    head: pb.ExtractResponse, chunks: list[tuple[int, int, bytes]]
) -> None:
    whole = pb.ExtractResponse()
    whole.CopyFrom(head)
    whole.chunks.extend(
        TensorChunk(payload_index=index, offset_bytes=offset, data=data) for index, offset, data in chunks
    )
    rest, found = split_message(whole.SerializeToString())
    assert rest == head.SerializeToString()
    assert [(chunk.payload_index, chunk.offset_bytes, bytes(chunk.data)) for chunk in found] == chunks


@given(
    head=st.builds(pb.ExtractResponse, stopped_at=st.text(max_size=20), timing=st.builds(pb.ServerTiming)),
    sizes=st.lists(st.integers(0, 300), max_size=4),
    data=st.data(),
)
def test_a_message_of_a_known_layout_is_read_as_without_it(
    head: pb.ExtractResponse, sizes: list[int], data: st.DataObject
) -> None:
    def message(fill: int) -> bytes:
        parts = [chunk_parts(index, 0, memoryview(bytes([fill]) * size)) for index, size in enumerate(sizes)]
        return head.SerializeToString() + b"".join(piece for part in parts for piece in part)

    layout = Layout.of(message(0))
    assert layout is not None
    assert layout.sizes == (sizes if all(sizes) else None)
    assert layout.chunks(message(255)) == split_message(message(255))[1]
    changed = bytearray(message(7))
    if changed:
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    found = layout.chunks(bytes(changed))
    if found is not None:  # only data was changed
        assert (head.SerializeToString(), found) == split_message(bytes(changed))


def test_a_field_that_varies_is_found_and_all_others_are_compared() -> None:
    def message(queue_s: float, name: str = "layer4", data: bytes = b"ab") -> bytes:
        head = pb.ExtractResponse(timing=pb.ServerTiming(queue_s=queue_s), stopped_at=name)
        return head.SerializeToString() + b"".join(chunk_parts(0, 0, memoryview(data)))

    layout = Layout.of(message(0.5), pb.ExtractResponse.TIMING_FIELD_NUMBER)
    assert layout is not None
    assert layout.varying is not None
    assert layout.chunks(message(0.25, data=b"xy")) == [Chunk(0, 0, memoryview(b"xy"))]
    assert pb.ExtractResponse.FromString(message(0.25)[layout.varying]).timing.queue_s == 0.25
    assert layout.chunks(message(0.5, "layer3")) is None
    assert layout.chunks(message(0.5, data=b"abc")) is None
    assert layout.chunks(message(0.0)) is None
    assert Layout.of(message(0.5) + message(0.5), pb.ExtractResponse.TIMING_FIELD_NUMBER) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_split_or_refused(message: bytes) -> None:
    try:
        head, chunks = split_message(message)
    except WireError:
        return
    assert len(head) + sum(chunk.data.nbytes for chunk in chunks) <= len(message)


@given(st.binary(max_size=200).map(lambda body: b"\x7a" + bytes((len(body) & 0x7F,)) + body))
def test_any_bytes_in_a_chunk_are_split_or_refused(message: bytes) -> None:
    try:
        split_message(message)
    except WireError:
        return


@given(payloads=st.lists(st.binary(max_size=4000), min_size=1, max_size=4), chunk_bytes=st.integers(1, 1000))
def test_split_payloads_are_the_payloads(payloads: list[bytes], chunk_bytes: int) -> None:
    parts = [
        piece
        for index, payload in enumerate(payloads)
        for part in split_payload(index, memoryview(payload), chunk_bytes)
        for piece in part
    ]
    message = pb.ExtractRequest.FromString(b"".join(parts))
    assert all(0 < len(chunk.data) <= chunk_bytes for chunk in message.chunks)
    for index, payload in enumerate(payloads):
        own = [chunk for chunk in message.chunks if chunk.payload_index == index]
        assert b"".join(chunk.data for chunk in own) == payload


def test_one_message_is_what_protobuf_would_send() -> None:
    call = extract_call("resnet18", [b"first image", b"second"], ["layer4"])
    expected = pb.ExtractRequest(model_id="resnet18", taps=[tap_pb2.Tap(selector="layer4")])
    expected.inputs.extend(wire_inputs([b"first image", b"second"])[0])
    expected.chunks.append(TensorChunk(data=b"first image"))
    expected.chunks.append(TensorChunk(payload_index=1, data=b"second"))
    assert call.message() == expected.SerializeToString()


def test_a_large_request_is_head_and_messages_of_one_mebibyte() -> None:
    call = ExtractCall(b"", [memoryview(bytes(5 << 20)), memoryview(b"abc"), memoryview(b"")])
    assert not call.fits_one_message
    head, *rest = call.messages()
    assert head == b""
    assert all(len(message) <= (1 << 20) + 64 for message in rest)
    found = [chunk for message in rest for chunk in pb.ExtractRequest.FromString(message).chunks]
    assert [(chunk.payload_index, chunk.offset_bytes) for chunk in found] == [
        *((0, index << 20) for index in range(5)),
        (1, 0),
    ]


def test_small_payloads_share_a_message() -> None:
    call = ExtractCall(b"", [memoryview(bytes(100_000)) for _ in range(50)])
    assert len(list(call.messages())) == 1 + 5


@pytest.mark.parametrize("message", [b"\x7a", b"\x7a\x05ab", b"\x0b", b"\xff" * 11])
def test_broken_messages_are_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        split_message(message)


def test_a_message_of_too_many_fields_is_refused() -> None:
    with pytest.raises(WireError, match="65,536 fields"):
        split_message(b"\x08\x00" * ((1 << 16) + 1))


def test_a_chunk_of_too_many_fields_is_refused() -> None:
    few, many = (b"\x08\x01" * count for count in (8, 9))
    message = bytes((15 << 3 | 2, len(few))) + few
    assert split_message(message) == (b"", [Chunk(1, 0, memoryview(b""))])
    for read in (split_message, Layout.of):
        with pytest.raises(WireError, match="8 fields"):
            read(message + bytes((15 << 3 | 2, len(many))) + many)


def test_as_many_fields_as_are_allowed_are_read() -> None:
    message = b"\x08\x00" * (1 << 16)
    assert split_message(message) == (message, [])
