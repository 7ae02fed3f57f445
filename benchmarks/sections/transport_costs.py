"""Transfer costs besides time: memory on both sides, and the delay of concurrent calls."""

import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import trocar
from benchmarks.measuring import Effort, timed
from benchmarks.report import Row, row
from benchmarks.served import Server, memory_bytes, served
from trocar._bench.records import quantiles

_ROUNDS, _REPEATS = 9, 50
_MIB = 103
_PAYLOAD = _MIB << 20


def begin(client: trocar.Client) -> None:
    """Make the first calls: a second size of inputs makes the server import torch's compiler."""
    small = np.zeros((1, 4), np.float32)
    for array in (small, small[:, :2]):
        client.extract("blob1", array, ["corner"])


def small_row(client: trocar.Client, effort: Effort) -> Row:
    """Compare a statistics-only reply with the empty call of the same channel."""
    small = np.zeros((1, 4), np.float32)
    call = partial(client.extract, "blob1", small, [trocar.tap("corner", stats=["mean"], values=False)])
    empty: list[float] = []
    full: list[float] = []
    for _ in range(effort.of(_ROUNDS)):
        empty += timed(client.server_info, _REPEATS)
        full += timed(call, _REPEATS)
    compute_s = statistics.median(call().timing.compute_s for _ in range(_REPEATS))
    base = statistics.median(empty)
    value = (statistics.median(full) - compute_s) / base
    return row(
        "statistics-only reply, compute excluded, against an empty call",
        value,
        1.5,
        f"empty {base * 1e3:.2f} ms",
    )


def empty_call_row(server: Server, effort: Effort) -> Row:
    """Measure how long an empty call of one client takes while another one transfers."""
    waits: list[float] = []
    with _transfers(server.address), trocar.connect(server.address) as client:
        for _ in range(effort.of(20)):
            waits += timed(client.server_info, 20)
    p50, p99 = (value * 1e3 for value in quantiles(waits, (0.5, 0.99)))
    return row(f"an empty call beside transfers of {_MIB} MiB, p99", p99, 15, f"p50 {p50:.1f} ms", unit="ms")


def _fetch_always(address: str, pipe: Connection) -> None:
    with trocar.connect(address, timeout_s=600) as client:
        small = np.zeros((1, 4), np.float32)
        client.extract(f"blob{_MIB}", small, ["/out"])
        pipe.send("begun")
        while not pipe.poll():
            client.extract(f"blob{_MIB}", small, ["/out"])


@contextmanager
def _transfers(address: str) -> Iterator[None]:
    """Run a process that fetches repeatedly."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_fetch_always, args=(address, child), daemon=True)
    process.start()
    pipe.recv()
    try:
        yield
    finally:
        pipe.send("stop")
        process.join()


def memory_rows(config: str) -> list[Row]:
    """Measure peak memory of both sides, above that of the payload itself, in fresh processes."""
    rows = []
    for direction in ("down", "up"):
        with served([], config=config) as server:
            context = multiprocessing.get_context("spawn")
            pipe, child = context.Pipe()
            process = context.Process(target=_transfer, args=(server.address, direction, child), daemon=True)
            process.start()
            pipe.recv()
            before = server.settled_memory_bytes()
            pipe.send("go")
            extra = {"client": pipe.recv()}
            process.join()
            held = _PAYLOAD if direction == "up" else 0  # what it receives it has to keep; a constant it has
            extra["server"] = server.memory_bytes("VmHWM") - before - held
        rows += [
            row(
                f"{_MIB} MiB {direction}: most extra memory of the {side}, by the payload",
                value / _PAYLOAD,
                0.1,
            )
            for side, value in extra.items()
        ]
    return rows


def _transfer(address: str, direction: str, pipe: Connection) -> None:
    """Move the payload three times and return the memory used besides the array."""
    small = np.zeros((1, 4), np.float32)
    array = np.ones((1, _PAYLOAD // 4), np.float32)
    with trocar.connect(address, timeout_s=600) as client:
        begin(client)
        pipe.send("ready")
        pipe.recv()
        before = memory_bytes(os.getpid())
        Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
        for _ in range(3):
            if direction == "down":
                client.extract(f"blob{_MIB}", small, ["/out"], out={"/out": array})
            else:
                client.extract("blob1", array, ["corner"])
        pipe.send(memory_bytes(os.getpid(), "VmHWM") - before)
