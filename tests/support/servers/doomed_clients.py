"""Clients in processes of their own, to be killed in the middle of a call; each is a fork, without torch.

    with doomed_clients(address) as clients:
        clients.run(300)

Each makes extractions without end; `run` kills one after the other with SIGKILL, at random moments of a call.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

import trocar

LONGEST_LIFE_S = 0.02
"""From the first byte that a client sends."""


class DoomedClients:
    """Starts and kills clients of one server."""

    def __init__(self, address: str, model_id: str, shape: tuple[int, ...], tap: str) -> None:
        arguments = [address, model_id, "x".join(map(str, shape)), tap]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.servers.doomed_clients", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, count: int, together: int = 4, seed: int = 0) -> int:
        """Let clients live and die, some at once; returns how many were killed by our signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count} {together} {seed}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process that starts them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def doomed_clients(address: str, model_id: str, shape: tuple[int, ...], tap: str) -> Iterator[DoomedClients]:
    """Start and kill clients within the context."""
    clients = DoomedClients(address, model_id, shape, tap)
    try:
        yield clients
    finally:
        clients.close()


def _live(address: str, model_id: str, shape: tuple[int, ...], tap: str, begun: int) -> None:
    """Call without end; says with a byte when the first call begins."""
    batch = np.ones(shape, np.float32)
    client = trocar.connect(address, retries=0)
    client.server_info()
    os.write(begun, b"!")
    while True:
        client.extract(model_id, batch, taps=tap)


def _killed(together: int, chance: random.Random, live: Callable[[int], None]) -> int:
    """Fork some clients, kill each at a moment of its own; returns how many died of it."""
    children = []
    for _ in range(together):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                live(writing)
            finally:
                os._exit(1)
        os.close(writing)
        children.append((child, reading))
    died = 0
    for child, reading in children:
        os.read(reading, 1)  # nothing, where it failed before
        os.close(reading)
        time.sleep(chance.random() * LONGEST_LIFE_S)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        died += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    return died


def main() -> None:
    """Do what the lines of stdin say. No channel is opened before a fork: gRPC does not survive one."""
    address, model_id, sizes, tap = sys.argv[1:]
    live = partial(_live, address, model_id, tuple(map(int, sizes.split("x"))), tap)
    for line in sys.stdin:
        count, together, seed = map(int, line.split())
        chance, died = random.Random(seed), 0
        for start in range(0, count, together):
            died += _killed(min(together, count - start), chance, live)
        print(died, flush=True)


if __name__ == "__main__":
    main()
