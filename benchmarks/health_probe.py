"""Health probe: checks at fixed times from a separate process, like an orchestrator's.

    with HealthProbe(address) as probe:
        ...
    probe.seconds

A check is sent every `PAUSE_S`, whether or not the one before was answered, and its time counts from when it
was due: a server that does not answer for a second delays fifty checks, not one. A check that fails counts
as `LIMIT_S`.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PAUSE_S = 0.02
"""Between checks."""
LIMIT_S = 5.0
"""Deadline of a check."""


class HealthProbe:
    """Checks a server's health for as long as the context is open.

    Attributes:
        seconds: Latency of each check; set after the context.
    """

    def __init__(self, address: str) -> None:
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.health_probe", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has been answered once
        return self

    def __exit__(self, *_: object) -> None:
        answer, _nothing = self._process.communicate()
        self.seconds += json.loads(answer)


async def _probe(address: str) -> list[float]:
    """Check until standard input is closed; returns the seconds of each check."""
    seconds: list[float] = []
    ends = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ends.set)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def check(due: float) -> None:
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S, wait_for_ready=True)
                seconds.append(time.perf_counter() - due)
            except grpc.RpcError:
                seconds.append(LIMIT_S)

        await check(time.perf_counter())  # connects
        seconds.clear()
        print("ready", flush=True)
        begun, checks = time.perf_counter(), list[asyncio.Task[None]]()
        while not (checks and ends.is_set()):
            due = begun + len(checks) * PAUSE_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            checks.append(asyncio.create_task(check(due)))
        await asyncio.gather(*checks)
    return seconds


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_probe(sys.argv[1]))))
