"""Room: what processed inputs may become follows the limits and the call's own reservation."""

from types import SimpleNamespace
from typing import Any

import pytest

from trocar_server.config import Limits
from trocar_server.engine.schedule.room import Room

LIMITS = Limits()


@pytest.mark.parametrize(("reserved", "expected"), [(None, LIMITS.most_made_bytes), (7, 7), (1 << 60, None)])
def test_inputs_may_become_what_the_smaller_limit_says(reserved: int | None, expected: int | None) -> None:
    reservation: Any = None if reserved is None else SimpleNamespace(most_bytes=reserved)
    assert Room(reservation).most_bytes(LIMITS) == (LIMITS.most_made_bytes if expected is None else expected)
