"""Whatever messages a stream is made of: results, errors of batches, or a status with a reason, in time."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trocar
from tests.contract.test_random_requests import _HEADS as HEADS
from tests.contract.test_random_requests import DEFECTS, _constants
from tests.contract.test_random_requests import _rarely as rarely
from tests.support.files.scale import count
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer
from tests.support.wire.wire import chunk, raw_channel, tensor
from trocar_api.v1 import extraction_pb2, tap_pb2, tensor_pb2
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.v1.statistics_pb2 import STATISTIC_MEAN as MEAN
from trocar_api.v1.statistics_pb2 import STATISTIC_SCOPE_CHANNEL as CHANNEL
from trocar_api.v1.statistics_pb2 import STATISTIC_STD as STD

EXAMPLES = count(300, "TROCAR_FUZZ_EXAMPLES")
DEADLINE_S = 30
METHOD = "/trocar_api.v1.StreamService/ExtractStream"
_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_STARTS = st.builds(
    pb.ExtractStreamStart,
    model_id=rarely(st.just("nowhere"), st.sampled_from(["plain", "identity"])),
    taps=rarely(
        HEADS.map(lambda head: head.taps),
        st.sampled_from(["/in", "/out", "**", "fx:add"]).map(
            lambda selector: [tap_pb2.Tap(selector=selector, statistics=[MEAN, STD], scope=CHANNEL)]
        ),
    ),
    max_chunk_bytes=rarely(_INT32, st.none() | st.just(4096)),
    start_at=rarely(st.sampled_from(["conv", "/in", "identity", "nowhere"]), st.just("")),
    has_running_statistics=st.booleans(),
    first_batch_index=rarely(_INT64, st.integers(0, 2)),
    checkpoint_byte_count=rarely(_INT64 | st.integers(1, 1 << 30), st.just(0) | st.integers(0, 40)),
    checkpoint_interval=rarely(_INT32, st.none() | st.integers(1, 3)),
    batch_timeout_s=rarely(st.floats(), st.none() | st.just(20.0)),
)
_SHAPES = st.sampled_from([(1, 3), (2, 3, 8, 8), (1, 3, 8, 8), (1, 5), (0, 3), ()])
_BATCHES = st.builds(
    pb.StreamBatch,
    batch_index=rarely(_INT64, st.integers(0, 3)),
    inputs=rarely(
        HEADS.map(lambda head: head.inputs),
        _SHAPES.map(lambda shape: [tensor(shape)]),
    ),
)
_CHUNKS = st.builds(
    tensor_pb2.TensorChunk,
    payload_index=rarely(_INT32, st.integers(0, 1)),
    offset_bytes=rarely(_INT64, st.just(0)),
    data=st.binary(max_size=20),
)
_PARTS = st.one_of(
    st.builds(pb.ExtractStreamRequest, start=_STARTS),
    st.builds(pb.ExtractStreamRequest, batch=_BATCHES),
    st.builds(pb.ExtractStreamRequest, batch=_BATCHES),
    st.builds(pb.ExtractStreamRequest, chunks=st.lists(_CHUNKS, max_size=2)),
    st.just(pb.ExtractStreamRequest()),
)


def with_bytes(message: pb.ExtractStreamRequest, share: float) -> pb.ExtractStreamRequest:
    """Add the bytes that a part promises, or only some of them."""
    specs = [entry.tensor for entry in message.batch.inputs]
    specs += [spec for tap in message.start.taps for step in tap.reductions for spec in _constants(step)]
    for index, spec in enumerate(specs):
        size = {1: 4, 2: 8, 4: 2, 5: 1, 9: 8, 10: 1, 11: 8}.get(spec.dtype, 0)
        for side in spec.shape:
            size *= side
        if 0 < size < 1 << 16:
            message.chunks.append(chunk(noise(size).tobytes()[: max(1, int(size * share))], index))
    if 0 < message.start.checkpoint_byte_count < 100:
        message.chunks.append(chunk(bytes(message.start.checkpoint_byte_count), len(specs)))
    return message


def in_order(messages: list[pb.ExtractStreamRequest]) -> list[pb.ExtractStreamRequest]:
    """Put a start first and count the batches up, so that later ones are looked at."""
    messages.sort(key=lambda message: not message.HasField("start"))
    due = messages[0].start.first_batch_index if messages else 0
    for message in messages:
        if message.HasField("batch") and 0 <= due < 1 << 62:
            message.batch.batch_index = due
            due += 1
    return messages


_PIECES = st.builds(with_bytes, _PARTS, rarely(st.floats(0, 1), st.just(1.0)))
_STREAMS = rarely(st.lists(_PIECES, max_size=6), st.lists(_PIECES, max_size=8).map(in_order))


def answers(channel: grpc.Channel, messages: list[bytes]) -> tuple[grpc.StatusCode, list[pb.BatchResult]]:
    method: Any = channel.stream_stream(METHOD, None, None)
    call = method(iter(messages), timeout=DEADLINE_S)
    results = []
    try:
        for message in call:
            response = pb.ExtractStreamResponse.FromString(message)
            if response.HasField("result"):
                results.append(response.result)
    except grpc.RpcError:
        pass
    return call.code(), results


def check(channel: grpc.Channel, messages: list[bytes]) -> None:
    code, results = answers(channel, messages)
    assert code not in DEFECTS
    assert "INTERNAL" not in {result.error.reason for result in results}
    assert [result.batch_index for result in results] == [
        results[0].batch_index + step for step in range(len(results))
    ]


relaxed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


@relaxed
@given(_STREAMS)
def test_no_stream_is_answered_with_a_defect(
    channel: grpc.Channel, messages: list[pb.ExtractStreamRequest]
) -> None:
    check(channel, [message.SerializeToString() for message in messages])


@relaxed
@given(_STREAMS, st.data())
def test_no_cut_or_bent_stream_is_answered_with_a_defect(
    channel: grpc.Channel, messages: list[pb.ExtractStreamRequest], data: st.DataObject
) -> None:
    encoded = [message.SerializeToString() for message in messages]
    index = data.draw(st.integers(0, max(0, len(encoded) - 1)))
    if encoded and encoded[index]:
        position = data.draw(st.integers(0, len(encoded[index]) - 1))
        bent = bytearray(encoded[index])
        bent[position] = data.draw(st.integers(0, 255))
        encoded[index] = bytes(bent) if data.draw(st.booleans()) else encoded[index][:position]
    check(channel, encoded)


TAP = trocar.tap("fc", stats=["mean"], values=False)


@pytest.fixture(scope="module")
def good_checkpoint(client: trocar.Client) -> bytes:
    options: Any = {"running_statistics": True, "checkpoint_interval": 1}
    (result,) = client.extract_stream("plain", [noise(1, 3, 8, 8)], TAP, **options)
    assert result.checkpoint is not None
    return result.checkpoint


_HOSTILE = st.sampled_from([10**30, 2**63 - 1, 2**63, 2**40, -1, "\ud800", "x" * 100_000])
_JSON = _HOSTILE | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_KEYS = [
    "counts",
    "entries",
    "sizes",
    "tap",
    "name",
    "path",
    "type",
    "call",
    "port",
    "picks",
    "shape",
    "dtype",
]


@settings(relaxed, max_examples=EXAMPLES)
@given(key=st.sampled_from([*_KEYS, "channel_dim"]), value=_JSON, is_within=st.booleans())
def test_no_forged_checkpoint_is_answered_with_a_defect(
    client: trocar.Client, good_checkpoint: bytes, key: str, value: Any, is_within: bool
) -> None:
    """What a checkpoint says comes back in the end of the stream, and in the next checkpoint."""
    (length,) = struct.unpack_from("<Q", good_checkpoint)
    head = json.loads(good_checkpoint[8 : 8 + length])
    place = head if key in head else head["entries"][0]
    place[key] = [value] * len(place[key]) if is_within and isinstance(place[key], list) else value
    encoded = json.dumps(head).encode()
    forged = struct.pack("<Q", len(encoded)) + encoded + good_checkpoint[8 + length :]
    options: Any = {"running_statistics": True, "checkpoint_interval": 1, "checkpoint": forged}
    try:
        for result in client.extract_stream("plain", [noise(1, 3, 8, 8)], TAP, **options):
            assert not isinstance(result.error, trocar.ServerError)
    except trocar.InvalidRequestError:
        pass


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1 << 62, (1 << 64) - 1])
def test_a_checkpoint_that_promises_another_length_is_refused(client: trocar.Client, length: int) -> None:
    checkpoint = struct.pack("<Q", length)[: length if 0 < length < 8 else 8]
    with pytest.raises(trocar.errors.InvalidArgumentError, match="start again without it"):
        list(client.extract_stream("plain", [], TAP, running_statistics=True, checkpoint=checkpoint))


@pytest.mark.parametrize(
    "ends_after",
    [
        [],
        [pb.ExtractStreamRequest()],
        [pb.ExtractStreamRequest(batch=pb.StreamBatch())],
    ],
)
def test_a_stream_that_does_not_begin_is_refused(
    channel: grpc.Channel, ends_after: list[pb.ExtractStreamRequest]
) -> None:
    code, results = answers(channel, [message.SerializeToString() for message in ends_after])
    assert (code, results) == (grpc.StatusCode.INVALID_ARGUMENT, [])


def test_a_half_close_within_a_batch_fails_that_batch_alone(channel: grpc.Channel) -> None:
    image = noise(1, 3, 8, 8).tobytes()
    start = pb.ExtractStreamStart(model_id="plain", taps=[tap_pb2.Tap(selector="fc")])
    whole = pb.StreamBatch(batch_index=0, inputs=[tensor((1, 3, 8, 8))])
    cut = pb.StreamBatch(batch_index=1, inputs=[tensor((1, 3, 8, 8))])
    messages = [
        pb.ExtractStreamRequest(start=start),
        pb.ExtractStreamRequest(batch=whole, chunks=[chunk(image)]),
        pb.ExtractStreamRequest(batch=cut, chunks=[chunk(image[:100])]),
    ]
    code, results = answers(channel, [message.SerializeToString() for message in messages])
    assert code is grpc.StatusCode.OK
    assert [result.error.reason for result in results] == ["", "INVALID_TENSOR"]


def test_a_batch_of_the_wrong_index_ends_the_stream(channel: grpc.Channel) -> None:
    start = pb.ExtractStreamStart(model_id="identity", taps=[tap_pb2.Tap(selector="/in")])
    for index in (1, -1, 1 << 62):
        batch = pb.StreamBatch(batch_index=index, inputs=[tensor((1, 3))])
        messages = [
            pb.ExtractStreamRequest(start=start).SerializeToString(),
            pb.ExtractStreamRequest(batch=batch, chunks=[chunk(bytes(12))]).SerializeToString(),
        ]
        assert answers(channel, messages)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_chunks_of_a_batch_that_failed_before_are_passed_over(channel: grpc.Channel) -> None:
    start = pb.ExtractStreamStart(model_id="identity", taps=[tap_pb2.Tap(selector="/in")])
    bad = pb.StreamBatch(batch_index=0, inputs=[extraction_pb2.Input()])
    good = pb.StreamBatch(batch_index=1, inputs=[tensor((1, 3))])
    messages = [
        pb.ExtractStreamRequest(start=start),
        pb.ExtractStreamRequest(batch=bad),
        pb.ExtractStreamRequest(chunks=[chunk(bytes(12))]),
        pb.ExtractStreamRequest(chunks=[chunk(bytes(12), 7, 9)]),
        pb.ExtractStreamRequest(batch=good, chunks=[chunk(bytes(12))]),
    ]
    code, results = answers(channel, [message.SerializeToString() for message in messages])
    assert code is grpc.StatusCode.OK
    assert [result.error.reason for result in results] == ["INVALID_ARGUMENT", ""]


def test_the_server_is_as_it_was_after_all_of_this(server: RunningServer, client: trocar.Client) -> None:
    assert client.extract("identity", noise(1, 3), taps="identity")["identity"].shape == (1, 3)
    assert all(len(set(counts)) == 1 for counts in hook_counts(server).values())
