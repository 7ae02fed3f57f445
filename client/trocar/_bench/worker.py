"""Load worker: a process that calls, one thread for each of its clients.

Several processes, because threads of one Python process share one core, which a fast server outruns: the
figures would then be the client's. Clients beyond the number of processes are threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from trocar._bench.process import Commands
from trocar._bench.records import Answer, Record
from trocar._bench.schedule import Clock, MachineClock, dispatch

_MOST_ERRORS = 20
"""Failures in a row after which a client of a closed loop gives up for the round."""
MOST_OUTSTANDING = 256
"""Calls of one process that may be on their way in an open loop; others wait in it, which counts."""

Call: TypeAlias = Callable[[], Answer]


class CallFailedError(Exception):
    """A call failed; the message is the reason to count it under."""


class Target(Protocol):
    """Target of calls. It is pickled, and opened in the processes of the clients, once for each client."""

    def open(self, client: int) -> AbstractContextManager[Call]:
        """Return this client's call, which raises `CallFailedError`."""
        ...


@dataclass(frozen=True)
class Opening:
    """Job that prepares clients."""

    target: Target
    """What they call."""
    clients: Sequence[int]
    """Who they are."""


@dataclass(frozen=True)
class ClosedLoop:
    """Each client calls again when it has the answer."""

    start_s: float
    """When to begin, on the machine's clock."""
    duration_s: float
    """No call begins later than this after the start."""
    most_calls: int | None = None
    """So many calls of each client end the round, however long they take."""


@dataclass(frozen=True)
class OpenLoop:
    """Calls begin when they are due."""

    start_s: float
    """When to begin, on the machine's clock."""
    due: Sequence[float]
    """When each is due, in seconds from the start; the clients of a process take turns."""


def run_closed(job: ClosedLoop, client: int, call: Call, clock: Clock) -> list[Record]:
    """Call until the time is over; at least once."""
    clock.sleep(max(job.start_s - clock.now(), 0))
    records: list[Record] = []
    while not records or _goes_on(job, records, clock):
        now = clock.now()
        records.append(make_call(now, client, call, clock))
    return records


def _goes_on(job: ClosedLoop, records: list[Record], clock: Clock) -> bool:
    last = records[-_MOST_ERRORS:]
    if len(last) == _MOST_ERRORS and all(record.error for record in last):
        return False
    if job.most_calls is not None:
        return len(records) < job.most_calls
    return clock.now() < job.start_s + job.duration_s


def run_open(job: OpenLoop, calls: Sequence[tuple[int, Call]], clock: Clock) -> list[Record]:
    """Make every call when it is due, without waiting for the answers to those before it."""
    records: list[Record] = []
    turn = iter(range(len(job.due)))
    with ThreadPoolExecutor(MOST_OUTSTANDING) as threads:

        def submit(due_s: float) -> None:
            client, call = calls[next(turn) % len(calls)]
            threads.submit(lambda: records.append(make_call(due_s, client, call, clock)))

        dispatch(job.due, job.start_s, submit, clock)
    return records


def make_call(due_s: float, client: int, call: Call, clock: Clock) -> Record:
    """Make one call and record its result."""
    started_s = clock.now()
    try:
        answer = call()
    except CallFailedError as error:
        return Record(client, due_s, started_s, clock.now(), error=str(error))
    return Record(client, due_s, started_s, clock.now(), answer)


def run_job(job: ClosedLoop | OpenLoop, calls: Sequence[tuple[int, Call]]) -> list[Record]:
    """Run one round with the clients of this process."""
    clock = MachineClock()
    if isinstance(job, OpenLoop):
        return run_open(job, calls, clock)

    def run(own: tuple[int, Call]) -> list[Record]:
        return run_closed(job, own[0], own[1], clock)

    if len(calls) == 1:
        return run(calls[0])
    with ThreadPoolExecutor(len(calls)) as threads:
        rounds = list(threads.map(run, calls))
    return [record for records in rounds for record in records]


def main() -> None:
    """Run the parent's jobs until it closes the pipe."""
    commands = Commands()
    with ExitStack() as stack:
        calls: list[tuple[int, Call]] = []
        for job in commands:
            if isinstance(job, Opening):
                calls = [(client, stack.enter_context(job.target.open(client))) for client in job.clients]
                commands.answer("ready")
            else:
                commands.answer(run_job(job, calls))
