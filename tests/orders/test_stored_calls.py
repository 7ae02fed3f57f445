"""Calls of stored edits and data sets, each disturbed at its awaits by everything that may come."""

from pathlib import Path

import pytest

from tests.orders.case import Case
from tests.orders.stored_calls import CASES
from tests.orders.sweep import sweep


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_is_applied_once_or_not_at_all(case: Case, tmp_path: Path) -> None:
    sweep(case, tmp_path)
