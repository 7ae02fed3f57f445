"""Replica leases: one pass at a time on each replica, fair between callers."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.admission import PassThroughput
from trocar_server.engine.schedule.fair_queue import FairQueue, Ticket
from trocar_server.engine.schedule.pace import Pace
from trocar_server.errors import ServiceError, busy
from trocar_server.models import Pristine, current_flow, make_replica

# The wait for a replica ends before the call's deadline, or "busy" would show as a deadline error.
_WAIT_SHARE = 0.9
_LEAST_COST_S = 1e-6
_HEAD_START_S = 2.0
"""The most computing that a flow which has had less than its share gets beyond its turns."""
_Turn = asyncio.Future["Replica"]
_VERSION = attrgetter("_version")
_ADDRESS = Tensor.data_ptr
_END = object()
_VALUES: Callable[[dict[str, Any]], Iterable[object]] = dict.values
Result = TypeVar("Result")


class StateWrittenError(ServiceError):
    """A pass wrote to shared tensors that it was not known to write to. They were put back: run it again."""

    def __init__(self) -> None:
        message = "the model was just seen to write to its own tensors, which were put back; try again"
        super().__init__(ErrorReason.SERVER_BUSY, message)


class Replica:
    """A module tree over the model's weights, without hooks while no pass runs.

        with replica.passing() as module:
            module(*arguments)

    Args:
        pristine: The model.
        is_live: Whether its weights change between passes.
        module: The tree, for a single pass after which it is dropped; one of its own when None.
    """

    def __init__(self, pristine: Pristine, is_live: bool = False, module: nn.Module | None = None) -> None:
        self.pristine = pristine
        self.is_live = is_live
        self._is_single = module is not None
        self._use(make_replica(pristine.module) if module is None else module)

    def _renew(self) -> None:
        with torch.inference_mode(mode=False):  # else it could keep no tensor for a pass with gradients
            self._use(make_replica(self.pristine.module))

    def _use(self, module: nn.Module) -> None:
        self.module = module
        self._tables = [table for part in module.modules() for table in (part._parameters, part._buffers)]
        self._entries = [*chain.from_iterable(map(_VALUES, self._tables)), _END]

    @contextmanager
    def passing(self, *, is_changed: bool = False) -> Iterator[nn.Module]:
        """Lend the tree for one pass, and undo what the pass writes to parameters and buffers.

        See Note: [What a pass writes] in `models.pristine`.

        Args:
            is_changed: Whether the pass has edits or gradients.

        Raises:
            StateWrittenError: The pass, which had no other error, has to run again.
            ServiceError: `MODEL_INVALID`, an earlier pass has left the model in a state that is not its own.
        """
        pristine = self.pristine
        if pristine.refusal:
            raise ServiceError(ErrorReason.MODEL_INVALID, pristine.refusal)
        is_kept = pristine.keeps_tensors and (is_changed or pristine.is_shared)
        is_renewed = (pristine.is_renewed or is_kept) and not self._is_single
        tensors = pristine.tensors
        if list(map(_VERSION, tensors)) != pristine.versions:
            pristine.refresh()
        try:
            yield pristine.tree() if is_renewed else self.module
        finally:
            written: Collection[str] = ()
            is_whole = list(map(_VERSION, tensors)) == pristine.versions
            if not is_whole or list(map(_ADDRESS, tensors)) != pristine.addresses:
                written = pristine.put_back()
            entries = chain(chain.from_iterable(map(_VALUES, self._tables)), (_END,))
            if written or not all(map(is_, entries, self._entries)):
                self._renew()
        if written:
            raise StateWrittenError

    def run(self, work: Callable[[nn.Module], Result]) -> Result:
        """Call `work` on the lent tree, and again where its pass was the first to be seen to write.

        `work` must not change what it takes.
        """
        while True:
            with suppress(StateWrittenError), self.passing() as module:
                return work(module)


@dataclass(frozen=True)
class LeaseRequest:
    """Request for a lease.

    Attributes:
        flow: The flow that is charged; see `current_flow`.
        rows: Samples of the batch, from which its time is estimated.
        priority: Order among the flow's own calls.
        is_step: Whether it is one of many steps of a run; see Note: [A caller that asks now and then].
    """

    flow: str
    rows: int = 1
    priority: Priority = Priority.NORMAL
    is_step: bool = False


class ReplicaPool:
    """Lends the replicas of one model.

        async with pool.lease(deadline, rows=8) as replica:
            ...

    When calls wait, every flow gets the same share of the time, and within a flow the first call goes first;
    see `FairQueue`. A full queue admits a call of a flow with few calls in place of the last one of the flow
    with the most, which is then refused.

    Args:
        replicas: The replicas to lease.
        max_queue: The most waiting calls; one more is refused at once.

    Attributes:
        throughput: Seconds for each row, learnt from finished leases.
        pace: Multiply-adds in a second, learnt from finished passes.
        used_at_s: End of the last lease, in seconds since 1970; before the first, when the pool was made.
    """

    def __init__(self, replicas: Sequence[Replica], max_queue: int) -> None:
        self._free = deque(replicas)
        self._line: FairQueue[_Turn] = FairQueue(PassThroughput().seconds(), _HEAD_START_S)
        self._ends: dict[int, float] = {}
        """By lease, its expected end, as a time of `time.monotonic()`."""
        self._unpaid: dict[int, tuple[str, float]] = {}
        """By lease, flow and cost of those that nobody has waited behind yet: these are not charged."""
        self._count = len(replicas)
        self._max_queue = max_queue
        self._is_closed = False
        self._run_count = 0
        self._at_rest: asyncio.Event = asyncio.Event()
        self.throughput = PassThroughput()
        self.pace = Pace()
        self.used_at_s = time.time()

    @property
    def free(self) -> Sequence[Replica]:
        """The replicas that no call leases, next first."""
        return tuple(self._free)

    @property
    def leased_count(self) -> int:
        """Number of replicas leased now."""
        return self._count - len(self._free)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return self._count

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait for a replica."""
        return len(self._line)

    @property
    def pending_s(self) -> float:
        """Estimated seconds of computing that running and waiting calls still need."""
        return self._running_s() + self._line.cost

    def waiting_counts(self) -> dict[str, int]:
        """Return the number of waiting calls by flow."""
        return {flow: count for flow, count in self._line.flows() if count}

    @contextmanager
    def run(self) -> Iterator[None]:
        """Keep the pool for the steps of a run: `drain` waits until the context ends.

        Raises:
            ServiceError: `MODEL_NOT_LOADED`, the pool is drained.
        """
        if self._is_closed:
            raise _unloaded()
        self._run_count += 1
        try:
            yield
        finally:
            self._run_count -= 1
            self._rest()

    @asynccontextmanager
    async def lease(
        self,
        deadline: float | None,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        flow: str | None = None,
        is_step: bool = False,
    ) -> AsyncIterator[Replica]:
        """Lease a replica until the context ends.

        Args:
            deadline: The call's, as a time of `time.monotonic()` in seconds; None waits without
                limit.
            rows: Samples of the batch; the cost is estimated from the model's throughput so far.
            priority: Order among the flow's own calls.
            flow: The flow that is charged; that of the current call when None.
            is_step: Whether it is for some steps of a run that is open, whose throughput its caller observes.

        Raises:
            ServiceError: `SERVER_BUSY` when the queue is full, no replica was free in time, or none is
                expected to be; `MODEL_NOT_LOADED` when the pool was drained.
        """
        request = LeaseRequest(current_flow() if flow is None else flow, rows, priority, is_step)
        cost = max(self.throughput.seconds(rows), _LEAST_COST_S)
        if self._free and (is_step or not self._is_closed):
            replica = self._free.popleft()
            self._unpaid[id(request)] = request.flow, cost
        else:
            replica = await self._wait(request, cost, deadline)
        started = time.monotonic()
        self._ends[id(request)] = started + cost
        is_whole = False
        try:
            yield replica
            is_whole = True
        finally:
            del self._ends[id(request)]
            took_s = time.monotonic() - started
            self.used_at_s = time.time()
            if is_whole and not is_step:
                self.throughput.observe(rows, took_s)
            paid_s = 0.0 if self._unpaid.pop(id(request), None) else cost
            self._give_back(replica, request.flow, took_s - paid_s)

    def check(self, deadline: float | None, rows: int = 1, priority: Priority = Priority.NORMAL) -> None:
        """Refuse a call that `lease` would refuse now, before its bytes are received; reserves nothing.

        Raises:
            ServiceError: `SERVER_BUSY`, as `lease`.
        """
        if not self._free:
            request = LeaseRequest(current_flow(), rows, priority)
            self._refuse_late(request, patience(deadline))
            self._place_for(request)

    async def drain(self) -> None:
        """Refuse new calls, serve the waiting ones and runs, and return when every replica is returned."""
        self._is_closed = True
        self._rest()
        await self._at_rest.wait()

    def wait_s(self, request: LeaseRequest) -> float:
        """Return about how long a call would wait if it arrived now, in seconds."""
        if self._free:
            return 0.0
        self._charge_leases()
        cost = self.throughput.seconds(request.rows)
        before = self._line.cost_before(request.flow, cost, request.priority, is_step=request.is_step)
        return (self._running_s() + before) / self._count

    def _running_s(self) -> float:
        now = time.monotonic()
        return sum(max(0.0, end - now) for end in self._ends.values())

    def _charge_leases(self) -> None:
        """Charge the running leases: a call is about to wait behind them."""
        for flow, cost in self._unpaid.values():
            self._line.charge(flow, cost)
        self._unpaid.clear()

    async def _wait(self, request: LeaseRequest, cost: float, deadline: float | None) -> Replica:
        if self._is_closed and not request.is_step:
            raise _unloaded()
        patience_s = patience(deadline)
        self._refuse_late(request, patience_s)
        self._make_room(request)
        try:
            return await self._next(request, cost, patience_s)
        except TimeoutError:
            raise self._busy(request, f"no replica was free within {patience_s:.3g} s") from None

    def _refuse_late(self, request: LeaseRequest, patience_s: float | None) -> None:
        expected_s = self.wait_s(request)
        if patience_s is not None and self.throughput.is_known and expected_s > patience_s:
            raise self._busy(
                request,
                f"about {expected_s:.3g} s of work wait before this call, which can wait only "
                f"{patience_s:.3g} s",
            )

    def _place_for(self, request: LeaseRequest) -> Ticket | None:
        """Return the ticket that a call would replace in a full queue: the last of the flow with the most.

        Raises:
            ServiceError: `SERVER_BUSY`, there is none.
        """
        if len(self._line) < self._max_queue:
            return None
        last = self._line.place_for(request.flow)
        if last is None:
            raise self._busy(request, f"{len(self._line)} calls already wait for this model")
        return last

    def _make_room(self, request: LeaseRequest) -> None:
        last = self._place_for(request)
        turn = self._line.item(last) if last else None
        if last is None or turn is None:
            return
        self._line.remove(last)
        if not turn.done():
            problem = (
                f"{self._max_queue} calls wait for this model, most of them yours; others share the queue"
            )
            turn.set_exception(self._busy(LeaseRequest(last.flow, priority=last.priority), problem))

    async def _next(self, request: LeaseRequest, cost: float, patience_s: float | None) -> Replica:
        """Wait in the queue for a replica."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        ticket = self._line.push(turn, request.flow, cost, request.priority, is_step=request.is_step)
        try:
            async with asyncio.timeout(patience_s):
                return await turn
        except BaseException:
            if not self._line.remove(ticket):
                self._return(turn, request.flow, cost)
            self._rest()
            raise

    def _return(self, turn: _Turn, flow: str, cost: float) -> None:
        """Return a replica that was assigned just when the wait ended."""
        if turn.cancelled():
            self._line.charge(flow, -cost)
        elif turn.exception() is None:
            self._give_back(turn.result(), flow, -cost)

    def _give_back(self, replica: Replica, flow: str, unpaid_s: float) -> None:
        """Charge a flow what its lease has not paid yet, and lend the replica to the next call."""
        if self._line.count:
            self._line.charge(flow, unpaid_s)
        while waiting := self._line.count:
            self._line.quantum = self._line.cost / waiting
            turn = self._line.pop()
            if not turn.done():
                turn.set_result(replica)
                return
        self._free.append(replica)
        self._unpaid.clear()
        if self._line.circle:
            self._line.forget()
        if self._is_closed:
            self._rest()

    def _rest(self) -> None:
        is_idle = not self._line and not self._run_count and len(self._free) == self._count
        if self._is_closed and is_idle:
            self._at_rest.set()

    def _busy(self, request: LeaseRequest, problem: str) -> ServiceError:
        return busy(f"{problem}; try again later", self.wait_s(request))


def _unloaded() -> ServiceError:
    return ServiceError(ErrorReason.MODEL_NOT_LOADED, "the model was unloaded; load it first")


def patience(deadline: float | None) -> float | None:
    """Return how long a call can wait for its turn, in seconds; None without limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
