"""Shared memory against callers who do what they should not."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trocar
from tests.support.files.scale import count
from tests.support.models.gated_models import GATE, WAIT_S, Gated
from tests.support.models.odd_models import Identity
from tests.support.servers import warm_python
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import custom
from tests.support.servers.waiting import wait_until
from tests.support.wire.sharing import (
    FOLDER,
    Stream,
    bearer,
    map_file,
    place,
    row_request,
    send_as,
    stream,
)
from tests.support.wire.wire import chunk, raw_channel, request, tensor
from trocar.errors import InvalidArgumentError, InvalidTensorError, UnknownSegmentError
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import shared_memory_pb2 as wire
from trocar_server.rpc.call.authorization import principal_from

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
ROW = np.array([[1.5, -2.0, 3.25]], np.float32)
ROW_BYTES = ROW.nbytes
MODELS = {"identity": custom(Identity), "gated": custom(Gated)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a Unix socket where every token is a principal."""
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    with running_server(models=MODELS, device="cpu", host=host) as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.app.rpc.address) as opened:
        yield opened


@pytest.fixture
def alice(channel: grpc.Channel) -> Iterator[Stream]:
    with stream(channel, "alice") as opened:
        yield opened


def values_of(found: list[pb.ExtractResponse]) -> bytes:
    return b"".join(part.data for message in found for part in message.chunks)


def gated_request(**fields: Any) -> pb.ExtractRequest:
    return request(model_id="gated", selector="last", **{"chunks": [], **fields})


@contextmanager
def held_call(
    token: str, channel: grpc.Channel, message: pb.ExtractRequest
) -> Iterator[list[pb.ExtractResponse]]:
    """Do what is in the context while the pass of a call is held up; the reply is there afterwards."""
    found: list[pb.ExtractResponse] = []
    thread = threading.Thread(target=lambda: found.extend(send_as(token, channel, message)))
    GATE.reset()
    GATE.hold()
    thread.start()
    try:
        assert GATE.entered.wait(WAIT_S)
        yield found
    finally:
        GATE.release()
        thread.join()


def lent_to(server: RunningServer, token: str) -> int:
    """Return the bytes that the principal of a token has."""
    lender = server.app.rpc._sharing._lender
    assert lender is not None
    return lender.byte_count_of(principal_from(bearer(token)))


def test_a_row_goes_in_and_out_by_hand(alice: Stream, channel: grpc.Channel) -> None:
    segment, memory = alice.mapped(PAGE)
    memory[64 : 64 + ROW_BYTES] = ROW.tobytes()
    request = row_request(
        shared_payload=place(segment.id, ROW_BYTES, 64), shared_reply=place(segment.id, ROW_BYTES, 256)
    )
    (reply,) = send_as("alice", channel, request)
    assert reply.is_shared
    assert list(reply.chunks) == []
    assert memory[256 : 256 + ROW_BYTES] == ROW.tobytes()


def test_a_reply_that_does_not_fit_comes_in_chunks(alice: Stream, channel: grpc.Channel) -> None:
    segment, memory = alice.mapped(PAGE)
    memory[:ROW_BYTES] = ROW.tobytes()
    request = row_request(
        shared_payload=place(segment.id, ROW_BYTES), shared_reply=place(segment.id, ROW_BYTES - 1, 64)
    )
    found = send_as("alice", channel, request)
    assert not found[0].is_shared
    assert values_of(found) == ROW.tobytes()
    assert memory[64 : 64 + ROW_BYTES] == bytes(ROW_BYTES)


@pytest.mark.parametrize("field", ["shared_payload", "shared_reply"])
@pytest.mark.parametrize("caller", ["bob", "", "alice"])
def test_ids_of_others_and_guesses_read_the_same(
    alice: Stream, channel: grpc.Channel, field: str, caller: str
) -> None:
    segment, _ = alice.mapped(PAGE)
    wanted = segment.id if caller != "alice" else "0" * 32
    chunks = [chunk(ROW.tobytes())] if field == "shared_reply" else []
    request = row_request(**{field: place(wanted, ROW_BYTES)})
    request.chunks.extend(chunks)
    with pytest.raises(UnknownSegmentError) as caught:
        send_as(caller, channel, request)
    assert wanted not in str(caught.value)
    assert str(caught.value).startswith("no such shared memory segment")
    assert caught.value.details == {}


@pytest.mark.parametrize("segment_id", ["", "x", "../../etc/passwd", "0" * 10_000, "\0"])
def test_odd_ids_are_unknown(channel: grpc.Channel, segment_id: str) -> None:
    with pytest.raises(UnknownSegmentError):
        send_as("alice", channel, row_request(shared_payload=place(segment_id, ROW_BYTES)))


