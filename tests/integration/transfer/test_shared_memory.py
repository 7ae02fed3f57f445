"""Large payloads through shared memory: bit-equal, reused, given back, and never needed."""

import asyncio
import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.servers.waiting import wait_until
from tests.support.wire.sharing import FOLDER
from trocar._transport import segments
from trocar._transport.exchange import Exchange
from trocar.errors import UnknownModuleError
from trocar_api.v1.shared_memory_pb2 import Segment as WireSegment
from trocar_api.v1.shared_memory_pb2 import ShareMemoryRequest, ShareMemoryResponse

MIB = 1 << 20
MODELS = {"identity": custom(Identity)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a Unix socket."""
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    with running_server(models=MODELS, device="cpu", host=host) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.app.rpc.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def large() -> Array:
    """8 MiB in which no two stretches are alike."""
    return noise(2, 1024, 1024)


def segment_ids(client: trocar.Client) -> set[str]:
    return set(client._connection.sharing._pool._segments)


def test_large_arrays_travel_through_shared_memory_and_are_equal(client: trocar.Client, large: Array) -> None:
    used = [client.transport]
    for _ in range(3):
        assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
        used.append(client.transport)
    assert used == ["chunks", *["shared_memory"] * 3]


def test_small_calls_do_not_touch_it(client: trocar.Client) -> None:
    client.extract("identity", noise(1, 3), "identity")
    assert client.transport == "chunks"
    assert segment_ids(client) == set()


def test_what_is_not_held_is_used_again(client: trocar.Client, large: Array) -> None:
    for _ in range(2):
        client.extract("identity", large, "identity")
    before = segment_ids(client)
    for _ in range(5):
        client.extract("identity", large, "identity")
    assert segment_ids(client) == before
    assert len(before) == 2


def test_results_that_are_held_stay_as_they_are(client: trocar.Client, large: Array) -> None:
    batches = [large + number for number in range(5)]
    held = [client.extract("identity", batch, "identity")["identity"] for batch in batches]
    assert [np.array_equal(one, other) for one, other in zip(held, batches, strict=True)] == [True] * 5


def test_one_row_of_a_result_keeps_it(client: trocar.Client, large: Array) -> None:
    client.extract("identity", large, "identity")
    row = client.extract("identity", large, "identity")["identity"][1, 5]
    gc.collect()
    for number in range(3):
        client.extract("identity", large + number, "identity")
    assert np.array_equal(row, large[1, 5])


def test_results_outlive_the_connection(server: RunningServer, large: Array) -> None:
    with trocar.connect(server.app.rpc.address) as client:
        client.extract("identity", large, "identity")
        held = client.extract("identity", large, "identity")["identity"]
    assert np.array_equal(held, large)
    held += 1
    assert np.array_equal(held, large + 1)


def test_a_callers_array_is_filled(client: trocar.Client, large: Array) -> None:
    for _ in range(2):
        mine = np.zeros_like(large)
        maps = client.extract("identity", large, "identity", out={"identity": mine})
        assert maps["identity"] is mine
        assert np.array_equal(mine, large)


def test_shared_arrays_need_no_copy_on_this_side(client: trocar.Client, large: Array) -> None:
    given, taken = client.shared_array(large.shape), client.shared_array(large.shape)
    given[:] = large
    ids = segment_ids(client)
    maps = client.extract("identity", given, "identity", out={"identity": taken})
    assert maps["identity"] is taken
    assert np.array_equal(taken, large)
    assert segment_ids(client) == ids, "no further segment was needed for copies"


def test_a_shared_array_of_another_form_is_an_array_like_any(client: trocar.Client) -> None:
    array = client.shared_array((3, 0, 2), "int64")
    assert (array.shape, array.dtype) == ((3, 0, 2), np.dtype("int64"))
    assert client.shared_array((2, 3), "float16").shape == (2, 3)


def test_several_inputs_and_values_find_their_places(client: trocar.Client, large: Array) -> None:
    odd = np.frombuffer(large.tobytes()[: 5 * MIB + 20], np.float32)[None]
    for _ in range(2):
        maps = client.extract("identity", odd, ["/in", "identity", trocar.tap("/out", cast="bfloat16")])
        assert np.array_equal(maps["/in"], odd)
        assert np.array_equal(maps["identity"], odd)
        assert np.allclose(maps["/out"], odd, rtol=1e-2)


def test_replies_that_grow_fall_back_to_chunks(
    client: trocar.Client, large: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place for a reply is as large as the last one; here nothing tells that the next is larger."""

    class Sizes(OrderedDict[int, int]):
        def get(self, key: int, default: Any = None) -> int:
            return 5 * MIB

    monkeypatch.setattr(client._connection.sharing._sizes, "expected", Sizes())
    assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)


