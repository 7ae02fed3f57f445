"""One enum of reasons, one table at each end."""

import pytest

from trocar.errors import EXCEPTIONS, TrocarError
from trocar_api.reasons import ErrorReason
from trocar_server.rpc.call.status import STATUS_CODES


@pytest.mark.parametrize("reason", ErrorReason)
def test_reason_is_mapped_at_both_ends(reason: ErrorReason) -> None:
    assert reason in STATUS_CODES
    assert reason in EXCEPTIONS


def test_neither_table_has_a_reason_that_does_not_exist() -> None:
    assert set(STATUS_CODES) == set(EXCEPTIONS) == set(ErrorReason)


@pytest.mark.parametrize("reason", ErrorReason)
def test_an_exception_knows_its_reason(reason: ErrorReason) -> None:
    assert EXCEPTIONS[reason].reason is reason
    assert issubclass(EXCEPTIONS[reason], TrocarError)


@pytest.mark.parametrize("reason", ErrorReason)
def test_a_reason_is_spelt_as_it_is_called(reason: ErrorReason) -> None:
    assert reason.value == reason.name
