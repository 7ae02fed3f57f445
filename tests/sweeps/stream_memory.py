"""The memory of one long stream, on both ends: it must not grow with the number of batches.

    python -m tests.sweeps.stream_memory
    python -m tests.sweeps.stream_memory --batches 2000

Server and client are processes of their own. Two streams: small batches with running statistics (covariance
and quantiles among them), and replies of 100 KB. Prints the resident memory of both after a tenth of the
batches and at the end, in MB, and exits with 1 where it has grown by 20 MB or more. Some minutes, so not part
of the suite, which counts tensors over 300 batches.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trocar

_MOST_GROWTH_MB = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TAPS = [
    trocar.tap("conv2", stats=["mean", "std", "covariance", "kurtosis"], over="channel", values=False),
    trocar.tap("fc", stats=["mean", trocar.quantiles(0.1, 0.5, 0.9), trocar.histogram(bins=32)]),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=10_000, help="of each stream; 10,000 by default")
    count = parser.parse_args().batches
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(theirs,))
    server.start()
    address = ours.recv()
    pid = server.pid
    assert pid is not None
    try:
        cases: dict[str, dict[str, Any]] = {
            "running statistics": {"taps": _TAPS, "shape": (2, 3, 8, 8), "running_statistics": True},
            "replies of 100 KB": {"taps": ["conv2"], "shape": (1, 3, 80, 80)},
        }
        grown = [_stream(name, address, pid, count, **case) for name, case in cases.items()]
    finally:
        ours.send(None)
        server.join()
    return 1 if max(grown) >= _MOST_GROWTH_MB else 0


def _stream(
    name: str, address: str, server: int, count: int, taps: Any, shape: tuple[int, ...], **options: Any
) -> float:
    """Run one stream and return by how much the memory of either end has grown, in MB."""
    started = time.perf_counter()
    seen: list[tuple[float, float]] = []
    with (
        trocar.connect(address) as client,
        client.extract_stream("plain", _batches(count, shape), taps, **options) as stream,
    ):
        for result in stream:
            maps = result.unwrap()
            if result.index == 0:
                print(
                    f"{name}: {sum(values.nbytes for values in maps.values()):,} bytes in a reply", flush=True
                )
            if result.index + 1 in (count // 10, count):
                seen.append((_resident_mb(server), _resident_mb(os.getpid())))
                of_server, of_client = seen[-1]
                print(f"  after {result.index + 1:>6,}: server {of_server:.1f} MB, client {of_client:.1f} MB")
    growth = [later - early for early, later in zip(*seen, strict=True)]
    seconds = time.perf_counter() - started
    print(f"  grown: server {growth[0]:+.1f} MB, client {growth[1]:+.1f} MB; {seconds:.0f} s", flush=True)
    return float(max(growth))


def _batches(count: int, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    random = np.random.default_rng(0)
    return (random.random(shape, dtype=np.float32) for _ in range(count))


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * _PAGE_BYTES / 1e6


def _serve(pipe: Connection) -> None:
    import structlog

    from tests.support.models.tiny_models import Plain
    from tests.support.servers.running_server import running_server
    from tests.support.servers.serving import custom

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    with running_server(models={"plain": custom(Plain, (3, 8, 8))}, device="cpu") as running:
        pipe.send(running.address)
        pipe.recv()


if __name__ == "__main__":
    sys.exit(main())
