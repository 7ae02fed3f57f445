"""The calls that are under way: how many, and whether their callers may still make them.

A token that is revoked, or expires, ends the calls that were begun with it, streams of hours among them: each
running call's gate is asked again every `CHECK_EVERY_S`. What it has computed so far is not lost where it was
acknowledged; the rest is as if it had been cancelled.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trocar_server.errors import ServiceError
from trocar_server.rpc.doors import is_work
from trocar_server.rpc.gates import Gate
from trocar_server.rpc.method_scopes import is_open

CHECK_EVERY_S = 1.0
"""How long a call may go on whose caller has lost the right to it, plus that time of `LiveGrants`."""


@dataclass(eq=False)
class RunningCall:
    """One call, on its way."""

    method: str
    context: Any
    task: "asyncio.Task[Any] | None"
    problem: ServiceError | None = None
    """Why it was ended by us."""


class RunningCalls:
    """All calls of a server but those of health. Belongs to its event loop.

    Args:
        gate: Says who may make which call.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._calls: set[RunningCall] = set()

    @property
    def work_count(self) -> int:
        """Return how many calls run that a server which runs empty waits for."""
        return sum(is_work(call.method) for call in self._calls)

    @contextmanager
    def watched(self, method: str, context: Any) -> Iterator[RunningCall]:
        """Watch a call for the length of the context, in the task that runs it."""
        call = RunningCall(method, context, asyncio.current_task())
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    def check(self) -> int:
        """End every call that its caller may no longer make; returns how many those are."""
        if not self._gate.is_guarded:
            return 0
        ended = 0
        for call in list(self._calls):
            if is_open(call.method):
                continue
            try:
                self._gate.admit(call.method, call.context)
            except ServiceError as error:
                if call.task is not None and call.problem is None:
                    call.problem = error
                    call.task.cancel()
                    ended += 1
        return ended

    async def keep_checking(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check()
