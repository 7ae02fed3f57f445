"""Records of calls, and who is told of them."""

import asyncio
from contextvars import Context
from dataclasses import dataclass, field

import pytest

from trocar_server.telemetry import CallRecord, Observers, PassFacts, current_call, note_model, phase

METHOD = "/a.Service/Method"


@dataclass
class Witness:
    wants_phases: bool = False
    heard: list[str] = field(default_factory=list)

    def started(self, call: CallRecord) -> None:
        self.heard.append(f"started {call.method}")

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        self.heard.append(f"passed {facts.model_id}")

    def finished(self, call: CallRecord) -> None:
        self.heard.append(f"finished {call.code}")


def record(*witnesses: Witness) -> CallRecord:
    return CallRecord(METHOD, "UNARY", "id", Observers(witnesses))


def test_everybody_is_told_in_turn() -> None:
    one, other = Witness(), Witness()
    call = record(one, other)
    call.begin()
    call.observer.passed(call, PassFacts("m", 1, 0.0, 0.0))
    call.end("NOT_FOUND", "UNKNOWN_MODEL")
    assert one.heard == other.heard == [f"started {METHOD}", "passed m", "finished NOT_FOUND"]
    assert (call.code, call.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
    assert call.elapsed_s > 0


async def test_each_task_works_for_its_own_call() -> None:
    async def work(name: str) -> str:
        call = record()
        call.begin()
        note_model(name)
        await asyncio.sleep(0)
        assert current_call() is call
        return call.model_id

    assert await asyncio.gather(*map(work, "abc")) == ["a", "b", "c"]


def test_outside_of_calls_nothing_is_noted() -> None:
    def work() -> None:
        note_model("m")
        with phase("check"):
            assert current_call() is None

    Context().run(work)


def test_a_phase_is_kept_where_somebody_wants_it_also_when_it_fails() -> None:
    call = record(Witness(), Witness(wants_phases=True))
    call.begin()
    with phase("receive"):
        pass
    with pytest.raises(ValueError, match="no"), phase("check"):
        raise ValueError("no")
    assert call.phases is not None
    assert [one.name for one in call.phases] == ["receive", "check"]
    assert all(call.started_ns <= one.start_ns <= one.end_ns for one in call.phases)


def test_no_phase_is_kept_where_nobody_wants_any() -> None:
    call = record(Witness())
    call.begin()
    with phase("check"):
        pass
    call.add_phase("pass", 0, 1)
    assert call.phases is None


def test_a_long_stream_does_not_gather_phases_without_end() -> None:
    call = record(Witness(wants_phases=True))
    call.begin()
    for _ in range(10_000):
        call.add_phase("pass", 0, 1)
    assert call.phases is not None
    assert len(call.phases) == 256
