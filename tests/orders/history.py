"""Histories of calls that overlap: each begins, goes on for some turns of the loop, and may be cut off."""

# pyright: reportArgumentType=false

from __future__ import annotations

import asyncio
import shutil
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.orders.world import leaks, look, served, settled
from tests.support.orders.amount import AMOUNT, SEED
from tests.support.orders.seeded_loop import SeededLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AbstractAsyncContextManager

    from tests.orders.world import State
    from tests.support.orders.doorway import Answer, Call

Result = TypeVar("Result")
HISTORIES = 2 if AMOUNT < 0 else 30 * (AMOUNT or 4)
STEPS = 25
LEFT = ("CANCELLED", "GONE")
"""Codes of calls whose caller does not know whether they were applied."""
seeds = st.integers(0, 2**16)
turns = st.integers(1, 30)
which = st.integers(0, 100)


class Registers:
    """The model of what is stored under names, while calls that change it overlap.

    A value is the one before, unless a call has said that it is applied, or one of any call that was not
    refused.
    """

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self._since: defaultdict[Any, list[tuple[Any, str]]] = defaultdict(list)

    def note(self, name: Any, value: Any, code: str) -> None:
        """Note a call that has ended; `value` is the one after it."""
        if code in ("OK", *LEFT):
            self._since[name].append((value, code))

    def may_be(self, name: Any) -> list[Any]:
        """Return the values that a name may have."""
        since = self._since[name]
        is_applied = any(code == "OK" for _, code in since)
        return [value for value, _ in since] + ([] if is_applied else [self.values.get(name)])

    def see(self, name: Any, value: Any) -> None:
        """Compare with the value of a name, once nothing is under way."""
        assert value in self.may_be(name), (name, value, self.may_be(name))
        self.values[name] = value
        self._since.pop(name, None)


class History(RuleBasedStateMachine):
    """A server on a loop of its own, and calls that are open."""

    settings: ClassVar[dict[str, Any]] = {}
    is_shared: ClassVar[bool] = False

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        self.folder = Path(mkdtemp())
        self.loop = SeededLoop(seed)
        self.stack = AsyncExitStack()
        self.server = self.run(self.stack.enter_async_context(self.opened()))
        self.tasks = self.run(self.all_tasks())
        self.open: list[tuple[Any, Call]] = []
        self.cut: list[Any] = []
        self.prepare()

    def opened(self) -> AbstractAsyncContextManager[Any]:
        """Return the context of what has the door."""
        return served(self.folder, "a", is_shared=self.is_shared, **self.settings)

    def prepare(self) -> None:
        """Make what the calls are for."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    async def all_tasks(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    def ask(self, method: str, *messages: Any) -> Answer:
        """Make a call, and let it end."""
        answer: Answer = self.run(self.server.door.ask(method, *messages))
        return answer

    def call(self, what: Any, method: str, *messages: Any) -> None:
        """Begin a call; `what` it means to the model."""

        async def begun() -> Call:
            begun: Call = self.server.door.begin(method, *messages)
            return begun

        self.open.append((what, self.run(begun())))

    @rule(count=turns)
    def go_on(self, count: int) -> None:
        async def some() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.run(some())

    @precondition(lambda self: self.open)
    @rule(number=which, is_lost=st.booleans())
    def cut_off(self, number: int, is_lost: bool) -> None:
        what, call = self.open[number % len(self.open)]
        self.cut.append(what)

        async def cut() -> None:
            (call.disconnect if is_lost else call.cancel)()

        self.run(cut())

    @rule()
    def rest(self) -> None:
        """Let all calls end, and check what they have left."""
        self.resend_cut_off()

        async def ended() -> list[str]:
            for _, call in self.open:
                await asyncio.wait_for(call.ended(), 600)
            await settled(self.tasks)
            return self.left()

        left = self.run(ended())
        assert not left, left
        for what, call in self.open:
            self.answered(what, call)
        self.open.clear()
        self.rested()

    def left(self) -> list[str]:
        """Return what ended calls have left behind."""
        return leaks(self.server, self.tasks)

    def resend_cut_off(self) -> None:
        """Send calls again that others wait for."""

    def answered(self, what: Any, call: Call) -> None:
        """Compare an answer with the model."""

    def rested(self) -> None:
        """Compare the state with the model, once nothing is under way."""

    def stored(self) -> State | None:
        """Return what a server that is started again must have, too; None if nothing."""
        return None

    async def _on_disk(self) -> State:
        async with served(self.folder, "a", is_shared=self.is_shared, **self.settings) as server:
            return await look(server)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        expected = None
        try:
            self.rest()
            expected = self.stored()
        finally:
            self.run(self.stack.aclose())
            if expected is not None:
                state = self.run(self._on_disk())
                assert {name: state[name] for name in expected} == expected
            self.run(self.loop.shutdown_asyncgens())
            self.loop.close()
            shutil.rmtree(self.folder)


def run_histories(kind: type[History], count: int = HISTORIES, seed: int = SEED) -> None:
    """Draw histories.

    Raises:
        AssertionError: One of them does something that its model does not.
    """
    chosen = settings(
        max_examples=count,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(seeded(seed)(kind), settings=chosen)
