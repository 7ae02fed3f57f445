"""Who is let in, what fits, and that everything is given back."""

from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_server.cgroup_memory import memory_limit_bytes
from trocar_server.config import Limits
from trocar_server.engine.schedule.admission import (
    Admission,
    MethodClass,
    PassThroughput,
    Reservation,
    with_budgets,
)
from trocar_server.errors import ServiceError

EXTRACT, STREAM, DATA = MethodClass.EXTRACT, MethodClass.STREAM, MethodClass.DATA
NOTHING = (0, 0.0, 0)


def admission(total: int = 1000, own: int = 400, total_s: float = 100.0, own_s: float = 10.0) -> Admission:
    return Admission(
        Limits(max_pending_bytes=total, max_principal_bytes=own, max_pending_s=total_s, max_principal_s=own_s)
    )


def test_bytes_come_back_when_a_call_ends() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as held:
        held.reserve(300)
        held.expect(2.0)
        assert gate.reserved() == gate.reserved("alice") == gate.reserved(kind=EXTRACT) == (300, 2.0, 1)
    assert gate.reserved() == gate.reserved("alice") == gate.reserved(kind=EXTRACT) == NOTHING


def test_bytes_come_back_when_a_call_fails() -> None:
    gate = admission()
    with suppress(KeyError), gate.admit(EXTRACT, "alice") as held:
        held.reserve(300)
        held.expect(2.0)
        raise KeyError
    assert gate.reserved() == NOTHING


def test_what_does_not_fit_now_is_told_what_would() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as one, gate.admit(EXTRACT, "alice") as other:
        one.reserve(300)
        one.expect(6.0)
        with pytest.raises(ServiceError, match="needs 200 bytes of memory and 100 are free") as caught:
            other.reserve(200, rows=8)
        assert "a batch of 4 at most" in caught.value.message
        assert other.byte_count == 0
    assert caught.value.reason is ErrorReason.SERVER_BUSY
    assert caught.value.retry_after_s == 3.0
    assert caught.value.details == {"method_class": "extract", "free_bytes": "100", "fitting_rows": "4"}


def test_what_never_fits_is_not_told_to_come_again() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as held:
        held.reserve(300)
        with pytest.raises(ServiceError, match="take 500 bytes together") as caught:
            held.reserve(200, rows=8)
    assert "may have 400 at once; send a batch of 6 at most" in caught.value.message
    assert caught.value.reason is ErrorReason.REQUEST_TOO_LARGE
    assert caught.value.retry_after_s is None


def test_only_bytes_that_come_back_are_worth_waiting_for() -> None:
    gate = admission()
    with gate.admit(STREAM, "alice") as held:
        held.reserve(300)
        with pytest.raises(ServiceError, match="100 are free for it") as caught:
            held.reserve(200, kept_bytes=200)
        assert caught.value.reason is ErrorReason.SERVER_BUSY
        with pytest.raises(ServiceError, match="take 401 bytes together") as caught:
            held.reserve(200, kept_bytes=201)
        assert caught.value.reason is ErrorReason.REQUEST_TOO_LARGE


def refusal(stream: Reservation, byte_count: int) -> ErrorReason | None:
    """Ask for bytes as a stream that has nothing ready; return why they were refused."""
    try:
        stream.reserve(byte_count, kept_bytes=stream.byte_count, may_overdraw=True)
    except ServiceError as error:
        return error.reason
    return None


def test_one_stream_at_a_time_exceeds_the_budget_of_its_caller() -> None:
    gate = admission()
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(gate.admit(STREAM, "alice")) for _ in range(3))
        for stream in (first, second, third):
            stream.reserve(130)
        assert refusal(first, 271) is ErrorReason.REQUEST_TOO_LARGE
        assert refusal(first, 200) is None
        assert gate.reserved("alice")[0] == 590
        assert [refusal(third, 200), refusal(second, 200)] == [ErrorReason.SERVER_BUSY] * 2
        with gate.admit(STREAM, "bob") as other:
            assert refusal(other, 100) is None  # there is room for it
        first.add(-200)
        first.end_overdraft()
        assert [refusal(first, 200), refusal(second, 200)] == [ErrorReason.SERVER_BUSY] * 2  # not their turn
        assert refusal(third, 200) is None
    assert gate.reserved() == NOTHING
    assert not gate.overdrafts


