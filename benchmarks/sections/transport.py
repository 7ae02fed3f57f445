"""Transport: bytes per second against a raw TCP socket and alternatives, in the same run.

Down: a hosted constant is fetched. Up: an array is sent and one element of it comes back.

How often each byte is copied in user space, from the caller's array to the model's and back (the kernel's
own copies of a socket, one on each side, come on top):

| variant | up, client | up, server | down, server | down, client |
|---|---|---|---|---|
| raw socket | 0 | 0 | 0 | 0 |
| chunks | 2: join, slice | 2: gRPC, payload | 2: join, slice | 2: gRPC, array |
| shared memory | 1 | 1 | 1 | 0: the array is a view |
| shared memory, `shared_array` | 0 | 1 | 1 | 0 |
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import trocar
from benchmarks.measuring import Effort, in_turns, takes, timed
from benchmarks.report import Figure, Row, Table, row
from benchmarks.sections.transport_costs import begin, empty_call_row, memory_rows, small_row
from benchmarks.sections.transport_peers import Way, peers
from benchmarks.served import served

_ROUNDS = 9
_SIZES_MIB = (13, 103, 400)
_STREAM, _SHARED, _SOCKET = "Trocar, stream", "Trocar, shared memory", "socket"
_TARGETS = {(_STREAM, 13): 0.55, (_STREAM, 103): 0.85, (_STREAM, 400): 0.85, (_SHARED, 103): 4.5}
COLUMNS = tuple(f"{size} MiB {way}" for size in _SIZES_MIB for way in ("down", "up"))


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    with tempfile.TemporaryDirectory() as folder, peers() as others:
        path = f"unix:{Path(folder) / 'trocar.sock'}"
        with hosted() as tcp, hosted("--host", path) as local:
            ways = {**others, _STREAM: tcp}
            if takes(trocar.connect, "shared_memory"):
                ways[_SHARED] = local
            speeds = measure(ways, effort)
    with served([], config=blobs()) as server, trocar.connect(server.address, timeout_s=600) as client:
        costs = [small_row(client, effort), empty_call_row(server, effort)]
    note = "Bytes per second, as a share of those of a raw socket."
    tables = [Table("Bytes on the wire", speed_rows(speeds), COLUMNS, note)]
    return [*tables, Table("Transport: the rest", [*ratio_rows(speeds), *costs, *memory_rows(blobs())])]


def blobs() -> str:
    """Return the configuration of a server that hosts constants of all sizes."""
    return "\n".join(
        f'[models.blob{size}]\nfactory = "benchmarks.models:Blob"\ninput_shape = [4]\n'
        f"options = {{ mebibytes = {size} }}\n"
        for size in (1, *_SIZES_MIB)
    )


@contextmanager
def hosted(*options: str) -> Iterator[Way]:
    """Run a server of constants; yield its download and upload calls."""
    small = np.zeros((1, 4), np.float32)
    with (
        served([], *options, config=blobs()) as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        begin(client)
        server.settled_memory_bytes()

        def fetch(count: int) -> object:
            return client.extract(f"blob{count >> 20}", small, ["/out"])

        def push(source: memoryview) -> object:
            array = np.frombuffer(source, np.float32).reshape(1, -1)
            return client.extract("blob1", array, ["corner"])

        yield Way(fetch, push)


Speeds = dict[tuple[str, str], float]
"""Bytes per second by way and column."""


def measure(ways: dict[str, Way], effort: Effort) -> Speeds:
    """Return the speed of every variant, size and direction; all variants of a size take turns."""
    speeds: Speeds = {}
    for size in _SIZES_MIB:
        view = np.ones((size << 20) // 4, np.float32).view(np.uint8).data
        repeats = effort.of(3 if size < 50 else 1)
        for direction in ("down", "up"):
            calls: dict[str, Callable[[], Sequence[float]]] = {
                name: partial(
                    timed,
                    partial(way.fetch, size << 20) if direction == "down" else partial(way.push, view),
                    repeats,
                )
                for name, way in ways.items()
            }
            for name, seconds in in_turns(calls, effort.of(_ROUNDS)).items():
                speeds[name, f"{size} MiB {direction}"] = (size << 20) / statistics.median(seconds)
    return speeds


def speed_rows(speeds: Speeds) -> list[Row]:
    """Return a row for each variant, as shares of the socket."""
    names = dict.fromkeys([*(name for name, _ in speeds if name != _SOCKET), _SHARED])
    rows = []
    for name in names:
        figures = {}
        for column in COLUMNS:
            target = _TARGETS.get((name, int(column.split()[0])))
            speed = speeds.get((name, column))
            value = None if speed is None else speed / speeds[_SOCKET, column]
            reason = "" if speed else "not available in this version"
            figures[column] = Figure(value, target, higher_is_better=True, reason=reason)
        rows.append(Row(name, figures))
    gbs = {column: Figure(speeds[_SOCKET, column] / 1e9, unit="GB/s") for column in COLUMNS}
    return [*rows, Row("the socket itself", gbs)]


def ratio_rows(speeds: Speeds) -> list[Row]:
    """Return the stream against other gRPC calls, at 103 MiB."""
    rows = []
    for other, target in (("one gRPC message", 8.0), ("Arrow Flight", 1.0)):
        for direction in ("down", "up"):
            column = f"103 MiB {direction}"
            value = speeds[_STREAM, column] / speeds[other, column]
            name = f"{column}: speed of the stream, against {other}"
            rows.append(row(name, value, target, higher_is_better=True))
    return rows
