"""Running calls: their count, and whether their callers are still authorized.

A token that is revoked, or expires, ends the calls that were started with it, including streams of hours:
each running call is authorized again every `CHECK_EVERY_S`. Acknowledged results are kept; the rest is as if
the call had been cancelled.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from trocar_server.errors import ServiceError, busy
from trocar_server.models import ANONYMOUS
from trocar_server.rpc.call.authorization import Authorizer
from trocar_server.rpc.call.drain import is_pending_work
from trocar_server.rpc.call.principal import flow_of
from trocar_server.rpc.transfer.messages import CallContext

CHECK_EVERY_S = 1.0
"""How long a call may continue after its caller lost authorization, plus `LiveGrants`' own delay."""

MAX_OPEN_CALLS = 128
"""Concurrent unauthenticated calls (health checks): a `Watch` lasts as long as its caller likes."""


@dataclass(eq=False)
class RunningCall:
    """One running call."""

    method: str
    context: CallContext
    task: "asyncio.Task[Any] | None"
    is_open: bool
    """Whether the method is open to every caller."""
    problem: ServiceError | None = None
    """Why the server ended it."""


class RunningCalls:
    """All calls of a server. Belongs to its event loop.

    Args:
        authorizer: Authorizes calls.

    Attributes:
        calls: The running calls: each adds and removes itself, in the task that runs it.
    """

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self.calls: set[RunningCall] = set()
        self._open: dict[RunningCall, None] = {}

    @property
    def work_count(self) -> int:
        """Number of running calls that a draining server waits for."""
        return sum(is_pending_work(call.method) for call in self.calls)

    def let_out(self, call: RunningCall) -> None:
        """Remove an unauthenticated call that has ended."""
        self._open.pop(call, None)

    def let_in(self, call: RunningCall) -> None:
        """Admit an unauthenticated call; at the limit, end the oldest call of the caller with the most calls.

        `let_out` must follow. A caller that keeps a thousand calls open thus only ends its own.
        """
        self._open[call] = None
        if len(self._open) <= MAX_OPEN_CALLS:
            return
        callers = [(flow_of(ANONYMOUS, other.context.peer()), other) for other in self._open]
        counts = Counter(flow for flow, _ in callers)
        most = max(counts.values())
        last = next(other for flow, other in callers if counts[flow] == most)
        self._open.pop(last)
        _end(
            last,
            busy(f"{MAX_OPEN_CALLS} calls without authentication are running, the maximum; try again later"),
        )

    def check(self) -> int:
        """End every call whose caller is no longer authorized; returns their number."""
        if not self._authorizer.is_guarded:
            return 0
        ended = 0
        for call in list(self.calls):
            if call.is_open:
                continue
            try:
                self._authorizer.admit(call.method, call.context)
            except ServiceError as error:
                ended += _end(call, error)
        return ended

    async def keep_checking(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check()


def _end(call: RunningCall, problem: ServiceError) -> bool:
    """End a call with a reason for its caller; False if it was ended already."""
    if call.task is None or call.problem is not None:
        return False
    call.problem = problem
    call.task.cancel()
    return True