def test_a_refused_call_is_refused_and_the_next_one_works(client: trocar.Client, large: Array) -> None:
    client.extract("identity", large, "identity")
    with pytest.raises(UnknownModuleError):
        client.extract("identity", large, "nowhere")
    assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
    assert client.transport == "shared_memory"


def test_without_it_everything_goes_in_chunks(server: RunningServer, large: Array) -> None:
    with trocar.connect(server.app.rpc.address, shared_memory=False) as client:
        for _ in range(2):
            assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
        assert client.transport == "chunks"
        assert client.shared_array((2, 2)).shape == (2, 2)


def test_threads_of_one_client_do_not_mix_up(client: trocar.Client) -> None:
    batches = [noise(2, 1024, 1024, seed=number) for number in range(4)]

    def call(number: int) -> bool:
        batch = batches[number % 4]
        return np.array_equal(client.extract("identity", batch, "identity")["identity"], batch)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(24)))
    assert client.transport == "shared_memory"


async def test_tasks_of_one_asyncio_client_do_not_mix_up(server: RunningServer) -> None:
    batches = [noise(2, 1024, 1024, seed=number) for number in range(4)]
    async with trocar.aio.connect(server.app.rpc.address) as client:

        async def call(number: int) -> bool:
            maps = await client.extract("identity", batches[number % 4], "identity")
            return np.array_equal(maps["identity"], batches[number % 4])

        for _ in range(3):
            assert all(await asyncio.gather(*map(call, range(8))))
        assert client.transport == "shared_memory"
        given = await client.shared_array((2, 1024, 1024))
        given[:] = batches[0]
        assert np.array_equal((await client.extract("identity", given, "identity"))["identity"], batches[0])


def assert_nothing_else_is_lent(server: RunningServer, sharing: Any) -> None:
    lender = server.app.rpc._sharing._lender
    assert lender is not None
    kept = sum(segment.byte_count for segment in sharing._pool._segments.values())
    wait_until(lambda: lender.byte_count == kept)


