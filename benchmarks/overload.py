"""More calls than the server can serve: `python -m benchmarks.overload`.

Open loop: calls come at fixed times, whether or not those before were answered, as they do from many users
at once. For each multiple of the capacity, which a closed loop measures first, it prints the goodput (calls
answered within their deadline, as a share of the capacity), how long accepted calls and refusals took, and
how long health checks took meanwhile.
"""

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

import trocar
from benchmarks.served import served

_FACTORS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
_CALLERS = 4
"""Connections, each with a name of its own."""
_HEALTH_PAUSE_S = 0.02
_NO_DEADLINE_S = 60.0


@dataclass
class Outcome:
    """What became of the calls of one run, in seconds."""

    factor: float
    capacity: float
    duration_s: float
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: int = 0
    health: list[float] = field(default_factory=list)

    def row(self) -> str:
        """Return it as a row of the table."""
        goodput = len(self.accepted) / self.duration_s
        sent = len(self.accepted) + len(self.refused) + self.late
        return (
            f"| {self.factor:.1f} | {sent} | {goodput:.1f} | {goodput / self.capacity:.0%} "
            f"| {_ms(self.accepted, 0.5)} | {_ms(self.accepted, 0.99)} | {len(self.refused)} "
            f"| {_ms(self.refused, 0.5)} | {_ms(self.refused, 0.99)} | {self.late} "
            f"| {_ms(self.health, 0.5)} | {_ms(self.health, 0.99)} |"
        )


class HealthProbe:
    """Asks for the server's health from a thread and a connection of its own, and notes how long it took."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._ends = threading.Event()
        self._seconds: list[float] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self._seconds

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._channel.close()

    def _ask(self) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        while not self._ends.wait(_HEALTH_PAUSE_S):
            started = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest())
            self._seconds.append(time.perf_counter() - started)


async def capacity_of(clients: Sequence[trocar.aio.AsyncClient], call: "Call", seconds: float) -> float:
    """Return calls a second in a closed loop: each caller has one call under way."""
    ends, done = time.perf_counter() + seconds, 0

    async def loop(client: trocar.aio.AsyncClient) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await call.make(client, _NO_DEADLINE_S)
            done += 1

    await asyncio.gather(*(loop(client) for client in clients))
    return done / seconds


@dataclass(frozen=True)
class Call:
    """What every call asks for."""

    model: str
    inputs: np.ndarray[Any, Any]
    tap: str
    timeout_s: float

    async def make(self, client: trocar.aio.AsyncClient, timeout_s: float | None = None) -> None:
        """Make it once."""
        await client.extract(self.model, self.inputs, self.tap, timeout_s=timeout_s or self.timeout_s)


async def overload(
    clients: Sequence[trocar.aio.AsyncClient], call: Call, outcome: Outcome, rate: float
) -> None:
    """Make calls at a fixed rate for the outcome's duration, and note what becomes of them."""

    async def one(client: trocar.aio.AsyncClient) -> None:
        started = time.perf_counter()
        try:
            await call.make(client)
            outcome.accepted.append(time.perf_counter() - started)
        except trocar.ServerBusyError:
            outcome.refused.append(time.perf_counter() - started)
        except trocar.DeadlineExceededError:
            outcome.late += 1

    begun, tasks = time.perf_counter(), []
    for number in range(int(rate * outcome.duration_s)):
        pause_s = begun + number / rate - time.perf_counter()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        tasks.append(asyncio.ensure_future(one(clients[number % len(clients)])))
    await asyncio.gather(*tasks)
    outcome.duration_s = time.perf_counter() - begun


async def measure(address: str, call: Call, seconds: float, factors: Sequence[float]) -> list[Outcome]:
    """Return one outcome for each factor."""
    clients = [trocar.aio.connect(address, token=f"caller {n}", retries=0) for n in range(_CALLERS)]
    await capacity_of(clients, call, min(seconds, 3.0))
    capacity = await capacity_of(clients, call, seconds)
    print(f"capacity {capacity:.1f} calls a second", flush=True)
    outcomes = []
    for factor in factors:
        outcome = Outcome(factor, capacity, seconds)
        with HealthProbe(address) as outcome.health:
            await overload(clients, call, outcome, factor * capacity)
        outcomes.append(outcome)
    for client in clients:
        await client.close()
    return outcomes


def main() -> None:
    """Run every factor and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--tap", default="avgpool")
    parser.add_argument("--side", type=int, default=224, help="height and width of each call's image")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each run")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="deadline of each call")
    parser.add_argument("--factors", type=float, nargs="+", default=list(_FACTORS))
    chosen = parser.parse_args()
    inputs = np.random.default_rng(0).standard_normal((1, 3, chosen.side, chosen.side), np.float32)
    call = Call(chosen.model, inputs, chosen.tap, chosen.timeout_s)
    with served([f"{chosen.model}=random:0"]) as server:
        outcomes = asyncio.run(measure(server.address, call, chosen.seconds, chosen.factors))
    print(
        f"\n### Overload, {chosen.model}, deadline {chosen.timeout_s:g} s\n\n"
        "| times capacity | calls | goodput/s | of capacity | accepted p50 ms | p99 | refused | p50 ms | p99 "
        "| late | health p50 ms | p99 |\n" + "|---" * 12 + "|"
    )
    for outcome in outcomes:
        print(outcome.row())


def _ms(seconds: Sequence[float], share: float) -> str:
    if not seconds:
        return ""
    ranked = sorted(seconds)
    value = statistics.median(ranked) if share == 0.5 else ranked[int(len(ranked) * share)]
    return f"{value * 1000:.1f}"


if __name__ == "__main__":
    main()