def test_a_segment_that_was_not_mapped_is_unknown(alice: Stream, channel: grpc.Channel) -> None:
    segment = alice.open(PAGE)
    with pytest.raises(UnknownSegmentError):
        send_as("alice", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))


@pytest.mark.parametrize("part", ["mapped", "close"])
def test_another_callers_segment_cannot_be_taken_away(
    alice: Stream, channel: grpc.Channel, part: str
) -> None:
    segment, memory = alice.mapped(PAGE)
    memory[:ROW_BYTES] = ROW.tobytes()
    for token in ("bob", "alice"):  # the same caller's other stream has none of it either
        with stream(channel, token) as other:
            if part == "close":
                assert other.ask(close=segment.id).closed == segment.id
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    other.ask(mapped=segment.id)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    (reply,) = send_as("alice", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
    assert values_of([reply]) == ROW.tobytes()


NEAR = st.integers(-3, 3)
NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    NEAR,
    NEAR.map(lambda near: PAGE + near),
    NEAR.map(lambda near: PAGE - ROW_BYTES + near),
    NEAR.map(lambda near: ROW_BYTES + near),
    NEAR.map(lambda near: (1 << 62) + near),
)


@pytest.fixture(scope="module")
def shared_row(channel: grpc.Channel) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """A segment of one page between two others of its caller, all of known bytes."""
    with stream(channel, "eve") as opened:
        before, low = opened.mapped(PAGE)
        segment, memory = opened.mapped(PAGE)
        after, high = opened.mapped(PAGE)
        low[:] = high[:] = b"\x55" * PAGE
        memory[:] = np.resize(ROW, PAGE // 4).astype(np.float32).tobytes()
        yield segment.id, lambda: low[:] + high[:]
        assert len({before.id, segment.id, after.id}) == 3


@given(offset=NUMBERS, byte_count=NUMBERS)
@settings(max_examples=count(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_of_payloads_are_within_or_refused(
    shared_row: tuple[str, Callable[[], bytes]], channel: grpc.Channel, offset: int, byte_count: int
) -> None:
    segment_id, _ = shared_row
    request = row_request(shared_payload=place(segment_id, byte_count, offset))
    is_within = offset >= 0 and byte_count >= 0 and offset + byte_count <= PAGE
    if is_within and byte_count == ROW_BYTES:
        assert len(values_of(send_as("eve", channel, request))) == ROW_BYTES
        return
    with pytest.raises(InvalidTensorError if is_within else InvalidArgumentError) as caught:
        send_as("eve", channel, request)
    assert caught.value.details["field"].startswith("shared_payload")


@given(offset=NUMBERS, byte_count=NUMBERS)
@settings(max_examples=count(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_of_replies_are_within_or_refused(
    shared_row: tuple[str, Callable[[], bytes]], channel: grpc.Channel, offset: int, byte_count: int
) -> None:
    segment_id, others = shared_row
    request = row_request(shared_reply=place(segment_id, byte_count, offset))
    request.chunks.append(chunk(ROW.tobytes()))
    is_within = offset >= 0 and byte_count >= 0 and offset + byte_count <= PAGE
    if is_within and offset % 64 == 0:
        found = send_as("eve", channel, request)
        assert found[0].is_shared is (byte_count >= ROW_BYTES)
    else:
        with pytest.raises(InvalidArgumentError):
            send_as("eve", channel, request)
    assert others() == b"\x55" * (2 * PAGE)


@pytest.mark.parametrize(("offset", "byte_count"), [(0, 64), (0, PAGE), (64, 1), (0, 65), (64, PAGE - 64)])
def test_a_reply_over_its_own_inputs_is_refused(
    alice: Stream, channel: grpc.Channel, offset: int, byte_count: int
) -> None:
    segment, memory = alice.mapped(PAGE)
    memory[60 : 60 + ROW_BYTES] = ROW.tobytes()
    request = row_request(
        shared_payload=place(segment.id, ROW_BYTES, 60), shared_reply=place(segment.id, byte_count, offset)
    )
    with pytest.raises(InvalidArgumentError, match="overlaps"):
        send_as("alice", channel, request)
    assert memory[60 : 60 + ROW_BYTES] == ROW.tobytes()


def test_payloads_come_one_way_only(alice: Stream, channel: grpc.Channel) -> None:
    segment, _ = alice.mapped(PAGE)
    request = row_request(shared_payload=place(segment.id, ROW_BYTES))
    request.chunks.append(chunk(ROW.tobytes()))
    with pytest.raises(InvalidArgumentError, match="use one of the two"):
        send_as("alice", channel, request)


def test_bytes_that_change_while_they_are_used_change_nothing(
    server: RunningServer, alice: Stream, channel: grpc.Channel
) -> None:
    """The pass waits in the middle; by then the caller has written over its inputs."""
    expected = values_of(send_as("alice", channel, gated_request(chunks=[chunk(ROW.tobytes())])))
    segment, memory = alice.mapped(PAGE)
    memory[:ROW_BYTES] = ROW.tobytes()
    request = gated_request(shared_payload=place(segment.id, ROW_BYTES))
    with held_call("alice", channel, request) as found:
        memory[:ROW_BYTES] = bytes(ROW_BYTES)
    assert values_of(found) == expected


def test_a_segment_that_is_closed_during_a_call_serves_it_to_its_end(
    server: RunningServer, alice: Stream, channel: grpc.Channel
) -> None:
    segment, memory = alice.mapped(PAGE)
    memory[:ROW_BYTES] = ROW.tobytes()
    expected = values_of(send_as("alice", channel, gated_request(chunks=[chunk(ROW.tobytes())])))
    request = gated_request(
        shared_payload=place(segment.id, ROW_BYTES), shared_reply=place(segment.id, ROW_BYTES, 64)
    )
    with held_call("alice", channel, request) as found:
        alice.ask(close=segment.id)
        with pytest.raises(UnknownSegmentError):
            send_as("alice", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
    assert found[0].is_shared
    assert memory[64 : 64 + ROW_BYTES] == expected


def test_a_segment_that_was_made_shorter_is_refused(channel: grpc.Channel, server: RunningServer) -> None:
    with stream(channel, "mallory") as opened:
        segment = opened.open(4 * PAGE)
        descriptor = os.open(FOLDER / segment.name, os.O_RDWR)
        opened.ask(mapped=segment.id)
        os.ftruncate(descriptor, 0)
        os.close(descriptor)
        with pytest.raises(InvalidArgumentError, match="truncated"):
            send_as("mallory", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
        request = row_request(shared_reply=place(segment.id, 4 * PAGE))
        request.chunks.append(chunk(ROW.tobytes()))
        with pytest.raises(InvalidArgumentError, match="truncated"):
            send_as("mallory", channel, request)


def test_a_stream_that_ends_takes_its_segments_along(channel: grpc.Channel, server: RunningServer) -> None:
    opened = Stream(channel, "carol")
    segment, _ = opened.mapped(PAGE)
    waiting = opened.open(PAGE)
    opened.end()
    wait_until(lambda: lent_to(server, "carol") == 0 and not (FOLDER / waiting.name).exists())
    with pytest.raises(UnknownSegmentError):
        send_as("carol", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))


def test_a_segment_that_nobody_maps_goes_by_itself(
    channel: grpc.Channel, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trocar_server.rpc.services.shared_memory_service.MAP_WITHIN_S", 0.0)
    with stream(channel, "dave") as opened:
        segment = opened.open(PAGE)
        wait_until(lambda: lent_to(server, "dave") == 0 and not (FOLDER / segment.name).exists())
        with pytest.raises(grpc.RpcError) as caught:
            opened.ask(mapped=segment.id)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_mapped_segment_that_no_call_uses_is_reclaimed_and_its_stream_goes_on(
    channel: grpc.Channel, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trocar_server.rpc.services.shared_memory_service.MAP_WITHIN_S", 1.0)
    with stream(channel, "erin") as opened:
        segment, memory = opened.mapped(PAGE)
        monkeypatch.setattr("trocar_server.shared_memory.lender.UNUSED_S", 0.0)
        wait_until(lambda: lent_to(server, "erin") == 0)
        memory[:ROW_BYTES] = ROW.tobytes()  # the caller's own mapping stays
        with pytest.raises(UnknownSegmentError):
            send_as("erin", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
        monkeypatch.undo()
        again, memory = opened.mapped(PAGE)
        memory[:ROW_BYTES] = ROW.tobytes()
        found = send_as("erin", channel, row_request(shared_payload=place(again.id, ROW_BYTES)))
        assert values_of(found) == ROW.tobytes()


def test_over_the_quota_is_refused_and_what_was_lent_stays(tmp_path: Path) -> None:
    limits = {"max_shared_memory_bytes": 4 * MIB}
    host = f"unix:{tmp_path}/s"
    with (
        running_server(models=MODELS, device="cpu", host=host, limits=limits) as server,
        raw_channel(server.app.rpc.address) as channel,
        stream(channel, "alice") as opened,
    ):
        segment, memory = opened.mapped(3 * MIB)
        for byte_count in (2 * MIB, 1 << 40, (1 << 63) - 1):
            answer = opened.ask(open=wire.OpenSegment(byte_count=byte_count))
            assert "exceed the limit" in answer.refused
        memory[:ROW_BYTES] = ROW.tobytes()
        found = send_as("alice", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
        assert values_of(found) == ROW.tobytes()
        with stream(channel, "bob") as other:
            assert other.open(3 * MIB).byte_count == 3 * MIB


@pytest.mark.parametrize("byte_count", [0, -1, -(1 << 63)])
def test_sizes_below_one_are_refused(channel: grpc.Channel, byte_count: int) -> None:
    with stream(channel) as opened, pytest.raises(grpc.RpcError) as caught:
        opened.open(byte_count)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("message", [b"", b"\xff", b"\x0a\x02\x08", bytes(1000)])
def test_bytes_that_are_no_wish_are_refused(channel: grpc.Channel, message: bytes) -> None:
    with stream(channel) as opened, pytest.raises(grpc.RpcError) as caught:
        opened.ask_bytes(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_over_tcp_nothing_is_lent(tmp_path: Path) -> None:
    with running_server(models=MODELS, device="cpu") as server, raw_channel(server.address) as channel:
        with stream(channel) as opened:
            assert "Unix socket" in opened.ask(open=wire.OpenSegment(byte_count=1)).refused
        with pytest.raises(UnknownSegmentError):
            send_as("", channel, row_request(shared_payload=place("0" * 32, ROW_BYTES)))


_CLIENT = """
import sys, time
from tests.support.files.scale import count
import numpy as np, trocar
client = trocar.connect(sys.argv[1])
array = np.ones((4, 1 << 20), np.float32)
client.extract("identity", array, "identity")
assert client.transport == "shared_memory"
print("ready", flush=True)
while True:
    client.extract("identity", array, "identity")
"""


def test_killed_clients_leave_nothing(server: RunningServer) -> None:
    """Killed at any moment: between opening and mapping, while payloads are copied, during the pass."""
    ours = lent_to(server, "")
    for _ in range(3):
        process = warm_python.Popen(
            [sys.executable, "-c", _CLIENT, server.app.rpc.address], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert lent_to(server, "") > ours
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    wait_until(lambda: lent_to(server, "") == ours)


def test_a_killed_servers_name_is_removed_by_the_next_one(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/s"
    with server_processes() as processes:
        first = processes.start(tmp_path / "data", host=host)
        with raw_channel(host) as channel, stream(channel) as opened:
            segment = opened.open(PAGE)
            memory = map_file(segment)
            first.kill()
        assert (FOLDER / segment.name).exists()
        memory[:] = bytes(PAGE)  # the caller's own mapping stays good
        second = processes.start(tmp_path / "data", host=host)
        assert not (FOLDER / segment.name).exists()
        with raw_channel(host) as channel, pytest.raises(UnknownSegmentError):
            send_as("", channel, row_request(shared_payload=place(segment.id, ROW_BYTES)))
        assert second.terminate() == 0


def test_a_starting_server_leaves_the_names_of_one_that_runs(tmp_path: Path, channel: grpc.Channel) -> None:
    with stream(channel, "frank") as opened:
        segment = opened.open(PAGE)
        with running_server(models=MODELS, device="cpu", host=f"unix:{tmp_path}/s"):
            assert (FOLDER / segment.name).exists()
        assert opened.ask(mapped=segment.id).ready == segment.id


def test_a_loop_of_streams_leaves_no_descriptors(channel: grpc.Channel, server: RunningServer) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for number in range(200):
        opened = Stream(channel, "grace")
        segment, memory = opened.mapped(PAGE)
        memory.close()
        if number % 2:
            opened.ask(close=segment.id)
        opened.end()
    wait_until(lambda: lent_to(server, "grace") == 0 and descriptors() <= before + 2)


def test_inputs_of_several_tensors_lie_one_after_the_other(alice: Stream, channel: grpc.Channel) -> None:
    segment, memory = alice.mapped(PAGE)
    payload = np.arange(9, dtype=np.float32)
    memory[: payload.nbytes] = payload.tobytes()
    inputs = [tensor((1, 3)), tensor((2, 3), name="other")]
    request = row_request(
        inputs=inputs, selector="/in(other)", shared_payload=place(segment.id, payload.nbytes)
    )
    with pytest.raises(trocar.TrocarError) as caught:  # the model takes one argument: past the transport
        send_as("alice", channel, request)
    assert caught.value.reason == "INPUT_REJECTED"
