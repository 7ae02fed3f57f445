"""Bytes per second against a raw TCP socket in the same run: `python -m benchmarks.transport`.

Down: a hosted constant is fetched. Up: an array is sent and one element of it comes back. The socket
moves as many bytes between two processes, from one array into a fresh one, with nothing around it.
"""

import multiprocessing
import socket
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import trocar
from benchmarks.report import Row, print_rows
from benchmarks.served import served
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
    for call in calls.values():
        timed(call, 2)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            seconds[name] += timed(call, 3 if mebibytes < 50 else 1)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
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
            "\n".join(
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
    print_rows("Bytes on the wire: speed against a raw socket", rows)


if __name__ == "__main__":
    main()
