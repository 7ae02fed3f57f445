"""Tens of megabytes in both directions arrive whole; slow readers and writers hold nobody up."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.wire.wire import EXTRACT, chunk, extract_call, raw_channel, request, tensor
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tap_pb2

ROW = noise(1, 3)


@pytest.fixture(scope="module")
def echo_server() -> Iterator[RunningServer]:
    """A server whose one model returns its input."""
    with running_server(models={"identity": custom(Identity)}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def echo(echo_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(echo_server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def large() -> Array:
    """64 MiB in which no two stretches are alike."""
    return noise(16, 1024, 1024)


def test_sixty_four_megabytes_go_up_and_come_down_equal(echo: trocar.Client, large: Array) -> None:
    assert np.array_equal(echo.extract("identity", large, taps="identity")["identity"], large)


async def test_the_asyncio_client_moves_them_too(echo_server: RunningServer, large: Array) -> None:
    async with trocar.aio.connect(echo_server.address) as client:
        maps = await client.extract("identity", large, taps="identity")
    assert np.array_equal(maps["identity"], large)


@pytest.mark.parametrize("chunk_bytes", [4096, 65_536, 2 << 20])
def test_the_size_of_chunks_changes_no_bit(echo: trocar.Client, large: Array, chunk_bytes: int) -> None:
    some = large[:2]
    maps = echo.extract("identity", some, taps="identity", options=trocar.options(chunk_bytes=chunk_bytes))
    assert np.array_equal(maps["identity"], some)


def test_several_large_values_come_in_one_reply(echo: trocar.Client, large: Array) -> None:
    some = large[:4]
    maps = echo.extract("identity", some, taps=["/in", "identity", "/out"])
    assert [np.array_equal(maps[name], some) for name in maps] == [True, True, True]


def test_values_land_in_the_callers_array(echo: trocar.Client, large: Array) -> None:
    mine = np.empty_like(large)
    maps = echo.extract("identity", large, taps="identity", out={"identity": mine})
    assert maps["identity"] is mine
    assert np.array_equal(mine, large)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("boundary", [1 << 20, 4 << 20])
def test_sizes_around_the_boundaries_of_messages_arrive(
    echo: trocar.Client, boundary: int, offset: int
) -> None:
    values = np.random.default_rng(0).integers(0, 255, (1, boundary + offset), dtype=np.uint8)
    assert np.array_equal(echo.extract("identity", values, taps="identity")["identity"], values)


def test_eight_clients_at_once_get_their_own(echo_server: RunningServer) -> None:
    arrays = [noise(2, 1024, 1024, seed=number) for number in range(8)]

    def call(array: Array) -> bool:
        with trocar.connect(echo_server.address) as own:
            return np.array_equal(own.extract("identity", array, taps="identity")["identity"], array)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, arrays))


def large_request(shape: tuple[int, ...]) -> list[bytes]:
    """Build a call of many messages by hand."""
    payload = noise(*shape).tobytes()
    pieces = range(0, len(payload), 1 << 20)
    head = request(inputs=[tensor(shape)], chunks=[])
    rest = [pb.ExtractRequest(chunks=[chunk(payload[at : at + (1 << 20)], offset=at)]) for at in pieces]
    return [message.SerializeToString() for message in (head, *rest)]


def test_a_reader_that_stalls_holds_no_replica(echo_server: RunningServer, echo: trocar.Client) -> None:
    """The model has one replica; it is back before the first byte goes out."""
    with raw_channel(echo_server.address, max_receive_message_length=-1) as channel:
        stalled = []
        for _ in range(16):
            stream = extract_call(channel, large_request((8, 1024, 1024)))
            next(stream)
            stalled.append(stream)
        assert np.array_equal(echo.extract("identity", ROW, taps="identity")["identity"], ROW)
        assert echo_server.engine.deployment("identity").pool.leased_count == 0
        for stream in stalled:
            stream.cancel()


def test_a_writer_that_stalls_holds_no_replica(echo_server: RunningServer, echo: trocar.Client) -> None:
    head, first, *_ = large_request((8, 1024, 1024))

    async def call() -> None:
        async with grpc.aio.insecure_channel(echo_server.address) as channel:
            stream: Any = channel.stream_stream(EXTRACT)()
            await stream.write(head)
            await stream.write(first)
            found = await asyncio.to_thread(echo.extract, "identity", ROW, "identity")
            assert np.array_equal(found["identity"], ROW)
            assert echo_server.engine.deployment("identity").pool.leased_count == 0
            stream.cancel()

    asyncio.run(call())


def test_an_upload_that_breaks_off_leaves_nothing(echo_server: RunningServer, echo: trocar.Client) -> None:
    hooks = hook_counts(echo_server)
    with raw_channel(echo_server.address) as channel:
        messages = large_request((8, 1024, 1024))[:5]
        stream = extract_call(channel, messages)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert np.array_equal(echo.extract("identity", ROW, taps="identity")["identity"], ROW)
    assert hook_counts(echo_server) == hooks


def test_a_request_is_refused_before_its_bytes_are_sent(echo_server: RunningServer) -> None:
    """Only the head is sent; a server that waited for the bytes would wait until the deadline."""
    head = request(selector="nowhere", inputs=[tensor((16, 1024, 1024))], chunks=[]).SerializeToString()

    async def call() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(echo_server.address) as channel:
            stream: Any = channel.stream_stream(EXTRACT)(timeout=60)
            await stream.write(head)
            code: grpc.StatusCode = await stream.code()
            return code

    assert asyncio.run(call()) is grpc.StatusCode.NOT_FOUND


def test_a_reply_over_the_limit_is_refused_before_the_bytes_are_sent(echo_server: RunningServer) -> None:
    taps = [tap_pb2.Tap(selector="identity", alias=f"copy{number}") for number in range(17)]
    head = request(taps=taps, inputs=[tensor((16, 1024, 1024))], chunks=[]).SerializeToString()

    async def call() -> tuple[grpc.StatusCode, str]:
        async with grpc.aio.insecure_channel(echo_server.address) as channel:
            stream: Any = channel.stream_stream(EXTRACT)(timeout=60)
            await stream.write(head)
            return await stream.code(), await stream.details()

    code, details = asyncio.run(call())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{17 << 26:,}" in details
