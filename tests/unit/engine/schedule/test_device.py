"""The one thread that calls torch: order, errors, and waiting for the end whatever happens."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.schedule.device import WINDOW_S, DeviceThread, RecentUse, choose_device
from trocar_server.errors import ServiceError
from trocar_server.models import set_flow
from trocar_server.surgery import PassAborted

WAIT_S = 60
Result = TypeVar("Result")


class Held:
    """Work that begins, says so, and ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        self.may_end.wait(WAIT_S)
        self.ended.set()
        return "done"

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.began.wait, WAIT_S)


async def turns(count: int = 10) -> None:
    """Let the event loop run everything that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_result_comes_back(owner: DeviceThread) -> None:
    assert await owner.run(lambda: 2 + 3) == 5


async def test_all_work_runs_on_the_same_thread_and_not_on_the_loops(owner: DeviceThread) -> None:
    threads = {await owner.run(threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_work_runs_first_in_first_out(owner: DeviceThread) -> None:
    order: list[int] = []
    await asyncio.gather(*(owner.run(partial(order.append, number)) for number in range(200)))
    assert order == list(range(200))


@pytest.mark.parametrize(
    "error", [ValueError("no"), PassAborted(ErrorReason.CANCELLED), torch.OutOfMemoryError("full")]
)
async def test_what_work_raises_reaches_who_waits(owner: DeviceThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await asyncio.wait_for(owner.run(fail), WAIT_S)
    assert caught.value is error


async def test_work_that_raises_stop_iteration_does_not_wait_forever(owner: DeviceThread) -> None:
    """A future takes no `StopIteration` (Python 3.11); it must arrive as some error all the same."""
    task = asyncio.ensure_future(owner.run(lambda: next(iter(()))))
    done, _ = await asyncio.wait([task], timeout=60)
    task.cancel()
    assert done
    with pytest.raises((StopIteration, RuntimeError)):
        task.result()


async def test_the_thread_goes_on_after_an_error(owner: DeviceThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await owner.run(lambda: 1 // 0)
    assert await owner.run(lambda: "alive") == "alive"


async def test_a_cancelled_waiter_waits_for_the_end_of_its_work(owner: DeviceThread) -> None:
    work = Held()
    task = asyncio.ensure_future(owner.run(work))
    await work.until_begun()
    task.cancel()
    await turns()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()


async def test_a_waiter_cancelled_twice_waits_for_the_end_of_its_work(owner: DeviceThread) -> None:
    """Who waits holds the replica that the work uses: it must not go back before."""
    work = Held()
    task = asyncio.ensure_future(owner.run(work))
    await work.until_begun()
    task.cancel()
    await turns()
    task.cancel()
    await turns()
    was_done = task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not was_done


async def test_a_cancelled_waiter_makes_its_work_end_soon(owner: DeviceThread) -> None:
    work = Held()
    task = asyncio.ensure_future(owner.run(work, on_cancel=work.may_end.set))
    await work.until_begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_fails_after_its_waiter_was_cancelled_complains_to_nobody(
    owner: DeviceThread,
) -> None:
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait(WAIT_S)
        raise ValueError("nobody listens")

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    task = asyncio.ensure_future(owner.run(fail, on_cancel=may_fail.set))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await turns()
    assert not complaints


async def test_queued_work_runs_before_the_thread_stops() -> None:
    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    futures = [owner.submit(partial(int, number)) for number in range(20)]
    await asyncio.to_thread(owner.stop)
    assert await asyncio.gather(*futures) == list(range(20))


async def test_a_result_is_dropped_when_its_waiter_has_it(owner: DeviceThread) -> None:
    """The thread would otherwise keep the last feature maps alive until the next job."""

    class Result:
        alive = 0

        def __init__(self) -> None:
            Result.alive += 1

        def __del__(self) -> None:
            Result.alive -= 1

    await owner.run(Result)
    async with asyncio.timeout(30):
        while Result.alive:  # the thread may still be at the line after the one that wakes us
            await turns()


async def test_the_configured_number_of_threads_is_used() -> None:
    before = torch.get_num_threads()
    owner = DeviceThread(torch.device("cpu"), threads=1)
    owner.start()
    try:
        assert await owner.run(torch.get_num_threads) == 1
    finally:
        await asyncio.to_thread(owner.stop)
        torch.set_num_threads(before)  # the number is of the process, and bits depend on it


@pytest.mark.parametrize(
    ("name", "message"),
    [("cuda:99", "no device 'cuda:99'"), ("gpu", "no device is called 'gpu'"), ("", "is called ''")],
)
def test_a_device_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ServiceError, match=f"{message}.*; use auto, cpu or cuda:0") as caught:
        choose_device(name)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_named_device_is_taken_as_it_is() -> None:
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda:0"), (False, "cpu")])
def test_auto_takes_cuda_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("auto") == torch.device(expected)


async def test_what_comes_when_the_thread_has_ended_is_refused() -> None:
    thread = DeviceThread(torch.device("cpu"))
    thread.start()
    await asyncio.to_thread(thread.stop)
    with pytest.raises(ServiceError) as caught:
        await thread.run(lambda: 1)
    assert caught.value.reason is ErrorReason.SERVER_BUSY


async def in_flow(flow: str, work: Awaitable[Result]) -> Result:
    """Wait for work that was queued in a flow."""
    set_flow(flow)
    return await work


class Line:
    """Work that waits until the context ends, behind something held; a clock of its own tells the time."""

    def __init__(self, owner: DeviceThread) -> None:
        self.order: list[str] = []
        self.now = 0.0
        self._owner = owner
        self._tasks: list[asyncio.Task[None]] = []

    def add(
        self, flow: str, seconds: float, name: str = "", shares: Mapping[str, float] | None = None
    ) -> None:
        def work() -> None:
            self.order.append(name or flow)
            self.now += seconds

        self._tasks += [asyncio.create_task(in_flow(flow, self._owner.run(work, shares=shares)))]

    async def run(self, held: "Held") -> None:
        await turns()
        held.may_end.set()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def line_behind(owner: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    line, held = Line(owner), Held()
    first = asyncio.create_task(in_flow("before", owner.run(held)))
    await held.until_begun()
    monkeypatch.setattr(time, "monotonic", lambda: line.now)
    yield line
    await line.run(held)
    await first


async def test_one_flow_with_much_work_does_not_shut_out_another(
    owner: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sixteen fits of one caller would an extraction of another."""
    async with line_behind(owner, monkeypatch) as line:
        for number in range(16):
            line.add("a", 0.1, f"a{number}")
        await turns()
        line.add("b", 0.1)
    assert line.order.index("b") <= 1
    assert [name for name in line.order if name != "b"] == [f"a{number}" for number in range(16)]


