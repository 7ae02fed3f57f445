"""Faults planted one by one: each is noticed by the sweep of its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.orders import trainer_calls
from tests.orders.sweep import Event, controlled, swept
from trocar_server.training.durable_steps import DurableSteps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.orders.case import Case


async def _nothing(*_: Any) -> None:
    """Stand in for a method that a fault leaves out."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        what: In words.
        cases: Those of its kind.
        name: Of the case that notices it.
        event: The event that shows it, at some await.
        owner: The class or module with the name that is replaced.
        attribute: That name.
        planted: In its place.
    """

    what: str
    cases: list[Case]
    name: str
    event: Event
    owner: Any
    attribute: str
    planted: Any


FAULTS = [
    Fault(
        "the journal keeps a step that was cancelled",
        trainer_calls.CASES,
        "Train-journal",
        Event.CANCEL,
        DurableSteps,
        "discard",
        _nothing,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_noticed(fault: Fault, tmp_path: Path) -> None:
    case = next(case for case in fault.cases if str(case) == fault.name)
    control = controlled(case, 0, tmp_path / "control")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.attribute, fault.planted)
        for at in range(1, control.await_count + 1):
            try:
                swept(case, control, fault.event, at, 0, tmp_path / f"{at}")
            except AssertionError:
                return
    pytest.fail("no await shows it")
