"""Prepared calls against clients that do what they should not."""

import math
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.servers.waiting import wait_until
from tests.support.wire.prepared import PreparedByHand, prepare, prepared_by_hand
from tests.support.wire.sharing import FOLDER, row_request
from tests.support.wire.wire import chunk, raw_channel, request, tensor
from trocar._transport.call_sockets import connect_socket
from trocar_api.descriptors import CALL, CANCEL, DONE, FAILED, NO_ROOM, Ask
from trocar_api.v1 import prepared_pb2 as pb
from trocar_api.v1.shared_memory_pb2 import SegmentRange
from trocar_server.shared_memory import call_socket
from trocar_server.shared_memory.call_socket import remove_dead_sockets

ROW = np.array([[1.5, -2.0, 3.25]], np.float32)
MODELS = {"identity": custom(Identity), "gated": custom(Gated)}
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a Unix socket where every token is a principal."""
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    with running_server(models=MODELS, device="cpu", host=host) as running:
        yield running


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets have names within the 107 bytes of an address."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.app.rpc.address) as opened:
        yield opened


def prepare_request(
    model_id: str = "identity", tap: str = "identity", **fields: Any
) -> pb.PrepareCallsRequest:
    """Ask for two slots for a row of three numbers."""
    head = request(model_id, tap, inputs=[tensor(ROW.shape)], chunks=[]).SerializeToString()
    return pb.PrepareCallsRequest(
        **{"request": head, "slot_count": 2, "reply_byte_count": ROW.nbytes, "head_byte_count": 0, **fields}
    )


@pytest.fixture
def opened(channel: grpc.Channel, server: RunningServer) -> Iterator[PreparedByHand]:
    """A prepared request; afterwards the server must have all of its memory back, and compute."""
    with prepared_by_hand(channel, prepare_request()) as made:
        yield made
    assert_unharmed(server, channel)


def assert_unharmed(server: RunningServer, channel: grpc.Channel) -> None:
    lender = server.app.rpc._sharing._lender
    assert lender is not None
    wait_until(lambda: lender.byte_count == 0 and server.app.rpc.running.work_count == 0)
    assert server.engine.admission.is_idle
    with prepared_by_hand(channel, prepare_request()) as made:
        assert called(made, ROW) == ROW.tobytes()


def called(made: PreparedByHand, row: Any, slot: int = 0, number: int = 7) -> bytes:
    """Make a call and return the bytes of its reply."""
    start = slot * made.layout.slot_bytes
    made.memory[start : start + row.nbytes] = row.tobytes()
    made.ask(slot, number)
    answer = made.answer()
    assert (answer.kind, answer.slot, answer.number) == (DONE, slot, number)
    start += made.layout.reply_offset
    return made.memory[start : start + row.nbytes]


def test_calls_by_hand_are_answered_in_their_slots(opened: PreparedByHand) -> None:
    for number in range(4):
        assert called(opened, ROW * number, number % 2, number) == (ROW * number).tobytes()


def test_the_name_is_gone_once_connected(opened: PreparedByHand) -> None:
    assert called(opened, ROW) == ROW.tobytes()
    assert not (FOLDER / opened.prepared.socket_name).exists()


WRONG = {
    "short": Ask(CALL, 0, 1).to_bytes()[:-1],
    "long": Ask(CALL, 0, 1).to_bytes() + b"\0",
    "one byte": b"\1",
    "no such kind": Ask(9, 0, 1).to_bytes(),
    "no such slot": Ask(CALL, 2, 1).to_bytes(),
    "the last slot": Ask(CALL, 255, 1).to_bytes(),
    "cancel of no slot": Ask(CANCEL, 77, 1).to_bytes(),
    "no time": Ask(CALL, 0, 1, 0.0).to_bytes(),
    "negative time": Ask(CALL, 0, 1, -1.0).to_bytes(),
    "no number of seconds": Ask(CALL, 0, 1, math.nan).to_bytes(),
    "endless": Ask(CALL, 0, 1, math.inf).to_bytes(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_descriptor_ends_the_connection(opened: PreparedByHand, name: str) -> None:
    opened.socket.send(WRONG[name])
    assert opened.has_ended()
    assert opened.status() is INVALID


def test_a_slot_is_not_called_twice_at_a_time(
    channel: grpc.Channel, server: RunningServer, gate: Gate
) -> None:
    gate.hold()
    with prepared_by_hand(channel, prepare_request("gated", "last")) as made:
        made.ask(0, 1)
        assert gate.entered.wait(WAIT_S)
        made.ask(0, 2)
        assert made.has_ended()
        assert made.status() is INVALID
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted
    assert_unharmed(server, channel)


def test_cancels_of_nothing_are_ignored(opened: PreparedByHand) -> None:
    opened.ask(0, 5, CANCEL)
    assert called(opened, ROW) == ROW.tobytes()
    opened.ask(0, 7, CANCEL)
    opened.ask(1, 7, CANCEL)
    assert called(opened, ROW * 2) == (ROW * 2).tobytes()


def test_a_cancel_at_once_is_answered(channel: grpc.Channel, server: RunningServer, gate: Gate) -> None:
    gate.hold()
    with prepared_by_hand(channel, prepare_request("gated", "last")) as made:
        for number in range(20):
            made.ask(0, number)
            made.ask(0, number, CANCEL)
            answer = made.answer()
            assert (answer.kind, answer.number) == (FAILED, number)
    assert_unharmed(server, channel)


def test_random_bytes_do_not_harm_the_server(channel: grpc.Channel, server: RunningServer) -> None:
    chance = random.Random(0)
    for _ in range(60):
        with prepared_by_hand(channel, prepare_request()) as made:
            for _ in range(chance.randrange(1, 8)):
                kind, slot = chance.choice([CALL, CALL, CANCEL, chance.randrange(256)]), chance.randrange(3)
                data = bytearray(Ask(kind, slot, chance.randrange(4)).to_bytes())
                for _ in range(chance.randrange(4)):
                    data[chance.randrange(64)] = chance.randrange(256)
                made.memory[chance.randrange(len(made.memory))] = chance.randrange(256)
                try:
                    made.socket.send(bytes(data[: chance.choice([64, 64, 64, chance.randrange(1, 64)])]))
                except ConnectionError:
                    break
    assert_unharmed(server, channel)


def test_memory_that_was_cut_off_fails_the_call_alone(opened: PreparedByHand) -> None:
    os.ftruncate(opened.file, 0)
    opened.ask()
    assert opened.has_ended()


def test_a_reply_without_room_says_so(channel: grpc.Channel) -> None:
    with prepared_by_hand(channel, prepare_request(reply_byte_count=4)) as made:
        made.ask()
        assert made.answer().kind == NO_ROOM


@pytest.mark.parametrize(
    "fields",
    [
        {"slot_count": 0},
        {"slot_count": 17},
        {"slot_count": -1},
        {"reply_byte_count": -1},
        {"head_byte_count": -1},
        {"head_byte_count": (1 << 20) + 1},
        {"request": b"\xff"},
        {"request": row_request(inputs=[tensor(ROW.shape)], payload_digest=bytes(32)).SerializeToString()},
        {
            "request": row_request(
                inputs=[tensor(ROW.shape)], shared_payload=SegmentRange(segment_id="0" * 32, byte_count=12)
            ).SerializeToString()
        },
        {"request": request(inputs=[tensor(ROW.shape)], chunks=[chunk(ROW.tobytes())]).SerializeToString()},
    ],
)
def test_a_wrong_request_is_refused(channel: grpc.Channel, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        PreparedByHand(channel, prepare_request(**fields))
    assert caught.value.code() is INVALID


def test_unknown_models_are_refused(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        PreparedByHand(channel, prepare_request("nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_impossible_amounts_are_refused_with_a_reason(channel: grpc.Channel) -> None:
    (message,) = list(prepare(channel, prepare_request(reply_byte_count=(1 << 63) - 1)))
    assert "shared memory" in pb.PrepareCallsResponse.FromString(message).refused


def test_who_does_not_connect_in_time_gets_nothing(
    channel: grpc.Channel, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trocar_server.rpc.services.prepared_call_service.CONNECT_WITHIN_S", 0.01)
    (message,) = list(prepare(channel, prepare_request()))
    name = pb.PrepareCallsResponse.FromString(message).prepared.socket_name
    wait_until(lambda: not (FOLDER / name).exists())
    monkeypatch.undo()
    assert_unharmed(server, channel)


def test_processes_of_other_users_get_no_memory(
    channel: grpc.Channel, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's word on the other end is another user's."""
    monkeypatch.setattr(call_socket, "user_of", lambda connection: os.geteuid() + 1)
    with pytest.raises(ValueError, match="not enough values"):
        PreparedByHand(channel, prepare_request())
    monkeypatch.undo()
    assert_unharmed(server, channel)


