"""gzip on the wire: the same bits, fewer bytes, both ways; and a bomb."""

import functools
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import noise
from tests.support.servers.http2 import grpc_call
from tests.support.servers.proxy import Proxy, running_proxy
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import custom
from tests.support.wire.wire import EXTRACT

MIB = 1 << 20
ZEROS = np.zeros((8, 512, 512), np.float32)
"""8 MiB that gzip makes 8 kB of."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models={"identity": custom(Identity)}, device="cpu") as running:
        yield running


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[Proxy]:
    with running_proxy(server.address) as running:
        yield running


@pytest.mark.parametrize("compression", ["gzip", None])
def test_only_who_asks_gets_fewer_bytes(proxy: Proxy, compression: str | None) -> None:
    with trocar.connect(proxy.address, compression=compression) as client:  # type: ignore[arg-type]
        maps = client.extract("identity", ZEROS, "identity")
    assert np.array_equal(maps["identity"], ZEROS)
    is_small = [count < MIB for count in (proxy.up_bytes, proxy.down_bytes)]
    assert is_small == [compression == "gzip"] * 2


@pytest.mark.parametrize("compression", ["gzip", None])
def test_a_stream_is_compressed_too(proxy: Proxy, compression: str | None) -> None:
    with (
        trocar.connect(proxy.address, compression=compression) as client,  # type: ignore[arg-type]
        client.extract_stream("identity", [ZEROS, ZEROS + 1], "identity") as stream,
    ):
        found = [result.unwrap()["identity"] for result in stream]
    assert np.array_equal(found[1], ZEROS + 1)
    is_small = [count < MIB for count in (proxy.up_bytes, proxy.down_bytes)]
    assert is_small == [compression == "gzip"] * 2


async def test_the_asyncio_client_does_the_same(proxy: Proxy) -> None:
    async with trocar.aio.connect(proxy.address, compression="gzip") as client:
        maps = await client.extract("identity", ZEROS, "identity")
    assert np.array_equal(maps["identity"], ZEROS)
    assert max(proxy.up_bytes, proxy.down_bytes) < MIB


def test_values_that_do_not_repeat_arrive_too(proxy: Proxy) -> None:
    batch = noise(5, 512, 512)
    with trocar.connect(proxy.address, compression="gzip") as client:
        assert np.array_equal(client.extract("identity", batch, "identity")["identity"], batch)


def test_on_a_unix_socket_compression_takes_the_place_of_shared_memory(tmp_path: Path) -> None:
    with (
        running_server(
            models={"identity": custom(Identity)}, device="cpu", host=f"unix:{tmp_path}/s"
        ) as server,
        trocar.connect(server.app.rpc.address, compression="gzip") as client,
    ):
        for _ in range(2):
            assert np.array_equal(client.extract("identity", ZEROS, "identity")["identity"], ZEROS)
        assert client.transport == "chunks"


def test_another_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="gzip"):
        trocar.connect("localhost:1", compression="zstd")  # type: ignore[arg-type]


def bomb() -> bytes:
    """Compress 1 GiB of zeros to 1 MiB: as many equal blocks, each of which can be unpacked alone."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = functools.reduce(lambda found, _: zlib.crc32(bytes(MIB), found), range(1024), 0)
    header = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    return header + block * 1024 + packer.flush() + struct.pack("<II", checksum, 1 << 30)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_bomb_of_one_gibibyte_is_refused_and_memory_stays_flat(tmp_path: Path) -> None:
    message = bomb()
    assert len(message) < 1.1 * MIB
    models = {"identity": custom(Identity)}
    with server_processes() as processes:
        server = processes.start(tmp_path / "data", models=models)
        with trocar.connect(server.address, compression="gzip") as client:
            client.extract("identity", ZEROS, "identity")
            before = peak_bytes(server.pid)
            port = int(server.address.rpartition(":")[2])
            answers = [grpc_call(port, EXTRACT, message, "gzip") for _ in range(20)]
            assert [b"grpc-status" in answer for answer in answers] == [True] * 20
            assert peak_bytes(server.pid) - before < 16 * MIB
            assert np.array_equal(client.extract("identity", ZEROS, "identity")["identity"], ZEROS)
