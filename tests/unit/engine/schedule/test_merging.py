"""Calls in groups."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.merge_group import MergeGroup
from trocar_server.engine.schedule.merging import MergingQueue
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow, set_flow

TOGETHER = MergeGroup(None)


class Held:
    """Runs groups when it is told to, and remembers them."""

    def __init__(self, most_rows: int = 8, max_waiting: int = 100) -> None:
        self.groups: list[list[str]] = []
        self.may_run = asyncio.Semaphore(0)
        self.has_begun = asyncio.Event()
        self.queue: MergingQueue[str, str] = MergingQueue(self._run, lambda: most_rows, max_waiting)

    async def _run(self, group: Sequence[str]) -> Sequence[str | BaseException]:
        self.groups.append(list(group))
        self.has_begun.set()
        await self.may_run.acquire()
        return [KeyError(work) if work.startswith("bad") else work.upper() for work in group]

    def submit(
        self, work: str, rows: int = 1, *, group: MergeGroup | None = TOGETHER, timeout_s: float | None = None
    ) -> "asyncio.Task[str]":
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return asyncio.create_task(self.queue.submit(work, rows, group=group, deadline=deadline))


async def begun(held: Held, *works: str) -> "list[asyncio.Task[str]]":
    """Let one call run, with others behind it."""
    tasks = [held.submit("first")]
    await held.has_begun.wait()
    tasks += [held.submit(work) for work in works]
    await asyncio.sleep(0)
    return tasks


async def begun_with_rows(held: Held, rows: int) -> "list[asyncio.Task[str]]":
    """Let one call run, with a large one behind it."""
    held.may_run = asyncio.Semaphore(0)
    held.has_begun.clear()
    tasks = await begun(held)
    tasks.append(held.submit("large", rows))
    await asyncio.sleep(0)
    return tasks


def release(held: Held) -> None:
    for _ in range(50):
        held.may_run.release()


async def test_a_call_alone_runs_at_once() -> None:
    held = Held()
    release(held)
    assert await held.submit("a") == "A"
    assert held.groups == [["a"]]


async def test_those_that_wait_make_the_next_group() -> None:
    held = Held()
    tasks = await begun(held, "a", "b", "c")
    release(held)
    assert await asyncio.gather(*tasks) == ["FIRST", "A", "B", "C"]
    assert held.groups == [["first"], ["a", "b", "c"]]


async def test_a_group_has_no_more_rows_than_pay() -> None:
    held = Held(most_rows=4)
    first = held.submit("first")
    await held.has_begun.wait()
    rest = [
        held.submit("a", 3),
        held.submit("b", 1),
        held.submit("c", 2),
        held.submit("d", 9),
        held.submit("e", 1),
    ]
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(first, *rest)
    assert held.groups == [["first"], ["a", "b"], ["c"], ["d"], ["e"]]


async def test_who_refuses_company_runs_alone_and_in_turn() -> None:
    held = Held()
    first = held.submit("first")
    await held.has_begun.wait()
    rest = [held.submit("a"), held.submit("alone", group=None), held.submit("b"), held.submit("c")]
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(first, *rest)
    assert held.groups == [["first"], ["a"], ["alone"], ["b", "c"]]


async def test_one_that_fails_does_so_alone() -> None:
    held = Held()
    tasks = await begun(held, "a", "bad", "b")
    release(held)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[0], found[1], found[3]] == ["FIRST", "A", "B"]
    assert isinstance(found[2], KeyError)


async def test_a_group_that_fails_fails_for_each_and_the_next_one_runs() -> None:
    calls = 0

    async def run(group: Sequence[str]) -> Sequence[str | BaseException]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("broken")
        return list(group)

    queue: MergingQueue[str, str] = MergingQueue(run, lambda: 8, 8)
    with pytest.raises(ValueError, match="broken"):
        await queue.submit("a", 1, group=TOGETHER)
    assert await queue.submit("b", 1, group=TOGETHER) == "b"


async def test_a_call_that_is_cancelled_in_line_is_not_run() -> None:
    held = Held()
    tasks = await begun(held, "a", "b")
    tasks[1].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[1]
    release(held)
    assert [await tasks[0], await tasks[2]] == ["FIRST", "B"]
    assert held.groups == [["first"], ["b"]]


async def test_a_call_that_is_cancelled_while_it_runs_leaves_the_others_alone() -> None:
    held = Held()
    tasks = await begun(held, "a", "b")
    held.may_run.release()
    await tasks[0]
    tasks[1].cancel()
    release(held)
    assert await tasks[2] == "B"


async def test_one_more_than_may_wait_is_refused() -> None:
    held = Held(max_waiting=2)
    tasks = await begun(held, "a", "b")
    with pytest.raises(ServiceError) as caught:
        await held.submit("c")
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    release(held)
    await asyncio.gather(*tasks)


async def test_a_call_whose_group_does_not_begin_in_time_is_refused_as_busy() -> None:
    held = Held()
    tasks = await begun(held, "a")
    with pytest.raises(ServiceError, match="was not free within") as caught:
        await held.submit("late", timeout_s=0.01)
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    release(held)
    assert await asyncio.gather(*tasks) == ["FIRST", "A"]
    assert held.groups == [["first"], ["a"]]


async def test_a_call_that_is_expected_to_wait_too_long_is_refused_at_once() -> None:
    held = Held()
    release(held)
    for _ in range(3):
        await held.submit("fast")
    tasks = await begun_with_rows(held, 4000)
    held.queue._throughput.observe(1, 1000.0)  # a row then takes minutes
    with pytest.raises(ServiceError, match="of work wait before this call") as caught:
        await held.submit("late", timeout_s=60.0)
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 60.0
    patient = held.submit("patient")
    release(held)
    assert await asyncio.gather(*tasks, patient) == ["FIRST", "LARGE", "PATIENT"]


async def test_what_runs_and_waits_is_counted() -> None:
    held = Held()
    tasks = await begun(held, "a")
    tasks.append(in_flow(held, "b", "b"))
    await asyncio.sleep(0)
    assert (held.queue.is_running, held.queue.waiting_count) == (True, 2)
    assert held.queue.waiting_counts() == {current_flow(): 1, "b": 1}
    assert held.queue.pending_s > 0
    release(held)
    await asyncio.gather(*tasks)
    assert (held.queue.waiting_count, held.queue.waiting_counts(), held.queue.pending_s) == (0, {}, 0.0)


def in_flow(
    held: Held, flow: str, work: str, *, group: MergeGroup | None = None, **options: Any
) -> "asyncio.Task[str]":
    async def call() -> str:
        set_flow(flow)
        return await held.queue.submit(work, 1, group=group, **options)

    return asyncio.create_task(call())


async def test_groups_are_fair_between_callers() -> None:
    held = Held()
    tasks = await begun(held)
    tasks += [in_flow(held, "flood", f"flood {number}") for number in range(20)]
    await asyncio.sleep(0)
    tasks.append(in_flow(held, "single", "single"))
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(*tasks)
    assert held.groups.index(["single"]) <= 2
    rest = [group[0] for group in held.groups if group[0].startswith("flood")]
    assert rest == [f"flood {number}" for number in range(20)]


async def test_a_callers_priorities_order_his_own_calls() -> None:
    held = Held()
    tasks = await begun(held)
    tasks.append(in_flow(held, "a", "low", priority=Priority.LOW))
    tasks.append(in_flow(held, "a", "normal"))
    tasks.append(in_flow(held, "a", "high", priority=Priority.HIGH))
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(*tasks)
    assert held.groups[1:] == [["high"], ["normal"], ["low"]]


async def test_a_full_line_makes_room_for_who_has_less_than_his_share() -> None:
    held = Held(max_waiting=3)
    tasks = await begun(held)
    flood = [in_flow(held, "flood", f"flood {number}") for number in range(3)]
    await asyncio.sleep(0)
    single = in_flow(held, "single", "single")
    with pytest.raises(ServiceError, match="others share the queue"):
        await flood[2]
    release(held)
    assert await asyncio.gather(*tasks, *flood[:2], single) == ["FIRST", "FLOOD 0", "FLOOD 1", "SINGLE"]


async def test_a_group_uses_the_share_of_its_first_call() -> None:
    flows: list[str] = []

    async def run(group: Sequence[str]) -> Sequence[str]:
        flows.append(current_flow())
        return group

    held = Held()
    held.queue = MergingQueue(run, lambda: 8, 100)
    await asyncio.gather(*(in_flow(held, flow, flow) for flow in ("a", "b", "c")))
    assert flows == ["a", "b", "c"]


async def test_callers_who_alternate_are_merged_each_with_himself() -> None:
    held = Held()
    tasks = await begun(held)
    for number in range(3):
        for caller in ("a", "b"):
            tasks.append(in_flow(held, caller, f"{caller}{number}", group=MergeGroup(caller)))
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(*tasks)
    assert held.groups == [["first"], ["a0", "a1", "a2"], ["b0", "b1", "b2"]]


async def test_a_caller_pays_for_calls_that_joined_out_of_turn() -> None:
    held = Held(most_rows=4)
    tasks = await begun(held)
    tasks += [in_flow(held, "flood", f"flood {number}", group=MergeGroup("flood")) for number in range(12)]
    tasks += [in_flow(held, "few", f"few {number}", group=MergeGroup("few")) for number in range(4)]
    tasks += [in_flow(held, "alone", f"alone {number}") for number in range(2)]
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(*tasks)
    callers = [group[0].split()[0] for group in held.groups[1:]]
    assert callers == ["flood", "few", "alone", "alone", "flood", "flood"]
    assert all(len({work.split()[0] for work in group}) == 1 for group in held.groups)


async def test_groups_of_other_calls_never_join() -> None:
    held = Held()
    tasks = await begun(held)
    tasks += [held.submit(work, group=MergeGroup(work[0])) for work in ("a0", "b0", "b1", "a1")]
    tasks += [held.submit("c", group=None), held.submit("all")]
    await asyncio.sleep(0)
    release(held)
    await asyncio.gather(*tasks)
    assert held.groups[1:] == [["a0"], ["b0", "b1"], ["a1"], ["c"], ["all"]]
