"""Every call that changes state, disturbed at its awaits by everything that may come."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.orders import trainer_calls
from tests.orders.sweep import Event, controlled, swept
from tests.support.orders.amount import SEED, drawn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.orders.case import Case

CASES = [*trainer_calls.CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_is_applied_once_or_not_at_all(case: Case, tmp_path: Path) -> None:
    control = controlled(case, SEED, tmp_path / "control")
    for event in Event:
        for at in drawn(control.await_count, str(case), event.value):
            folder = tmp_path / f"{event}-{at}"
            try:
                swept(case, control, event, at, SEED, folder)
            except Exception as error:
                error.add_note(f"{case}: {event} at await {at} of {control.await_count}, seed {SEED}")
                raise
            shutil.rmtree(folder)
