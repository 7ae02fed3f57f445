"""Fair queue between flows: deficit round robin by cost. Plain data, bound to no thread or loop.

# Note: [Deficit round robin]
Waiting flows form a circle. The flow whose turn it is takes items while its credit is above zero; each item
is charged its full cost, so an expensive one leaves a debt. Then the next flow has its turn, and the previous
one gets one quantum of credit, which pays off debts: over time all waiting flows get the same cost, for any
mix of items. A flow with a debt keeps its place in the circle when it has no waiting item left; otherwise a
flow that sends one expensive item at a time would never pay. Credit above zero is not kept.

That is round robin with the deficit paid afterwards: an expensive item of a flow that has waited need not
wait for many rounds, and the cost of an item need only be known when it is done (`charge`).

# Note: [A caller that asks now and then]
With a step of eight texts in the circle, a flow that asks for one pass would wait for eight steps, though it
has had nothing for minutes. So while steps wait, every second turn, outside of the circle, belongs to the
flows with a single item (one that is no step) that have had less than their share lately. What they had less
is counted up to `head_start`, and used up by what they get: over time all waiting flows still get the same
cost, and a flow that comes back delays the others by at most that much. Within a flow, single items and steps
of one priority take turns for the same reason.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.shares import Shares

Item = TypeVar("Item")
_Line = OrderedDict[int, tuple["Ticket", Item]]
_NUMBER: Callable[["Ticket"], int] = attrgetter("number")
_HIGHEST_FIRST = tuple(reversed(Priority))


@dataclass(frozen=True)
class Ticket:
    """Handle of a waiting item, for its removal."""

    number: int
    flow: str
    priority: Priority
    cost: float
    is_step: bool


@dataclass
class _Flow(Generic[Item]):
    credit: float
    is_spent: bool = False
    """Whether its turn is over, even if it gets a refund before the next."""
    lines: dict[tuple[Priority, bool], "_Line[Item]"] = field(default_factory=dict)
    """The items that it has had, by priority, and whether they are steps."""
    was_step: bool = True
    """Whether its last item was a step."""
    count: int = 0
    cost: float = 0.0

    def first(self) -> "_Line[Item]":
        """Return the queue whose head is next."""
        for priority in _HIGHEST_FIRST:
            for is_step in (not self.was_step, self.was_step):
                if line := self.lines.get((priority, is_step)):
                    return line
        raise IndexError("the queue is empty")

    def single(self) -> "_Line[Item] | None":
        """Return the queue whose head is the next item that is no step; None without one."""
        lines = (self.lines.get((priority, False)) for priority in _HIGHEST_FIRST)
        return next(filter(None, lines), None)

    def last(self) -> Ticket:
        """Return the ticket that would be served last."""
        lowest = min(priority for (priority, _), line in self.lines.items() if line)
        lines = (self.lines.get((lowest, is_step)) for is_step in (True, False))
        return max((next(reversed(line.values()))[0] for line in lines if line), key=_NUMBER)


class _Turn(NamedTuple, Generic[Item]):
    """A flow, the queue of its whose head is next, and whether that is outside of the circle."""

    own: _Flow[Item]
    line: "_Line[Item]"
    is_extra: bool


class FairQueue(Generic[Item]):
    """Queue of items of several flows, served so that every flow gets its share.

        line: FairQueue[str] = FairQueue(quantum=1.0)
        ticket = line.push("work", flow="alice", cost=0.3)
        line.remove(ticket)                     # true: it was still there
        line.pop()

    Within a flow, items of a higher priority go first, and equal ones in order of arrival. Every
    operation except `place_for` and `cost_before` takes constant time on average.

    Args:
        quantum: The credit of each flow per round; the cost of a typical item keeps turns short and few.
        head_start: The most cost that a flow which has had less than its share gets beyond its turns.

    Attributes:
        quantum: May be changed at any time.
        count: Number of all items.
        circle: Flows with items or debts, in the order of their turns; not to be changed.
    """

    def __init__(self, quantum: float, head_start: float = 0.0) -> None:
        self.quantum = quantum
        self.count = 0
        self.circle: OrderedDict[str, _Flow[Item]] = OrderedDict()
        self._numbers = count()
        self._cost = 0.0
        self._shares = Shares(head_start)
        self._singles: OrderedDict[str, None] = OrderedDict()
        """Flows that may have turns outside of the circle, in the order of these."""
        self._step_count = 0
        """Items that are steps."""
        self._was_extra = False
        """Whether the last turn was outside of the circle."""

    def __len__(self) -> int:
        return self.count

    @property
    def cost(self) -> float:
        """The total cost of all items."""
        return self._cost

    def push(
        self,
        item: Item,
        flow: str,
        cost: float = 0.0,
        priority: Priority = Priority.NORMAL,
        *,
        is_step: bool = False,
    ) -> Ticket:
        """Add an item at the end of its flow's queue.

        Args:
            item: What waits.
            flow: Its flow.
            cost: What it takes, in the unit of `quantum`.
            priority: Order within the flow.
            is_step: Whether it is one of many steps of a run; see Note: [A caller that asks now and then].
        """
        own = self.circle.get(flow)
        if own is None:
            own = self.circle[flow] = _Flow(self.quantum)
        ticket = Ticket(next(self._numbers), flow, priority, cost, is_step)
        own.lines.setdefault((priority, is_step), OrderedDict())[ticket.number] = (ticket, item)
        self._add(own, 1, cost)
        self._step_count += is_step
        if not is_step:
            self._singles[flow] = None
        return ticket

    def head(self, flow: str | None = None) -> Item | None:
        """Return the next item, or the next one of a flow, without removing it; None without one."""
        if not (self.count if flow is None else self.count_of(flow)):
            return None
        return next(iter(self._next(flow).line.values()))[1]

    def pop(self, flow: str | None = None) -> Item:
        """Remove and return the next item, or that of a flow out of turn, which is paid for later.

        Raises:
            IndexError: The queue is empty, or the flow has no item.
        """
        if not (self.count if flow is None else self.count_of(flow)):
            raise IndexError("the queue is empty")
        own, line, is_extra = self._next(flow)
        _, (ticket, item) = line.popitem(last=False)
        self._shares.spend(ticket.flow, ticket.cost, len(self.circle))
        self._add(own, -1, -ticket.cost)
        self._step_count -= ticket.is_step
        own.was_step = ticket.is_step
        self._was_extra = is_extra
        if is_extra:
            self._singles.move_to_end(ticket.flow)
        else:
            own.credit -= ticket.cost
            own.is_spent = own.credit <= 0
        if not own.count:
            self._drop(ticket.flow, own)
        return item

    def remove(self, ticket: Ticket) -> bool:
        """Remove an abandoned item, at no cost; false where it is gone already."""
        own = self.circle.get(ticket.flow)
        line = own.lines.get((ticket.priority, ticket.is_step)) if own else None
        if own is None or line is None or line.pop(ticket.number, None) is None:
            return False
        self._add(own, -1, -ticket.cost)
        self._step_count -= ticket.is_step
        self._drop(ticket.flow, own)
        return True

    def charge(self, flow: str, cost: float) -> None:
        """Charge a flow for finished work, or refund it when negative."""
        own = self.circle.get(flow)
        if own is None:
            if cost <= 0:
                return
            own = self.circle[flow] = _Flow(self.quantum)
        own.credit = min(own.credit - cost, self.quantum)
        self._shares.spend(flow, cost, len(self.circle))
        self._drop(flow, own)

    def forget(self) -> None:
        """Cancel all debts of flows that have nothing waiting: there was no contention."""
        for flow, own in tuple(self.circle.items()):
            if not own.count:
                self._forget(flow)

    def count_of(self, flow: str) -> int:
        """Return the number of a flow's waiting items."""
        own = self.circle.get(flow)
        return own.count if own else 0

    def place_for(self, flow: str) -> Ticket | None:
        """Return the ticket that an item of a flow replaces in a full queue; None without one.

        The last one of the flow with the most items, if that flow still has at least as many afterwards.
        """
        own = max(self.circle.values(), key=lambda other: other.count, default=None)
        if own is None or own.count <= self.count_of(flow) + 1:
            return None
        return own.last()

    def item(self, ticket: Ticket) -> Item | None:
        """Return the waiting item of a ticket; None where it is gone."""
        own = self.circle.get(ticket.flow)
        line = own.lines.get((ticket.priority, ticket.is_step)) if own else None
        result = line.get(ticket.number) if line else None
        return result[1] if result else None

    def cost_before(
        self, flow: str, cost: float, priority: Priority = Priority.NORMAL, *, is_step: bool = False
    ) -> float:
        """Return about the cost that is served before an item that would arrive now.

        All waiting items of its own flow with its priority or a higher one; of each other flow the same cost,
        or all that it has. Where the flow is behind, every second turn is its: as much of all others in sum.
        """
        own = self.circle.get(flow)
        lines = own.lines.items() if own else ()
        of_own = sum(ticket.cost for (of, _), line in lines if of >= priority for ticket, _ in line.values())
        debt = max(0.0, -own.credit) if own else 0.0
        share = of_own + debt + cost
        others = (other.cost for name, other in self.circle.items() if name != flow)
        of_others = sum(min(each, share) for each in others)
        if not is_step and self._step_count and self._shares.behind(flow) > 0:
            of_others = min(of_others, share)
        return of_own + of_others

    def flows(self) -> Iterator[tuple[str, int]]:
        """Yield every flow with its number of waiting items, flows that only have debts included."""
        for flow, own in self.circle.items():
            yield flow, own.count

    def _next(self, flow: str | None) -> "_Turn[Item]":
        """Return whose turn it is; that of a flow, if one is given."""
        if flow is not None:
            own = self.circle[flow]
            return _Turn(own, own.first(), False)
        if (extra := self._extra()) is not None:
            return extra
        own = self._turn()
        return _Turn(own, own.first(), False)

    def _extra(self) -> "_Turn[Item] | None":
        """Return a turn outside of the circle; None where none is due."""
        while self._singles and self._step_count and not self._was_extra:
            flow = next(iter(self._singles))
            own = self.circle[flow]
            line = own.single()
            if line and self._shares.behind(flow) > 0:
                return _Turn(own, line, True)
            del self._singles[flow]
        return None

    def _turn(self) -> _Flow[Item]:
        """Advance the circle to the next flow that has both credit and items."""
        visits = 0
        while True:
            flow, own = next(iter(self.circle.items()))
            if own.credit > 0 and not own.is_spent and own.count:
                return own
            own.credit = min(own.credit + self.quantum, self.quantum)
            own.is_spent = False
            self.circle.move_to_end(flow)
            self._drop(flow, own)
            visits += 1
            if visits >= len(self.circle):
                self._skip_rounds()
                visits = 0

    def _skip_rounds(self) -> None:
        """Advance at once by the rounds in which every flow would be skipped."""
        richest = max(own.credit for own in self.circle.values() if own.count)
        rounds = math.floor(-richest / self.quantum)
        if richest > 0 or rounds <= 0:
            return
        for flow, own in list(self.circle.items()):
            own.credit = min(own.credit + rounds * self.quantum, self.quantum)
            self._drop(flow, own)

    def _add(self, own: _Flow[Item], items: int, cost: float) -> None:
        own.count += items
        self.count += items
        # Sums of floats drift: where nothing waits, nothing costs.
        own.cost = own.cost + cost if own.count else 0.0
        self._cost = self._cost + cost if self.count else 0.0

    def _drop(self, flow: str, own: _Flow[Item]) -> None:
        """Remove a flow that has neither items nor debts."""
        if not own.count and own.credit > 0:
            self._forget(flow)

    def _forget(self, flow: str) -> None:
        del self.circle[flow]
        self._singles.pop(flow, None)
