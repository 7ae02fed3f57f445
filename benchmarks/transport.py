"""Bytes per second against a raw TCP socket in the same run: `python -m benchmarks.transport`.

Down: a hosted constant is fetched. Up: an array is sent and one element of it comes back. The socket
moves as many bytes between two processes, from one array into a fresh one, with nothing around it.

How often each byte is copied in user space, from the caller's array to the model's and back (the kernel's own
copies of a socket, one on each side, come on top):

| way | up, client | up, server | down, server | down, client |
|---|---|---|---|---|
| raw socket | 0 | 0 | 0 | 0 |
| chunks | 2 (join, gRPC's slice) | 2 (gRPC's bytes, payload) | 2 (join, gRPC's slice) | 2 (gRPC's bytes, array) |
| shared memory | 1 | 1 | 1 | 0: the array is a view |
| shared memory, `shared_array` | 0 | 1 | 1 | 0 |
"""

import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import trocar
from benchmarks.report import Row, print_rows
from benchmarks.served import served, server_process_id
from benchmarks.serving import timed

_ROUNDS = 9
_SIZES_MIB = {13: 0.55, 103: 0.85, 400: 0.85}


def _serve_socket(pipe: Connection) -> None:
    """Answer `<count>` with that many bytes, and swallow what `-<count>` announces."""
    source = np.ones(max(_SIZES_MIB) << 20, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            peer, _ = listener.accept()
            with peer:
                count = int(peer.recv(20))
                if count >= 0:
                    peer.sendall(source.data[:count])
                else:
                    peer.sendall(b"+")
                    _receive(peer, -count)
                    peer.sendall(b"+")


def _receive(peer: socket.socket, count: int) -> None:
    view, position = np.empty(count, np.uint8).data, 0
    while position < count:
        position += peer.recv_into(view[position:])


@contextmanager
def socket_peer() -> Iterator[int]:
    """Run the other end of the socket in a process of its own; yield its port."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_serve_socket, args=(child,), daemon=True)
    process.start()
    try:
        yield pipe.recv()
    finally:
        process.terminate()
        process.join()


def fetch(port: int, count: int) -> None:
    """Receive `count` bytes over a new connection."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(str(count).encode())
        _receive(peer, count)


def push(port: int, source: memoryview) -> None:
    """Send `source` over a new connection and wait until it has arrived."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(str(-source.nbytes).encode())
        peer.recv(1)
        peer.sendall(source)
        peer.recv(1)


def measure(client: trocar.Client, port: int, mebibytes: int) -> list[Row]:
    """Return the rows for one size: down and up, as shares of the socket's speed."""
    count = mebibytes << 20
    source = np.ones((1, count // 4), np.float32)
    view = source.reshape(-1).view(np.uint8).data
    small = np.zeros((1, 4), np.float32)
    model = f"blob{mebibytes}"
    calls = {
        "socket down": lambda: fetch(port, count),
        "down": lambda: client.extract(model, small, ["/out"]),
        "socket up": lambda: push(port, view),
        "up": lambda: client.extract(model, source, ["corner"]),
    }
    medians = _medians(calls, 3 if mebibytes < 50 else 1)
    return [
        Row(
            f"{mebibytes} MiB {way}",
            medians[f"socket {way}"] / medians[way],
            _SIZES_MIB[mebibytes],
            f"socket {medians[f'socket {way}'] * 1e3:.1f} ms",
            higher_is_better=True,
        )
        for way in ("down", "up")
    ]


def measure_shared(client: trocar.Client, port: int, mebibytes: int) -> list[Row]:
    """Return the rows of shared memory for one size: down, up, and up from an array that is shared."""
    count = mebibytes << 20
    source = np.ones((1, count // 4), np.float32)
    view = source.reshape(-1).view(np.uint8).data
    lent = client.shared_array(source.shape)
    lent[:] = 1
    small = np.zeros((1, 4), np.float32)
    model = f"blob{mebibytes}"
    calls = {
        "socket down": lambda: fetch(port, count),
        "down": lambda: client.extract(model, small, ["/out"]),
        "socket up": lambda: push(port, view),
        "up": lambda: client.extract(model, source, ["corner"]),
        "up, shared_array": lambda: client.extract(model, lent, ["corner"]),
    }
    medians = _medians(calls, 3 if mebibytes < 50 else 1)
    if client.transport != "shared_memory":
        raise RuntimeError("the server lends no memory")
    rows = [("down", "socket down"), ("up", "socket up"), ("up, shared_array", "socket up")]
    return [
        Row(
            f"{mebibytes} MiB {name}, shared memory",
            medians[base] / medians[name],
            4.5 if mebibytes == 103 and name != "up" else None,
            f"socket {medians[base] * 1e3:.1f} ms",
            higher_is_better=True,
        )
        for name, base in rows
    ]


def measure_forms(client: trocar.Client, packed: trocar.Client, mebibytes: int) -> list[Row]:
    """Compare what makes fewer bytes with plain chunks on this machine: what it costs, not what it saves."""
    shape = (1, (mebibytes << 20) // 4)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    sparse = np.where(values > 1.5, values, 0).astype(np.float32)
    model = f"blob{mebibytes}"
    calls = {
        "plain": lambda: client.extract(model, values, ["corner"]),
        "float16": lambda: client.extract(model, values, ["corner"], wire="float16"),
        "bfloat16": lambda: client.extract(model, values, ["corner"], wire="bfloat16"),
        "gzip, 7 % non-zero": lambda: packed.extract(model, sparse, ["corner"]),
    }
    medians = _medians(calls, 1, rounds=3)
    rate = (mebibytes << 20) / 1e6
    return [
        Row(f"{mebibytes} MiB up, {name}: time against plain", medians[name] / medians["plain"], None, note)
        for name in ("float16", "bfloat16", "gzip, 7 % non-zero")
        for note in [f"{rate / medians[name]:.0f} MB/s"]
    ]


def measure_waiting(client: trocar.Client, address: str) -> Row:
    """Return how long an empty call waits at most beside transfers of 103 MiB, in milliseconds."""
    small = np.zeros((1, 4), np.float32)
    source = np.ones((1, (103 << 20) // 4), np.float32)
    done = threading.Event()

    def transfer() -> None:
        with trocar.connect(address) as other:
            while not done.is_set():
                other.extract("blob103", small, ["/out"])
                other.extract("blob103", source, ["corner"])

    thread = threading.Thread(target=transfer)
    thread.start()
    try:
        waits = sorted(timed(client.server_info, 300))
    finally:
        done.set()
        thread.join()
    note = f"median {statistics.median(waits) * 1e3:.1f} ms"
    return Row("empty call beside 103 MiB transfers, p99, ms", waits[int(len(waits) * 0.99)] * 1e3, 15, note)


def measure_memory(client: trocar.Client) -> list[Row]:
    """Return by how much a transfer of 400 MiB raises the peak of either process, as a share of the payload."""
    count = 400 << 20
    source, small = np.ones((1, count // 4), np.float32), np.zeros((1, 4), np.float32)
    target = np.zeros((1, count // 4), np.float32)
    server = server_process_id()
    rows = []
    for name, call, own in (
        ("up", lambda: client.extract("blob400", source, ["corner"]), (0, count)),
        ("down", lambda: client.extract("blob400", small, ["/out"], out={"/out": target}), (0, 0)),
    ):
        call()
        for side, pid, needed in zip(("client", "server"), (os.getpid(), server), own, strict=True):
            _reset_peak(pid)
            before = _memory(pid, "VmRSS")
            call()
            extra = (_memory(pid, "VmHWM") - before - needed * (before < needed)) / count
            rows.append(Row(f"400 MiB {name}, extra memory of the {side}", max(extra, 0.0), 0.1))
    return rows


def _memory(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)


def _medians(calls: dict[str, Callable[[], object]], repeats: int, rounds: int = _ROUNDS) -> dict[str, float]:
    for call in calls.values():
        timed(call, 2)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name] += timed(call, repeats)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_small(client: trocar.Client) -> Row:
    """Compare a statistics-only reply with the empty call of the same channel."""
    small = np.zeros((1, 4), np.float32)
    tap = trocar.tap("corner", stats=["mean"], values=False)
    empty: list[float] = []
    full: list[float] = []
    for _ in range(_ROUNDS):
        empty += timed(client.server_info, 50)
        full += timed(lambda: client.extract("blob1", small, [tap]), 50)
    compute_s = client.extract("blob1", small, [tap]).timing.compute_s
    ratio = (statistics.median(full) - compute_s) / statistics.median(empty)
    note = f"empty {statistics.median(empty) * 1e3:.2f} ms"
    return Row("statistics-only reply against an empty call", ratio, 1.5, note)


def main() -> None:
    """Run every size and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "blobs.toml"
        config.write_text(
            "[limits]\nmax_shared_memory_bytes = 2147483648\n"
            + "\n".join(
                f'[models.blob{size}]\nfactory = "benchmarks.models:Blob"\ninput_shape = [4]\n'
                f"options = {{ mebibytes = {size} }}\n"
                for size in (1, *_SIZES_MIB)
            )
        )
        with (
            served([], "--config", str(config)) as address,
            socket_peer() as port,
            trocar.connect(address) as client,
        ):
            rows = [row for size in _SIZES_MIB for row in measure(client, port, size)]
            rows.append(measure_small(client))
            rows.append(measure_waiting(client, address))
            rows += measure_memory(client)
            with trocar.connect(address, compression="gzip") as packed:
                rows += measure_forms(client, packed, 13)
        host = f"unix:{folder}/socket"
        with (
            served([], "--config", str(config), "--host", host) as address,
            socket_peer() as port,
        ):
            for size in _SIZES_MIB:  # what one size has used goes with its connection
                with trocar.connect(address) as client:
                    rows += measure_shared(client, port, size)
    print_rows("Bytes on the wire: speed against a raw socket", rows)


if __name__ == "__main__":
    main()
