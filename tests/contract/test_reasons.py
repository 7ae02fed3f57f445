"""One enum of reasons, one table at each end."""

from trocar.errors import EXCEPTIONS, TrocarError
from trocar_api.reasons import ErrorReason
from trocar_server.rpc.call.status import STATUS_CODES


def test_both_tables_have_every_reason_and_no_other() -> None:
    assert set(STATUS_CODES) == set(EXCEPTIONS) == set(ErrorReason)


def test_an_exception_knows_its_reason() -> None:
    for reason in ErrorReason:
        assert EXCEPTIONS[reason].reason is reason
        assert issubclass(EXCEPTIONS[reason], TrocarError)


def test_a_reason_is_spelt_as_it_is_called() -> None:
    for reason in ErrorReason:
        assert reason.value == reason.name