@pytest.mark.parametrize("name", ["", "../x", "trocar-" + "0" * 32, "/tmp/" + "0" * 32 + ".calls"])
def test_the_client_connects_to_names_of_servers_only(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name"):
        connect_socket(pb.PreparedCalls(socket_name=name))


@pytest.mark.parametrize("handed", ["nothing", "too little", "no file"])
def test_the_client_maps_what_was_announced_only(handed: str, short_path: Path) -> None:
    """A server of this user that hands over something else."""
    name = "trocar-" + "0" * 32 + ".calls"
    announced = pb.PreparedCalls(socket_name=name, slot_count=1, payload_byte_count=1)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        ThreadPoolExecutor(1) as threads,
    ):
        listening.bind(os.fspath(short_path / name))
        listening.listen(1)
        client = threads.submit(connect_socket, announced, short_path)
        connection, _ = listening.accept()
        small = os.open(short_path / "small", os.O_RDWR | os.O_CREAT)
        files = {"nothing": [], "too little": [small], "no file": [listening.fileno()]}[handed]
        socket.send_fds(connection, [b"x"], files)
        with pytest.raises(ValueError, match="not handed over"):
            client.result(WAIT_S)
        connection.close()
        os.close(small)


def test_names_of_killed_servers_are_removed(short_path: Path) -> None:
    names = [f"trocar-{digit * 32}.calls" for digit in "01"]
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(os.fspath(short_path / name))
    (short_path / f"trocar-{'2' * 32}.calls").write_text("no socket")
    (short_path / "other.calls").write_text("")
    os.utime(short_path / names[0], (0, 0))
    os.utime(short_path / f"trocar-{'2' * 32}.calls", (0, 0))
    assert remove_dead_sockets(short_path) == 1
    assert not (short_path / names[0]).exists()
    assert len(list(short_path.iterdir())) == 3
    assert remove_dead_sockets(short_path / "missing") == 0


def test_every_caller_has_an_allowance_of_its_own(tmp_path: Path) -> None:
    limits = {"max_shared_memory_bytes": 64 << 10}
    with (
        running_server(models=MODELS, device="cpu", host=f"unix:{tmp_path}/s", limits=limits) as server,
        raw_channel(server.app.rpc.address) as channel,
        prepared_by_hand(channel, prepare_request(), "alice"),
        prepared_by_hand(channel, prepare_request(), "alice"),
    ):
        (message,) = list(prepare(channel, prepare_request(), "alice"))
        assert "exceed the limit" in pb.PrepareCallsResponse.FromString(message).refused
        with prepared_by_hand(channel, prepare_request(), "bob") as made:
            assert called(made, ROW) == ROW.tobytes()


def test_a_client_of_this_package_is_told_of_nothing(server: RunningServer) -> None:
    """Beside all that, ordinary clients work."""
    with (
        trocar.connect(server.app.rpc.address) as client,
        client.prepare("identity", ROW, "identity") as made,
    ):
        assert np.array_equal(made(ROW)["identity"], ROW)
        assert made.is_shared
