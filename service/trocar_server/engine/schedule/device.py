"""Device thread: the one thread that calls torch.

As soon as a second thread has ever called torch, libgomp halves the pace of all of them (15 -> 21 ms for
resnet18), so everything that touches a tensor, preprocessing and reductions included, is work for this
thread. Passes of every model, steps of every trainer and units of every fit stand in one line, which is fair
between callers by the seconds that their work takes.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.schedule.device_memory import give_back_cache
from trocar_server.engine.schedule.fair_queue import FairQueue
from trocar_server.engine.transfer import Transfers, transfers_of, using
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.surgery import PassGuard

Result = TypeVar("Result")

device_user: ContextVar[str] = ContextVar("device_user", default="")
"""The model or trainer that work of the current task is for, for the operator."""

WINDOW_S = 60
"""How long recent use is, in seconds; it is counted in steps."""
_STEP_S = 10


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    flow: str
    shares: Mapping[str, float]
    """Shares of its time, by the flow that is charged."""
    user: str = ""
    """See `device_user`."""
    has_ended: bool = False
    """Whether its result has returned to the loop."""


_QUANTUM_S = 1e-3


@dataclass(frozen=True, eq=False)
class Holder:
    """The work that runs on the device.

    Attributes:
        user: The model or trainer that it is for; empty where it is for neither.
        started: When it began, as a time of `time.monotonic()`.
    """

    user: str
    started: float
    job: _Job

    @property
    def held_s(self) -> float:
        """Seconds for which it has held the device."""
        return time.monotonic() - self.started


class DeviceThread:
    """Runs work for one torch device on one thread; work of one flow in order of submission.

    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    value = await owner.run(lambda: model(batch))

    Copies to the host that work begins are done before its result is set, unless the work itself took them:
    see `Transfers.take`.

    Args:
        device: The models' device.
        threads: Threads of one CPU pass; torch's default when None.
        open_transfers: Makes the transfers of the device.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        open_transfers: Callable[[torch.device], Transfers] = transfers_of,
    ) -> None:
        self.device = device
        self._threads = threads
        self._transfers = open_transfers(device)
        self._line: FairQueue[_Job] = FairQueue(_QUANTUM_S)
        self._first: _Job | None = None
        """The job before those in line, submitted while nothing ran or waited."""
        self._use = RecentUse()
        self._mutex = Lock()
        """Guards the queue and the recent use."""
        self._signals: SimpleQueue[bool] = SimpleQueue()
        """True for each job in the queue, false for the end."""
        self._has_ended = False
        self._is_running = False
        self.holder: Holder | None = None
        """The work that runs now."""
        self._thread = self._new_thread()

    @property
    def is_busy(self) -> bool:
        """Whether work is running or waiting, so that new work would not begin at once."""
        return self._is_running or self.is_awaited()

    def is_awaited(self) -> bool:
        """Whether work waits behind what runs now."""
        return self._first is not None or bool(self._line)

    @property
    def thread_count(self) -> int | None:
        """Threads of one CPU pass, where the operator set them."""
        return self._threads

    def recent_use(self) -> Mapping[str, float]:
        """Return the seconds of this thread that each flow has used in about the last minute."""
        with self._mutex:
            return self._use.seconds()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def abandon(self, *, settles: bool) -> None:
        """Leave the work that runs to itself, and run the rest on another thread; the process is to end.

        Args:
            settles: Whether those who wait for it get `SERVER_BUSY`; otherwise they wait for ever.
        """
        holder = self.holder
        with self._mutex:
            self._is_running = False
        self._thread = self._new_thread()
        self._thread.start()
        if holder is not None and settles:
            _settle(holder.job, None, ServiceError(ErrorReason.SERVER_BUSY, "the server is shutting down"))

    def stop(self) -> None:
        """End the thread after the work queued so far."""
        self._signals.put(False)
        self._thread.join()

    def submit(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Queue work in the flow of the current call; the future belongs to the running event loop.

        A queued job always runs, unless the thread has ended: then it fails with `SERVER_BUSY`.
        """
        return self._queue(work).future

    async def run(
        self,
        work: Callable[[], Result],
        on_cancel: Callable[[], None] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> Result:
        """Queue work and wait for its end, even when cancelled: the waiting task owns what the work uses.

        Args:
            work: Called without arguments on the thread.
            on_cancel: Called when the waiting task is cancelled, to make the work end soon.
            shares: The flows that are charged, with shares that add up to 1; the current flow when None.
        """
        job = self._queue(work, shares)
        try:
            # Not shielded: a shield costs one more loop iteration, 50 us when its code is not in the cache.
            return await job.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            if on_cancel:
                on_cancel()
            await _end_of(job)
            raise

    async def run_guarded(
        self, work: Callable[[], Result], guard: PassGuard, deadline: float | None
    ) -> Result:
        """Run work that checks a guard; cancellation and the deadline stop it.

        Args:
            work: Called without arguments on the thread.
            guard: What the work checks.
            deadline: A time of `time.monotonic()` in seconds, or None.
        """
        loop = asyncio.get_running_loop()  # its clock is that of deadlines: `time.monotonic`
        timer = None if deadline is None else loop.call_at(deadline, guard.expire)
        try:
            return await self.run(work, on_cancel=guard.cancel)
        finally:
            if timer is not None:
                timer.cancel()

    def _queue(self, work: Callable[[], Any], shares: Mapping[str, float] | None = None) -> _Job:
        loop, flow = asyncio.get_running_loop(), current_flow()
        job = _Job(work, loop, loop.create_future(), flow, shares or {flow: 1.0}, device_user.get())
        with self._mutex:
            if self._is_running or self._first is not None or self._line.circle:
                self._line.push(job, flow)
            else:
                self._first = job
        self._signals.put(True)
        if self._has_ended:
            self._refuse_jobs()
        return job

    def _new_thread(self) -> Thread:
        return Thread(target=self._serve, name=f"torch-{self.device}", daemon=True)

    def _serve(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with using(self._transfers):
            self._serve_jobs()
        if current_thread() is self._thread:
            self._has_ended = True
            self._refuse_jobs()

    def _serve_jobs(self) -> None:
        while self._signals.get():
            job = self._next()
            started = time.monotonic()
            self.holder = Holder(job.user, started, job)
            result, error = _outcome(job.work)
            if current_thread() is not self._thread:  # abandoned
                return
            self.holder = None
            if self._transfers.has_begun:
                result, error = self._with_copies(result, error)
            if error is not None and _is_out_of_memory(error):
                give_back_cache(self.device)
            with self._mutex:
                self._charge(job.shares, time.monotonic() - started)
                self._is_running = False
            job.loop.call_soon_threadsafe(_settle, job, result, error)
            # The loop owns them now: references here would keep the last result alive until the next job.
            del job, result, error

    def _with_copies(self, result: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Wait for copies that were not taken: a result cannot be read before they are done."""
        _, lost = _outcome(self._transfers.wait)
        return (result, error) if error or lost is None else (None, lost)

    def _next(self) -> _Job:
        with self._mutex:
            self._is_running = True
            job, self._first = self._first, None
            return self._line.pop() if job is None else job

    def _charge(self, shares: Mapping[str, float], seconds: float) -> None:
        for flow, share in shares.items():
            self._use.add(flow, share * seconds)
        if self._line.count:
            for flow, share in shares.items():
                self._line.charge(flow, share * seconds)
        elif self._line.circle:
            self._line.forget()

    def _refuse_jobs(self) -> None:
        """Fail jobs submitted after the end; their callers would never get a result."""
        with suppress(Empty):
            while True:
                if self._signals.get_nowait():
                    job = self._next()
                    error = ServiceError(ErrorReason.SERVER_BUSY, "the server is shutting down")
                    with suppress(RuntimeError):  # its loop is closed
                        job.loop.call_soon_threadsafe(_settle, job, None, error)


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except StopIteration as raised:  # a future cannot hold it
        return None, RuntimeError(f"StopIteration: {raised.value}")
    except ServiceError as raised:
        raised.__context__ = raised.__cause__  # frames hold tensors
        return None, raised.with_traceback(None)
    except BaseException as raised:  # noqa: BLE001 - handed to the waiting task
        return None, raised


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, ServiceError):
        return error.reason is ErrorReason.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError)


