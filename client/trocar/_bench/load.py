"""Load: clients in separate processes, and rounds of calls by all of them at once."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from trocar._bench.process import Helper
from trocar._bench.records import Record
from trocar._bench.worker import ClosedLoop, Opening, OpenLoop, Target

_LEAST_PROCESSES = 4
_START_DELAY_S = 0.05
"""Between telling the processes of a round and its start, so that they start together."""


def processor_count() -> int:
    """Return the number of cores of this process."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def default_processes(clients: int) -> int:
    """Return the number of processes for so many clients: one each, up to the number that can add load."""
    return min(clients, max(processor_count(), _LEAST_PROCESSES))


class Load:
    """Clients that call a target.

        with Load(target, clients=32) as load:
            load.closed(2.0)                     # warm-up
            records = load.closed(10.0)

    Args:
        target: Target of their calls.
        clients: Number of clients.
        processes: Number of processes that they share; see `default_processes` for 0.
        python: Their interpreter; this one when empty.
        environment: Set in their environment.

    Raises:
        HelperError: A process could not be prepared.
    """

    def __init__(
        self,
        target: Target,
        clients: int,
        processes: int = 0,
        python: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        count = min(processes or default_processes(clients), clients)
        with ExitStack() as stack:
            self._helpers = [
                stack.enter_context(Helper("trocar._bench.worker", python, environment)) for _ in range(count)
            ]
            for index, helper in enumerate(self._helpers):
                helper.send(Opening(target, range(index, clients, count)))
            for helper in self._helpers:
                helper.receive()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)  # with the error, processes are not waited for

    def closed(self, duration_s: float, most_calls: int | None = None) -> list[Record]:
        """Run a closed loop: every client calls again as soon as it has an answer. Return all calls.

        Raises:
            HelperError: A process is gone.
        """
        job = ClosedLoop(time.perf_counter() + _START_DELAY_S, duration_s, most_calls)
        return self._run([job] * len(self._helpers))

    def open(self, due: Sequence[float]) -> list[Record]:
        """Run an open loop: make calls at due times, in seconds from the start. Return all calls.

        Raises:
            HelperError: A process is gone.
        """
        start_s, count = time.perf_counter() + _START_DELAY_S, len(self._helpers)
        return self._run([OpenLoop(start_s, due[index::count]) for index in range(count)])

    def _run(self, jobs: Sequence[ClosedLoop | OpenLoop]) -> list[Record]:
        for helper, job in zip(self._helpers, jobs, strict=True):
            helper.send(job)
        return [record for helper in self._helpers for record in helper.receive()]