def test_a_caller_that_exceeds_its_own_budget_keeps_no_other_from_it() -> None:
    gate = admission(total=2000)
    with ExitStack() as stack:
        alice, alices, bob, bobs = (
            stack.enter_context(gate.admit(STREAM, flow)) for flow in ("alice", "alice", "bob", "bob")
        )
        for stream in (alice, alices, bob, bobs):
            stream.reserve(150)
        assert [refusal(each, 200) for each in (alice, bob)] == [None, None]
        assert [refusal(each, 200) for each in (alices, bobs)] == [ErrorReason.SERVER_BUSY] * 2


def test_streams_of_several_callers_exceed_the_total_one_at_a_time() -> None:
    gate = admission(total=400, own=400)  # 300 for streams
    with gate.admit(STREAM, "alice") as alice, gate.admit(STREAM, "bob") as bob:
        alice.reserve(150)
        bob.reserve(150)
        assert [refusal(alice, 150), refusal(bob, 150)] == [None, ErrorReason.SERVER_BUSY]
        alice.end()
        alice.end_overdraft()
        assert refusal(bob, 150) is None


def test_a_call_that_may_not_exceed_the_budgets_is_refused_as_before() -> None:
    gate = admission()
    with gate.admit(STREAM, "alice") as stream, gate.admit(EXTRACT, "alice") as call:
        stream.reserve(300)
        with pytest.raises(ServiceError, match="100 are free for it"):
            call.reserve(200)
        call.reserve(100)
        assert not gate.overdrafts


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.integers(1, 300)), max_size=8), st.data()
)
def test_streams_that_wait_for_each_other_all_come_through(
    sizes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Each keeps received bytes until it has got those for decoding; they ask in any order."""
    gate = admission(total=534, own=400)  # 400 for streams
    with ExitStack() as stack:
        waiting = []
        for caller, received, decoded in sizes:
            stream = stack.enter_context(gate.admit(STREAM, f"caller {caller}"))
            with suppress(ServiceError):  # it is not read yet
                stream.reserve(received)
                waiting.append((stream, decoded))
        while waiting:
            turn = data.draw(st.permutations(waiting))
            taken = [each for each in turn if refusal(*each) is None]
            assert taken
            assert gate.reserved()[0] <= 2 * 400
            assert all(gate.reserved(f"caller {number}")[0] <= 2 * 400 for number in range(3))
            for each in taken:
                each[0].end()
                each[0].end_overdraft()
                waiting.remove(each)


def test_one_principal_leaves_room_for_others() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as one, gate.admit(EXTRACT, "bob") as other:
        one.reserve(400)
        other.reserve(300)
        assert gate.reserved() == (700, 0.0, 2)


def test_one_class_of_methods_leaves_room_for_others() -> None:
    gate = admission(own=750)
    with gate.admit(EXTRACT, "alice") as one, gate.admit(EXTRACT, "bob") as other:
        one.reserve(750)
        with pytest.raises(ServiceError) as caught:
            other.reserve(1)
        assert caught.value.reason is ErrorReason.SERVER_BUSY
        with gate.admit(STREAM, "bob") as third:
            third.reserve(250)


def test_all_together_do_not_pass_the_total() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "a") as a, gate.admit(EXTRACT, "b") as b, gate.admit(STREAM, "c") as c:
        a.reserve(400)
        b.reserve(350)
        with pytest.raises(ServiceError, match="250 are free"):
            c.reserve(300)


def test_bytes_that_are_there_already_are_counted_and_not_refused() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as held:
        held.reserve(400)
        held.add(5000)
        assert gate.reserved()[0] == 5400
        held.add(-5300)
        assert gate.reserved()[0] == 100
    assert gate.reserved() == NOTHING


def test_a_caller_with_much_work_waiting_is_told_to_wait_for_it() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as one, gate.admit(EXTRACT, "alice") as other:
        one.expect(9.0)
        with pytest.raises(ServiceError, match="your admitted calls need about 9 s") as caught:
            other.expect(2.0)
        assert caught.value.reason is ErrorReason.SERVER_BUSY
        one.computed()
        other.expect(2.0)
        assert gate.reserved() == (0, 2.0, 2)


def test_who_has_nothing_waiting_is_let_in_however_long_it_takes() -> None:
    gate = admission()
    with gate.admit(EXTRACT, "alice") as held:
        held.expect(1e6)
        with gate.admit(EXTRACT, "bob") as other:
            other.expect(1.0)
            with gate.admit(EXTRACT, "bob") as third, pytest.raises(ServiceError, match="all admitted calls"):
                third.expect(1.0)


STEP = st.tuples(
    st.integers(0, 5),
    st.sampled_from(["reserve", "add", "give", "expect", "computed"]),
    st.integers(1, 500),
)


def test_servers_that_share_the_calls_of_a_caller_share_its_seconds() -> None:
    gates = [admission(own_s=10.0) for _ in range(2)]
    for gate in gates:
        gate.sharers = len(gates)
        with gate.admit(EXTRACT, "alice") as one, gate.admit(EXTRACT, "alice") as other:
            one.expect(4.0)
            other.expect(1.0)
            with pytest.raises(ServiceError, match="more than the limit of 5 s"):
                other.expect(0.1)
            gate.sharers = 1  # the other one has gone
            other.expect(5.0)


@given(st.lists(STEP, max_size=40))
def test_no_budget_is_passed_and_nothing_is_lost(steps: list[tuple[int, str, int]]) -> None:
    gate = admission()
    kinds = list(MethodClass)
    contexts = [gate.admit(kinds[number % len(kinds)], f"caller {number % 3}") for number in range(6)]
    held = [context.__enter__() for context in contexts]
    extra = 0
    for number, step, amount in steps:
        one = held[number]
        with suppress(ServiceError):
            if step == "reserve":
                one.reserve(amount)
            elif step == "add":
                one.add(amount)
                extra += amount
            elif step == "give":
                one.add(-min(amount, one.byte_count))
            elif step == "expect":
                one.expect(amount / 10)
            elif step == "computed":
                one.computed()
        assert gate.reserved()[0] == sum(each.byte_count for each in held) <= 1000 + extra
        assert gate.reserved()[1] == pytest.approx(sum(each.seconds for each in held))
    for context in contexts:
        context.__exit__(None, None, None)
    assert gate.reserved() == NOTHING
    assert all(gate.reserved(kind=kind) == NOTHING for kind in kinds)
    assert not gate._flows


def test_zeros_become_shares_of_the_memory() -> None:
    limits = with_budgets(Limits(), memory=lambda: 1 << 34)
    assert (limits.max_pending_bytes, limits.max_principal_bytes) == (1 << 33, 1 << 32)
    limits = with_budgets(Limits(max_pending_bytes=1000, max_principal_bytes=5000))
    assert (limits.max_pending_bytes, limits.max_principal_bytes) == (1000, 1000)


@pytest.mark.parametrize(("text", "expected"), [("1048576\n", 1 << 20), ("max\n", None), (None, None)])
def test_the_memory_of_a_container_counts(tmp_path: Path, text: str | None, expected: int | None) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    machine = memory_limit_bytes([tmp_path / "nothing"])
    assert memory_limit_bytes([file]) == (expected or machine)
    assert machine > 1 << 28


def observed(*seconds: float, rows: int = 1) -> PassThroughput:
    throughput = PassThroughput()
    for each in seconds:
        throughput.observe(rows, each)
    return throughput


def test_steady_work_is_known_exactly() -> None:
    throughput = observed(0.5, 0.5, 0.5, rows=4)
    assert throughput.is_known
    assert throughput.seconds(16) == pytest.approx(2.0)


def test_nothing_is_known_of_two_passes() -> None:
    assert not observed(1.0, 1.0).is_known


def test_slow_first_passes_are_soon_forgotten() -> None:
    assert observed(10.0, *[0.1] * 10).seconds() < 0.12


def test_one_slow_pass_changes_little() -> None:
    assert observed(*[0.1] * 10, 1.0).seconds() == pytest.approx(0.19)


def test_it_follows_in_both_directions() -> None:
    assert observed(*[0.1] * 5, *[1.0] * 60).seconds() == pytest.approx(1.0, rel=0.01)


def test_no_rows_count_as_one() -> None:
    assert observed(2.0, rows=0).seconds(0) == 2.0