async def _end_of(job: _Job) -> None:
    """Wait for the end of work that must not be abandoned, however often the waiting task is cancelled."""
    while not job.has_ended:
        job.future = job.loop.create_future()  # the cancelled one gets no result
        with suppress(asyncio.CancelledError):
            await asyncio.wait([job.future])
    if not job.future.cancelled():
        job.future.exception()


def _settle(job: _Job, result: Any, error: BaseException | None) -> None:
    job.has_ended, future = True, job.future
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def choose_device(name: str) -> torch.device:
    """Return the device for a configured name; `auto` is CUDA when available.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there is no such device.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(f"no device is called '{name[:80]}'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise _no_device(f"no device '{name}': PyTorch finds {torch.cuda.device_count()} CUDA GPUs")
    return device


def _no_device(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, f"{problem}; use auto, cpu or cuda:0")


class RecentUse:
    """Counts seconds by flow, and forgets those that are older than a minute.

        use = RecentUse()
        use.add("alice", 0.3)
        use.seconds()                    # {"alice": 0.3}

    Counts are kept in steps of 10 s, so the window has between 50 and 60 s. Not thread-safe.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, defaultdict[str, float]]] = deque(maxlen=WINDOW_S // _STEP_S)
        """Start of each step, as a multiple of its length, and its seconds by flow."""

    def add(self, flow: str, seconds: float) -> None:
        """Count seconds of a flow."""
        step = int(self._clock() // _STEP_S)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, defaultdict(float)))
        self._steps[-1][1][flow] += seconds

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each flow."""
        step = int(self._clock() // _STEP_S)
        while self._steps and self._steps[0][0] <= step - WINDOW_S // _STEP_S:
            self._steps.popleft()
        outcome: defaultdict[str, float] = defaultdict(float)
        for _, counts in self._steps:
            for flow, seconds in counts.items():
                outcome[flow] += seconds
        return outcome
