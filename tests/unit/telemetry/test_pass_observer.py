"""What is told of a pass."""

import pytest
import torch

from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import ArgumentInput, ImageInput, ImageSpec, Plan, TensorInput
from trocar_server.engine.run.extraction import ExecutionReport, Extraction
from trocar_server.telemetry import CallRecord, Observers, PassFacts, note_pass
from trocar_server.telemetry.call_observer import pass_facts

IMAGES = ImageInput("", (ImageSpec(10), ImageSpec(20), ImageSpec(12, 2, 2)))


def plan(*inputs: ArgumentInput) -> Plan:
    return Plan("m", (), inputs, 0)


def tensor(*shape: int) -> TensorInput:
    return TensorInput("", torch.float32, shape)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((tensor(5, 3),), 5),
        ((tensor(0, 3),), 0),
        ((tensor(),), 1),
        ((IMAGES,), 3),
        ((), 0),
        ((tensor(2), IMAGES), 2),
    ],
)
def test_samples_are_those_of_the_first_argument(inputs: tuple[ArgumentInput, ...], expected: int) -> None:
    assert pass_facts(plan(*inputs), Extraction((), (), None, 0.0, 0.0)).row_count == expected


class Witness:
    wants_phases = True

    def __init__(self) -> None:
        self.facts: list[PassFacts] = []

    def started(self, call: CallRecord) -> None: ...

    def finished(self, call: CallRecord) -> None: ...

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        self.facts.append(facts)


def test_a_pass_is_told_and_its_times_are_phases() -> None:
    witness = Witness()
    call = CallRecord("/a.B/C", "UNARY", "id", Observers((witness,)))
    call.begin()
    note_pass(pass_facts(plan(tensor(4, 3)), Extraction((), (), None, 0.25, 0.5, depth=0.75)))
    note_pass(pass_facts(plan(tensor(4, 3)), Extraction((), (), None, 0.25, 0.5)))
    assert witness.facts[0] == PassFacts("m", 4, 0.25, 0.5, 0.75, "eager", "exact", False)
    assert (call.pass_count, call.row_count, call.queue_s, call.compute_s) == (2, 8, 0.5, 1.0)
    assert call.phases is not None
    queue, computed = call.phases[:2]
    assert (queue.name, computed.name) == ("queue", "pass")
    assert queue.end_ns == computed.start_ns
    assert queue.end_ns - queue.start_ns == 250_000_000
    assert computed.end_ns - computed.start_ns == 500_000_000


def test_the_engine_and_its_numerics_are_told() -> None:
    report = ExecutionReport(Numerics.BF16, "torch", 64, is_cached=True)
    facts = pass_facts(plan(tensor(4, 3)), Extraction((), (), None, 0.25, 0.5, report=report))
    assert (facts.engine, facts.numerics, facts.is_cached, facts.row_count) == ("torch", "bf16", True, 4)
