"""More calls than the server can serve: `python -m benchmarks.overload`.

    python -m benchmarks.overload --model resnet50 --seconds 60 --factors 3

Open loop: calls come at fixed times, whether or not those before were answered, as they do from many users
at once; how long one took counts from when it was due. The server, the callers and the health checks are
processes of their own. The capacity is measured first, in a closed loop as long as each run; the peak is the
most that was answered in a second by it or by any run.

For each multiple of the capacity it prints the goodput (calls answered within their deadline, as a share of
the peak), how long accepted calls and refusals took, how late calls were sent (much of it: the machine cannot
make such a load, and the figures say nothing), and how long health checks took meanwhile. The exit code is 1
where the promise is broken at 1.5 times the capacity or more.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import trocar
from benchmarks.health_probe import HealthProbe
from benchmarks.served import served

_FACTORS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
_CALLERS = 4
"""Connections, each with a name of its own."""
_NO_DEADLINE_S = 60.0
_MOST_HEALTH_S, _LEAST_GOODPUT, _OVERLOAD = 0.05, 0.75, 1.5
"""What is promised from this multiple of the capacity on, with callers on the server's own cores."""


@dataclass
class Outcome:
    """Outcome of the calls of one run, in seconds."""

    factor: float
    duration_s: float
    """From the first call to the last answer."""
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: int = 0
    """Calls whose deadline passed."""
    lags: list[float] = field(default_factory=list)
    """From when a call was due until it was sent."""
    health: list[float] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Calls that were made."""
        return len(self.accepted) + len(self.refused) + self.late

    @property
    def goodput(self) -> float:
        """Calls answered per second."""
        return len(self.accepted) / self.duration_s

    def row(self, peak: float) -> str:
        """Return it as a row of the table."""
        return (
            f"| {self.factor:.1f} | {self.sent} | {self.goodput:.1f} | {self.goodput / peak:.0%} "
            f"| {_ms(self.accepted, 0.5)} | {_ms(self.accepted, 0.99)} | {len(self.refused)} "
            f"| {_ms(self.refused, 0.5)} | {_ms(self.refused, 0.99)} | {self.late} | {_ms(self.lags, 0.99)} "
            f"| {_ms(self.health, 0.5)} | {_ms(self.health, 0.99)} |"
        )

    def keeps_promise(self, peak: float) -> bool:
        """Whether goodput and health are within limits under this load."""
        return self.goodput >= _LEAST_GOODPUT * peak and _share(self.health, 0.99) < _MOST_HEALTH_S


@dataclass(frozen=True)
class Measured:
    """Results of the measurement."""

    capacity: float
    """Calls a second in a closed loop."""
    idle_health: list[float]
    """Seconds of health checks while nothing else is asked."""
    outcomes: list[Outcome]

    @property
    def peak(self) -> float:
        """The most calls answered per second."""
        return max(self.capacity, *(outcome.goodput for outcome in self.outcomes))


async def capacity_of(clients: Sequence[trocar.aio.AsyncClient], call: "Call", seconds: float) -> float:
    """Return calls per second in a closed loop: each caller has one call in flight."""
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
    """The request of every call."""

    model: str
    inputs: np.ndarray[Any, Any]
    tap: str
    timeout_s: float

    async def make(self, client: trocar.aio.AsyncClient, timeout_s: float | None = None) -> None:
        """Make it once."""
        await client.extract(
            self.model, self.inputs, self.tap, options=trocar.options(timeout_s=timeout_s or self.timeout_s)
        )


async def overload(
    clients: Sequence[trocar.aio.AsyncClient], call: Call, outcome: Outcome, rate: float
) -> None:
    """Make calls at a fixed rate for the outcome's duration, and record their outcomes."""

    async def one(client: trocar.aio.AsyncClient, due: float) -> None:
        outcome.lags.append(time.perf_counter() - due)
        try:
            await call.make(client)
            outcome.accepted.append(time.perf_counter() - due)
        except trocar.errors.ServerBusyError:
            outcome.refused.append(time.perf_counter() - due)
        except trocar.errors.DeadlineExceededError:
            outcome.late += 1

    begun, tasks = time.perf_counter(), []
    for number in range(int(rate * outcome.duration_s)):
        due = begun + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one(clients[number % len(clients)], due)))
    await asyncio.gather(*tasks)
    outcome.duration_s = time.perf_counter() - begun


async def measure(address: str, call: Call, seconds: float, factors: Sequence[float]) -> Measured:
    """Return one outcome for each factor, and their baseline."""
    clients = [trocar.aio.connect(address, token=f"caller {n}", retries=0) for n in range(_CALLERS)]
    await capacity_of(clients, call, min(seconds, 3.0))
    with HealthProbe(address) as idle:
        await asyncio.sleep(min(seconds, 3.0))
    capacity = await capacity_of(clients, call, seconds)
    print(f"capacity {capacity:.1f} calls a second", flush=True)
    outcomes = []
    for factor in factors:
        outcome = Outcome(factor, seconds)
        with HealthProbe(address) as probe:
            await overload(clients, call, outcome, factor * capacity)
        outcome.health = probe.seconds
        outcomes.append(outcome)
    for client in clients:
        await client.close()
    return Measured(capacity, idle.seconds, outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every factor and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--tap", default="avgpool")
    parser.add_argument("--side", type=int, default=224, help="height and width of each call's image")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each run")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="deadline of each call")
    parser.add_argument("--factors", type=float, nargs="+", default=list(_FACTORS))
    chosen = parser.parse_args(arguments)
    inputs = np.random.default_rng(0).standard_normal((1, 3, chosen.side, chosen.side), np.float32)
    call = Call(chosen.model, inputs, chosen.tap, chosen.timeout_s)
    with served([f"{chosen.model}=random:0"]) as server:
        result = asyncio.run(measure(server.address, call, chosen.seconds, chosen.factors))
    print(
        f"\n### Overload, {chosen.model}, {chosen.seconds:g} s each, deadline {chosen.timeout_s:g} s\n\n"
        f"Capacity {result.capacity:.1f}, peak {result.peak:.1f} calls a second. Health of an idle server: "
        f"p50 {_ms(result.idle_health, 0.5)} ms, p99 {_ms(result.idle_health, 0.99)} ms.\n\n"
        "| times capacity | calls | goodput/s | of peak | accepted p50 ms | p99 | refused | p50 ms | p99 "
        "| late | sent late p99 ms | health p50 ms | p99 |\n" + "|---" * 13 + "|"
    )
    for outcome in result.outcomes:
        print(outcome.row(result.peak))
    overloaded = [outcome for outcome in result.outcomes if outcome.factor >= _OVERLOAD]
    is_kept = all(outcome.keeps_promise(result.peak) for outcome in overloaded)
    promise = f"goodput >= {_LEAST_GOODPUT:.0%}, health p99 < {_MOST_HEALTH_S * 1000:g} ms"
    print(f"\nfrom {_OVERLOAD:g} times on: {promise}: {'kept' if is_kept else 'NOT kept'}")
    return 0 if is_kept else 1


def _ms(seconds: Sequence[float], share: float) -> str:
    if not seconds:
        return ""
    return f"{_share(seconds, share) * 1000:.1f}"


def _share(seconds: Sequence[float], share: float) -> float:
    """Return the quantile of this share."""
    ranked = sorted(seconds)
    return statistics.median(ranked) if share == 0.5 else ranked[int(len(ranked) * share)]


if __name__ == "__main__":
    sys.exit(main())