async def test_two_that_have_one_piece_of_work_waiting_each_alternate(owner: DeviceThread) -> None:
    """As a fit, which queues its next step when the last one is done, and extractions one after the other."""
    order: list[str] = []

    async def goes_on(name: str) -> None:
        for _ in range(20):
            await owner.run(partial(order.append, name))

    held = Held()
    first = asyncio.create_task(owner.run(held))
    await held.until_begun()
    both = [asyncio.create_task(goes_on(name)) for name in ("fit", "extraction")]
    await turns()
    held.may_end.set()
    await asyncio.gather(first, *both)
    assert order == ["fit", "extraction"] * 20


async def test_who_uses_much_time_has_fewer_turns(
    owner: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What work costs is known when it is done."""
    async with line_behind(owner, monkeypatch) as line:
        for name, seconds in [("step", 1.0), ("pass", 0.1)] * 40:
            line.add(name, seconds)
    last_pass = max(index for index, name in enumerate(line.order) if name == "pass")
    assert line.order[: last_pass + 1].count("step") <= 5


async def test_who_shares_a_piece_of_work_pays_a_share_of_it(
    owner: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As calls that run together: who was first in the group has not used all of its time."""
    async with line_behind(owner, monkeypatch) as line:
        for name in ("a", "b", "c") * 40:
            line.add(name, 1.0, shares={"a": 0.5, "b": 0.5} if name == "a" else None)
    last_a = max(index for index, name in enumerate(line.order) if name == "a")
    counts = {name: line.order[: last_a + 1].count(name) for name in "abc"}
    assert counts["a"] == 40
    # Each of a's is at half its time, as b pays the other half: so b has fewer turns of its own.
    assert counts["b"] < counts["c"] < counts["a"]


async def test_it_says_whether_new_work_would_have_to_wait(owner: DeviceThread) -> None:
    held = Held()
    assert not owner.is_busy
    task = asyncio.create_task(owner.run(held))
    await held.until_begun()
    assert owner.is_busy
    held.may_end.set()
    await task
    assert not owner.is_busy


class Clock:
    """A clock that is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_seconds_add_up_by_flow() -> None:
    use = RecentUse(Clock())
    for flow, seconds in (("alice", 0.5), ("bob", 1.0), ("alice", 0.25)):
        use.add(flow, seconds)
    assert use.seconds() == {"alice": 0.75, "bob": 1.0}


def test_use_is_forgotten_after_a_minute_and_not_before_50_seconds() -> None:
    clock = Clock()
    use = RecentUse(clock)
    use.add("alice", 1.0)
    clock.now_s += WINDOW_S - 10.1
    use.add("bob", 2.0)
    assert use.seconds() == {"alice": 1.0, "bob": 2.0}
    clock.now_s += 10.1
    assert use.seconds() == {"bob": 2.0}
    clock.now_s += WINDOW_S
    assert use.seconds() == {}
