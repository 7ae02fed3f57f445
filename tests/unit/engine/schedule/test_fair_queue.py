"""Whose turn it is: shares, order, debts; against a line that a few lines of Python keep."""

from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.fair_queue import FairQueue, Ticket
from trocar_server.engine.schedule.shares import Shares

FLOWS = ("a", "b", "c")
COSTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 7.0, 64.0])
PUSH = st.tuples(st.sampled_from(FLOWS), COSTS, st.sampled_from(Priority))


def line(quantum: float = 1.0) -> FairQueue[str]:
    return FairQueue(quantum)


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_equal_items_of_two_flows_alternate() -> None:
    queue = line()
    for number in range(4):
        queue.push(f"a{number}", "a", 1.0)
    for number in range(2):
        queue.push(f"b{number}", "b", 1.0)
    assert drained(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_who_asks_once_is_next_whatever_others_have_waiting() -> None:
    queue = line()
    for number in range(200):
        queue.push(f"a{number}", "a", 1.0)
    queue.pop()
    queue.push("b", "b", 1.0)
    assert queue.pop() == "b"


def test_dear_items_come_as_seldom_as_their_cost_says() -> None:
    queue = line()
    for _ in range(200):
        queue.push("dear", "a", 10.0)
        queue.push("cheap", "b", 1.0)
    served = Counter(queue.pop() for _ in range(110))
    assert served == {"dear": 10, "cheap": 100}


def test_who_sends_one_dear_item_at_a_time_pays_for_it_all_the_same() -> None:
    queue = line()
    for _ in range(300):
        queue.push("cheap", "b", 1.0)
    queue.push("dear", "a", 10.0)
    served = []
    for _ in range(110):
        served.append(queue.pop())
        if served[-1] == "dear":
            queue.push("dear", "a", 10.0)
    assert Counter(served)["dear"] in (10, 11)


def test_a_debt_is_forgiven_where_nobody_waited() -> None:
    queue = line()
    queue.push("dear", "a", 1000.0)
    queue.pop()
    queue.forget()
    assert list(queue.flows()) == []
    queue.push("b0", "b", 1.0)
    queue.push("a0", "a", 1.0)
    queue.push("b1", "b", 1.0)
    assert drained(queue) == ["b0", "a0", "b1"]


def test_what_is_charged_afterwards_counts_as_if_it_had_been_known() -> None:
    queue = line()
    for _ in range(40):
        queue.push("a", "a", 0.0)
        queue.push("b", "b", 0.0)
    served: Counter[str] = Counter()
    for _ in range(44):
        item = queue.pop()
        served[item] += 1
        queue.charge(item, 10.0 if item == "a" else 1.0)
    assert served == {"a": 4, "b": 40}


def test_a_flow_gets_back_what_it_paid_too_much_but_no_credit_for_later() -> None:
    queue = line()
    queue.push("a0", "a", 50.0)
    queue.pop()
    queue.charge("a", -500.0)
    for number in range(1, 4):
        queue.push(f"a{number}", "a", 1.0)
        queue.push(f"b{number}", "b", 1.0)
    assert drained(queue) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_priorities_order_a_flows_own_items_only() -> None:
    queue = line()
    queue.push("a low", "a", 1.0, Priority.LOW)
    queue.push("a normal", "a", 1.0)
    queue.push("b normal", "b", 1.0)
    queue.push("b low", "b", 1.0, Priority.LOW)
    queue.push("a high", "a", 1.0, Priority.HIGH)
    assert drained(queue) == ["a high", "b normal", "a normal", "b low", "a low"]


def test_an_empty_line_has_nothing_to_give() -> None:
    with pytest.raises(IndexError):
        line().pop()


def test_an_item_is_removed_once() -> None:
    queue = line()
    ticket = queue.push("a", "a", 3.0)
    assert (queue.item(ticket), queue.cost) == ("a", 3.0)
    assert [queue.remove(ticket), queue.remove(ticket)] == [True, False]
    assert (queue.item(ticket), len(queue), queue.cost) == (None, 0, 0.0)


def test_a_full_line_has_the_place_of_the_last_item_of_the_longest_flow() -> None:
    queue = line()
    assert queue.place_for("c") is None
    queue.push("b", "b", 9.0)
    queue.push("a0", "a")
    queue.push("a low", "a", priority=Priority.LOW)
    queue.push("a1", "a")
    last = queue.place_for("c")
    assert last is not None
    assert queue.item(last) == "a low"
    assert queue.place_for("b") == last
    assert queue.place_for("a") is None


def test_the_head_is_what_is_popped_next() -> None:
    queue = line()
    assert queue.head() is None
    for number in range(6):
        queue.push(f"a{number}", "a", 3.0)
        queue.push(f"b{number}", "b", 1.0)
    assert all(queue.head() == queue.pop() for _ in range(12))


def test_a_debt_of_a_million_quanta_is_paid_off_in_a_few_visits() -> None:
    """One by one it would take seconds, with everybody waiting."""
    queue = line(quantum=1e-6)
    for flow in FLOWS:
        queue.push(flow, flow, 1e6)
        queue.push(flow, flow, 1e6)
    assert Counter(drained(queue)) == dict.fromkeys(FLOWS, 2)


def test_what_comes_before_a_call_is_its_own_and_as_much_of_each_other() -> None:
    queue = line()
    for _ in range(10):
        queue.push("a", "a", 1.0)
    queue.push("b", "b", 0.5)
    assert queue.cost_before("a", 1.0) == 10.5
    assert queue.cost_before("c", 1.0) == 1.5
    assert queue.cost_before("a", 1.0, Priority.HIGH) == 0.5


@given(st.lists(st.one_of(PUSH, st.just("pop"), st.integers(0, 30)), max_size=60))
def test_whatever_happens_every_item_comes_out_once_and_in_order_within_its_flow(
    steps: list[tuple[str, float, Priority] | str | int],
) -> None:
    """Work conserving: as long as something waits, `pop` gives something."""
    queue: FairQueue[int] = FairQueue(1.0)
    tickets: list[Ticket] = []
    waiting: dict[int, Ticket] = {}
    for step in [*steps, *["pop"] * 60]:
        if isinstance(step, tuple):
            flow, cost, priority = step
            number = len(tickets)
            waiting[number] = queue.push(number, flow, cost, priority)
            tickets.append(waiting[number])
        elif isinstance(step, int) and step < len(tickets):
            assert queue.remove(tickets[step]) is (waiting.pop(step, None) is not None)
        elif step == "pop" and waiting:
            served = queue.pop()
            own = {n: ticket for n, ticket in waiting.items() if ticket.flow == waiting[served].flow}
            assert served == min(own, key=lambda n: (-own[n].priority, n))
            del waiting[served]
        assert len(queue) == len(waiting)
        assert queue.cost == pytest.approx(sum(ticket.cost for ticket in waiting.values()))
    assert not waiting


@given(
    st.lists(st.lists(COSTS, min_size=1, max_size=5), min_size=2, max_size=5),
    st.sampled_from([0.25, 1.0, 8.0, 64.0]),
)
def test_flows_that_always_wait_get_equal_shares(costs: list[list[float]], quantum: float) -> None:
    """Within two quanta and one item, at any time, whatever their items cost; so nobody starves."""
    queue: FairQueue[tuple[int, float]] = FairQueue(quantum)
    served = [0.0] * len(costs)
    coming = [cycle(own) for own in costs]

    def push(number: int) -> None:
        cost = next(coming[number])
        queue.push((number, cost), str(number), cost)

    for number in [*range(len(costs)), *range(len(costs))]:
        push(number)
    for _ in range(400):
        number, cost = queue.pop()
        served[number] += cost
        push(number)
        assert max(served) - min(served) <= 2 * quantum + max(map(max, costs))


@given(st.lists(st.tuples(st.sampled_from(FLOWS), COSTS), min_size=1, max_size=40), st.floats(1e-6, 100))
def test_the_order_does_not_depend_on_how_rounds_are_counted(
    pushes: list[tuple[str, float]], quantum: float
) -> None:
    """Rounds that are skipped at once are as rounds that are gone through one by one."""
    queue, plain = FairQueue[int](quantum), _OneByOne(quantum)
    for number, (flow, cost) in enumerate(pushes):
        queue.push(number, flow, cost)
        plain.push(number, flow, cost)
    if max(cost for _, cost in pushes) / quantum > 10_000:
        assert sorted(queue.pop() for _ in pushes) == list(range(len(pushes)))
        return
    assert [queue.pop() for _ in pushes] == [plain.pop() for _ in pushes]


class _OneByOne:
    """The rule in its plainest form, for items that are all there at the start."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._circle: list[str] = []
        self._credit: dict[str, float] = {}
        self._items: dict[str, list[tuple[int, float]]] = {}

    def push(self, item: int, flow: str, cost: float) -> None:
        if flow not in self._items:
            self._circle.append(flow)
            self._credit[flow], self._items[flow] = self._quantum, []
        self._items[flow].append((item, cost))

    def pop(self) -> int:
        while True:
            flow = self._circle[0]
            if self._credit[flow] > 1e-9 * self._quantum and self._items[flow]:
                item, cost = self._items[flow].pop(0)
                self._credit[flow] -= cost
                return item
            self._circle.append(self._circle.pop(0))
            if self._credit[flow] <= 1e-9 * self._quantum:
                self._credit[flow] += self._quantum


def beside_texts(head_start: float) -> FairQueue[str]:
    """Return a line in which eight flows have a step each, and have had some."""
    queue: FairQueue[str] = FairQueue(1.0, head_start)
    for number in range(8):
        queue.push(f"t{number}", f"t{number}", 1.0, is_step=True)
    for _ in range(20):
        text = queue.pop()
        queue.push(text, text, 1.0, is_step=True)
    return queue


def waits(queue: FairQueue[str], count: int, *, together: bool = False) -> list[int]:
    """Return behind how many steps each of the passes comes that a flow asks for, one after the other."""
    result = []
    flow = "t3" if together else "a"
    for _ in range(count):
        queue.push("pass", flow, 1.0)
        result.append(0)
        while (item := queue.pop()) != "pass":
            queue.push(item, item, 1.0, is_step=True)
            result[-1] += 1
        text = queue.pop()  # runs while the reply is on its way
        queue.push(text, text, 1.0, is_step=True)
    return result


def test_a_pass_now_and_then_is_next_beside_eight_texts() -> None:
    queue = beside_texts(head_start=10.0)
    assert waits(queue, 12)[:9] == [0] * 9


def test_who_goes_on_asking_gets_a_share_beside_eight_texts_and_no_more() -> None:
    queue = beside_texts(head_start=10.0)
    waits(queue, 60)
    assert 8 * 30 * 0.7 < sum(waits(queue, 30)) < 8 * 30


def test_a_pass_beside_texts_of_its_own_flow_waits_for_one_step() -> None:
    queue: FairQueue[str] = FairQueue(1.0, 10.0)
    for number in range(8):
        queue.push(f"t{number}", "a", 1.0, is_step=True)
    for _ in range(3):
        queue.pop()
    queue.push("pass 0", "a", 1.0)
    queue.push("pass 1", "a", 1.0)
    assert drained(queue) == ["pass 0", "t3", "pass 1", "t4", "t5", "t6", "t7"]


def test_a_pass_is_expected_when_it_comes() -> None:
    queue = beside_texts(head_start=10.0)
    assert queue.cost_before("a", 1.0) == 1.0
    assert queue.cost_before("a", 1.0, is_step=True) == 8.0
    assert beside_texts(head_start=0.0).cost_before("a", 1.0) == 8.0


@given(st.lists(COSTS, min_size=1, max_size=5), st.lists(COSTS, min_size=1, max_size=5), st.integers(1, 9))
def test_a_head_start_is_the_most_that_a_flow_gets_beyond_its_share(
    passes: list[float], steps: list[float], texts: int
) -> None:
    head_start = 20.0
    queue: FairQueue[tuple[str, float]] = FairQueue(1.0, head_start)
    coming = {"a": cycle(passes)} | {f"t{number}": cycle(steps) for number in range(texts)}

    def push(flow: str) -> None:
        cost = next(coming[flow])
        queue.push((flow, cost), flow, cost, is_step=flow != "a")

    for flow in [*coming, *coming]:
        push(flow)
    served = dict.fromkeys(coming, 0.0)
    for _ in range(1000):
        flow, cost = queue.pop()
        served[flow] += cost
        push(flow)
    least = min(count for flow, count in served.items() if flow != "a")
    of_circle = 2 + max(*passes, *steps)
    most = head_start + max(passes) + of_circle
    assert served["a"] - least <= most * (texts + 1) / texts + of_circle
    assert least - served["a"] <= of_circle


@pytest.mark.parametrize("head_start", [0.0, 10.0])
def test_nothing_is_kept_of_flows_that_are_gone(head_start: float) -> None:
    queue: FairQueue[str] = FairQueue(1.0, head_start)
    for number in range(1000):
        queue.push("step", f"{number}", 1.0, is_step=True)
        queue.push("single", f"{number}", 1.0)
        removed = queue.push("removed", f"{number}", 1.0)
        assert queue.remove(removed)
        queue.pop()
        queue.pop()
        queue.charge(f"{number}", 1.0)
        queue.forget()
    assert not queue.circle
    assert not queue._singles
    assert len(queue._shares._had) < 100


def test_who_came_long_ago_is_forgotten() -> None:
    shares = Shares(most=10.0)
    for number in range(1000):
        shares.spend(f"{number}", 1.0, waiting=2)
    assert shares.behind("0") == 10.0
    assert shares.behind("999") == 9.5
    assert len(shares._had) < 100


def test_an_item_out_of_turn_is_paid_for_later() -> None:
    queue = line()
    for number in range(4):
        queue.push(f"a{number}", "a", 1.0)
        queue.push(f"b{number}", "b", 1.0)
    assert [queue.head("b"), queue.pop("b"), queue.pop("b")] == ["b0", "b0", "b1"]
    rest = drained(queue)
    assert rest.index("b2") >= 2  # the other flow has had as many by then
    assert [item for item in rest if item.startswith("b")] == ["b2", "b3"]
    assert queue.head("b") is None
    with pytest.raises(IndexError):
        queue.pop("b")