def test_a_call_that_is_interrupted_before_an_answer_is_read_spoils_no_later_one(
    server: RunningServer, client: trocar.Client, large: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pending = Exchange.ask, [KeyboardInterrupt()]

    def ask(exchange: Exchange, request: ShareMemoryRequest) -> ShareMemoryResponse:
        if pending:
            exchange._requests.put(request)
            raise pending.pop()
        return real(exchange, request)

    monkeypatch.setattr(Exchange, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        client.extract("identity", large, "identity")
    for _ in range(3):
        assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
    assert client.transport == "shared_memory"
    assert_nothing_else_is_lent(server, client._connection.sharing)


@pytest.mark.parametrize("place", ["copy_payloads", "map_segment"])
async def test_a_call_that_is_cancelled_while_it_borrows_keeps_nothing(
    server: RunningServer, large: Array, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    loop, began, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    real = getattr(segments, place)

    def slow(*given: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(30)
        return real(*given)

    async with trocar.aio.connect(server.app.rpc.address) as client:
        sharing = client._connection.sharing
        monkeypatch.setattr(f"trocar._async.sharing.{place}", slow)
        for _ in range(3):
            call = asyncio.create_task(client.extract("identity", large, "identity"))
            await began.wait()
            call.cancel()
            await asyncio.wait([call])
            began.clear()
            assert len(sharing._pool) == 0
        may_end.set()
        monkeypatch.undo()
        for _ in range(2):
            assert np.array_equal((await client.extract("identity", large, "identity"))["identity"], large)
        assert client.transport == "shared_memory"
        assert_nothing_else_is_lent(server, sharing)


def test_over_the_servers_limit_calls_go_in_chunks(tmp_path: Path, large: Array) -> None:
    limits = {"max_shared_memory_bytes": 20 * MIB}
    host = f"unix:{tmp_path}/s"
    with (
        running_server(models=MODELS, device="cpu", host=host, limits=limits) as server,
        trocar.connect(server.app.rpc.address) as client,
    ):
        assert client.server_info().limits.max_shared_memory_bytes == 20 * MIB
        held = [client.extract("identity", large + n, "identity")["identity"] for n in range(5)]
        assert all(np.array_equal(one, large + n) for n, one in enumerate(held))
        assert len(segment_ids(client)) == 2


def test_room_is_made_for_calls_of_another_size(tmp_path: Path, large: Array) -> None:
    host = f"unix:{tmp_path}/s"
    limits = {"max_shared_memory_bytes": 20 * MIB}
    with (
        running_server(models=MODELS, device="cpu", host=host, limits=limits) as server,
        trocar.connect(server.app.rpc.address) as client,
    ):
        client.extract("identity", large, "identity")
        small = segment_ids(client)
        twice = np.concatenate([large, large])
        assert np.array_equal(client.extract("identity", twice, "identity")["identity"], twice)
        assert len(segment_ids(client)) == 1
        assert segment_ids(client).isdisjoint(small)


@pytest.mark.parametrize("limits", [{"max_shared_memory_bytes": 0}])
def test_a_server_that_lends_none_is_used_with_chunks(
    tmp_path: Path, large: Array, limits: dict[str, int]
) -> None:
    host = f"unix:{tmp_path}/s"
    with (
        running_server(models=MODELS, device="cpu", host=host, limits=limits) as server,
        trocar.connect(server.app.rpc.address, shared_memory=True) as client,
    ):
        assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
        assert client.transport == "chunks"
        assert client.server_info().limits.max_shared_memory_bytes == 0


def test_over_tcp_nothing_is_asked_for(large: Array) -> None:
    with running_server(models=MODELS, device="cpu") as server:
        with trocar.connect(server.address) as client:
            assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
            assert client.transport == "chunks"
            assert client.server_info().limits.max_shared_memory_bytes == 0
        with pytest.raises(ValueError, match="Unix socket"):
            trocar.connect(server.address, shared_memory=True)


@pytest.mark.parametrize("problem", ["missing", "link", "other mode", "too short", "odd name"])
def test_on_any_doubt_the_client_uses_chunks(
    client: trocar.Client, large: Array, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client finds under the name that the server gave is not what a server of its user makes."""
    real = segments.map_segment

    def planted(message: WireSegment, folder: Path = tmp_path) -> segments.Segment:
        path = tmp_path / message.name
        if problem == "odd name":
            message.name = "../" + message.name
        elif problem != "missing":
            path.write_bytes(bytes(10 if problem == "too short" else message.byte_count))
            path.chmod(0o644 if problem == "other mode" else 0o600)
        if problem == "link":
            path.rename(tmp_path / "target")
            path.symlink_to(tmp_path / "target")
        return real(message, folder)

    monkeypatch.setattr("trocar._sync.sharing.map_segment", planted)
    assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)
    assert client.transport == "chunks"


def test_a_client_survives_a_new_server(tmp_path: Path, large: Array) -> None:
    host = f"unix:{tmp_path}/s"
    with running_server(models=MODELS, device="cpu", host=host) as server:
        target = server.app.rpc.address
        client = trocar.connect(target)
        client.extract("identity", large, "identity")
        held = client.extract("identity", large, "identity")["identity"]
    with running_server(models=MODELS, device="cpu", host=host), client:
        client.wait_ready(30)
        for number in range(3):
            found = client.extract("identity", large + number, "identity")["identity"]
            assert np.array_equal(found, large + number)
        assert client.transport == "shared_memory"
    assert np.array_equal(held, large)


def test_a_segment_that_the_server_has_lost_costs_a_second_call_and_no_more(
    client: trocar.Client, large: Array
) -> None:
    client.extract("identity", large, "identity")
    for segment in client._connection.sharing._pool._segments.values():
        segment.id = "0" * 32
    assert np.array_equal(client.extract("identity", large, "identity")["identity"], large)


def test_names_are_gone_as_soon_as_they_are_mapped(
    client: trocar.Client, large: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = segments.map_segment

    def watched(message: WireSegment) -> segments.Segment:
        seen.append(FOLDER / message.name)
        assert seen[-1].exists()
        return real(message)

    monkeypatch.setattr("trocar._sync.sharing.map_segment", watched)
    client.extract("identity", large, "identity")
    assert client.transport == "shared_memory"
    assert [path.exists() for path in seen] == [False] * len(seen)


def test_a_stop_ends_the_calls_that_lend_memory(tmp_path: Path, large: Array) -> None:
    """Clients keep theirs open as long as they live, and a server would wait its whole grace for that."""
    with (
        running_server(models=MODELS, device="cpu", host=f"unix:{tmp_path}/s") as server,
        trocar.connect(server.app.rpc.address) as client,
    ):
        client.extract("identity", large, "identity")
        exchange = client._connection.sharing._exchange
        assert exchange is not None

        async def stop() -> None:
            server.app.rpc._sharing.stop()

        server.run(stop)
        assert list(exchange._call) == []
        assert exchange._call.code() is grpc.StatusCode.OK


def test_open_descriptors_do_not_grow(server: RunningServer, large: Array) -> None:
    """Server and client are one process here: whatever either leaves would show."""

    def call() -> None:
        with trocar.connect(server.app.rpc.address) as client:
            client.extract("identity", large, "identity")
            assert client.transport == "shared_memory"

    def lent_bytes() -> int:
        service = server.app.rpc._sharing
        assert service._lender is not None
        return service._lender.byte_count

    call()
    wait_until(lambda: lent_bytes() == 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        call()
    wait_until(lambda: lent_bytes() == 0 and len(list(Path("/proc/self/fd").iterdir())) <= before + 4)
