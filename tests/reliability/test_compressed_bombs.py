"""Messages that are small only while they are compressed, sent to a server in a process of its own."""

import zlib
from pathlib import Path
from typing import Any

import grpc

import trocar
from tests.support.files.scale import count
from tests.support.models.tiny_models import Plain
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import custom
from tests.support.wire.wire import extract_call, raw_channel

BOMBS = count(20)
GROWTH_BYTES = 16 << 20


def bomb(mebibytes: int, says_bytes: int | None = None) -> bytes:
    """Return zeros as gzip: a thousandth of them. The end says how many, or whatever it is told to."""
    packing = zlib.compressobj(9, wbits=31)
    packed = b"".join(packing.compress(bytes(1 << 20)) for _ in range(mebibytes)) + packing.flush()
    return packed if says_bytes is None else packed[:-4] + says_bytes.to_bytes(4, "little")


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def code_of(channel: grpc.Channel, message: bytes, **options: Any) -> grpc.StatusCode | None:
    try:
        list(extract_call(channel, [message], **options))
    except grpc.RpcError as error:
        return error.code()
    return None


def test_what_unpacks_to_more_than_a_message_may_be_is_refused_at_no_cost(tmp_path: Path) -> None:
    """1 MiB that is 1 GiB, some that lie about it, and some that gRPC itself has compressed."""
    models = {"plain": custom(Plain, (3, 8, 8))}
    honest, lying, zeros = bomb(1024), bomb(1024, 100), bytes(64 << 20)
    with server_processes() as processes:
        server = processes.start(tmp_path / "data", models=models)
        with (
            raw_channel(server.address, max_send_message_length=-1) as channel,
            trocar.connect(server.address) as client,
        ):
            client.wait_ready()

            def send() -> set[grpc.StatusCode | None]:
                """Send each kind; what comes in goes to another thread, whose memory is kept for the next."""
                codes = {code_of(channel, honest) for _ in range(BOMBS)}
                return codes | {code_of(channel, zeros, compression=grpc.Compression.Gzip) for _ in range(2)}

            send()
            code_of(channel, lying)
            before = peak_bytes(server.pid)
            assert send() == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert {code_of(channel, lying) for _ in range(5)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert peak_bytes(server.pid) - before < GROWTH_BYTES
            assert client.models()[0].model_id == "plain"
