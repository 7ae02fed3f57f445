"""The runner's rules hold for whatever executes a pass: faults are planted in one executor."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.engine.deployments import deployment
from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.execute.collecting import Collected
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.execute.executor import NotFiniteError, ReadyCall
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import Payloads, Plan, TapRequest, TensorInput
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.ready import Ready
from trocar_server.engine.run.runner import (
    DeclinedError,
    ExecutorFailedError,
    Outcome,
    PassCall,
    run_call,
    run_together,
)
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, parse_selector

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


class Doubles(nn.Module):
    """Writes to its input, and has a value to tap."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x.mul_(2.0))


class Planted(Eager):
    """Executes as eager PyTorch does, with a fault.

    Attributes:
        fault: Changes what a pass returns, or raises.
    """

    fault: ClassVar[Callable[[ReadyCall, Collected], Collected]] = staticmethod(lambda _, found: found)
    call_counts: ClassVar[list[int]] = []

    def run(self, calls: Sequence[ReadyCall]) -> Sequence[Collected]:
        self.call_counts.append(len(calls))
        return [type(self).fault(call, super(Planted, self).run([call])[0]) for call in calls]


def planted(monkeypatch: pytest.MonkeyPatch, made: Deployment, fault: Any) -> Planted:
    monkeypatch.setattr(Planted, "fault", staticmethod(fault))
    monkeypatch.setattr(Planted, "call_counts", [])
    return Planted(made.pool.free[0], numerics=Numerics.FAST)


def call_of(made: Deployment, rows: Any = ROWS, limits: Limits | None = None) -> PassCall:
    """Return a call that nothing was resolved for before."""
    entry = TensorInput("x", torch.float32, rows.shape)
    plan = Plan("m", (TapRequest(parse_selector("last")),), (entry,), 1 << 20)
    checked = CheckedPlan(plan, made, (limits or Limits()).model_copy(update={"max_pass_bytes": 1 << 30}))
    payload = rows.copy().reshape(-1).view(np.uint8)
    return PassCall(Prepared(checked, Payloads([payload]), [[]]), PassGuard(), time.perf_counter())


def rows_of(outcome: Outcome) -> Any:
    assert isinstance(outcome, Extraction)
    (found,) = outcome.feature_maps
    assert found.values is not None
    return found.values.view(np.float32).reshape(-1, 3)


def together(executor: Planted, *calls: PassCall, limit: int = 1 << 30) -> list[Outcome]:
    return run_together(executor, calls, lambda _: "", limit)


def alone(executor: Planted, call: PassCall) -> Outcome:
    try:
        return run_call(executor, call)
    except ServiceError as error:
        return error


def with_values(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda _, found: replace(found, values={name: change(v) for name, v in found.values.items()})


def raising(error: BaseException) -> Any:
    def fault(*_: object) -> Collected:
        raise error

    return fault


def cancelling(call: ReadyCall, found: Collected) -> Collected:
    call.guard.cancel()
    return found


FAULTS = {
    "larger": (with_values(lambda value: value.repeat(99, 1)), ErrorReason.REPLY_TOO_LARGE),
    "missing": (lambda _, found: replace(found, values={}), ErrorReason.MODULE_NOT_CALLED),
    "sparse": (with_values(torch.Tensor.to_sparse), ErrorReason.NOT_A_TENSOR),
    "cancelled": (cancelling, ErrorReason.CANCELLED),
}
"""What a pass does wrong, and the reason that a caller gets, whatever executes it."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_any_executor_gets_its_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (fault, reason) = deployment(Doubles), FAULTS[name]
    executor = planted(monkeypatch, made, fault)
    limits = Limits(max_reply_bytes=1024)
    for outcome in (
        alone(executor, call_of(made, limits=limits)),
        *together(executor, call_of(made, limits=limits)),
    ):
        assert isinstance(outcome, ServiceError)
        assert outcome.reason is reason


RAISED: dict[str, tuple[Exception, ErrorReason, type[DeclinedError], str]] = {
    "memory": (MemoryError(), ErrorReason.OUT_OF_MEMORY, DeclinedError, "too little memory"),
    "odd": (ValueError("nine"), ErrorReason.INPUT_REJECTED, ExecutorFailedError, "nine"),
    "nan": (NotFiniteError("x"), ErrorReason.INPUT_REJECTED, DeclinedError, "is not finite"),
}
"""By what an executor raises: the reason where it is the last one, and what it is declined with elsewhere."""


@pytest.mark.parametrize("name", RAISED)
def test_what_an_executor_raises_is_told_or_left_to_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, reason, kind, text = RAISED[name]
    made = deployment(Doubles)
    executor = planted(monkeypatch, made, raising(error))
    outcome = alone(executor, call_of(made))
    assert isinstance(outcome, ServiceError)
    assert outcome.reason is reason
    for declined in together(executor, call_of(made), call_of(made)):
        assert type(declined) is kind
        assert text in str(declined)


def test_payloads_are_as_sent_though_a_model_writes_to_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    made = deployment(Doubles)
    executor = planted(monkeypatch, made, Planted.fault)
    for run in (alone, lambda executor, call: together(executor, call)[0]):
        call = call_of(made)
        assert np.array_equal(rows_of(run(executor, call)), ROWS * 2)
        assert np.array_equal(call.prepared.payloads.inputs[0].view(np.float32), ROWS.reshape(-1))


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e7])
def test_odd_numbers_are_left_to_eager_and_harm_no_other_call(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = deployment(Doubles)
    executor = planted(monkeypatch, made, Planted.fault)
    odd = np.full((1, 3), number, np.float32)
    declined, found = together(executor, call_of(made, odd), call_of(made))
    assert isinstance(declined, DeclinedError)
    assert np.array_equal(rows_of(found), ROWS * 2)
    executor = planted(monkeypatch, made, with_values(lambda value: value / 0))
    (declined,) = together(executor, call_of(made))
    assert str(declined) == "its values are not finite"


def test_calls_run_together_within_the_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = deployment(Doubles)
    executor = planted(monkeypatch, made, Planted.fault)
    together(executor, call_of(made), call_of(made))
    together(executor, call_of(made), call_of(made), limit=1)
    assert Planted.call_counts == [2, 1, 1]


def test_one_failing_call_does_not_fail_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(call: ReadyCall, found: Collected) -> Collected:
        if call.tensors[0].shape[0] == 1:
            raise ValueError("one row")
        return found

    made = deployment(Doubles)
    executor = planted(monkeypatch, made, fault)
    failed, found = together(executor, call_of(made, ROWS[:1]), call_of(made))
    assert isinstance(failed, ExecutorFailedError)
    assert np.array_equal(rows_of(found), ROWS * 2)


def test_a_refusal_is_asked_with_what_a_call_means(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = deployment(Doubles), []
    executor = planted(monkeypatch, made, Planted.fault)

    def refusal(ready: Ready) -> str:
        seen.append([entry.target.name for entry in ready.resolved.targets])
        return "not today"

    (declined,) = run_together(executor, [call_of(made)], refusal, 1 << 30)
    assert str(declined) == "not today"
    assert seen == [["last"]]
    assert Planted.call_counts == []
