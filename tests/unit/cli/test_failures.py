import pytest

from trocar import ErrorReason, TrocarError
from trocar._cli.failures import exit_code, failure_text
from trocar.errors import EXCEPTIONS, ServerUnavailableError


@pytest.mark.parametrize("reason", ErrorReason)
def test_every_error_shows_its_message_and_its_reason(reason: ErrorReason) -> None:
    error = EXCEPTIONS[reason]("no module 'layer5'")
    assert failure_text(error) == f"error: no module 'layer5' [{reason}]"
    assert exit_code(error) == 1


def test_notes_follow_the_message() -> None:
    error = TrocarError("broken")
    error.add_note("while extracting a.jpg")
    assert failure_text(error) == "error: broken\nwhile extracting a.jpg"


def test_file_error_names_the_file() -> None:
    assert failure_text(FileNotFoundError(2, "No such file", "a.jpg")) == "error: a.jpg: No such file"


def test_server_that_does_not_answer_has_a_code_of_its_own() -> None:
    assert exit_code(ServerUnavailableError("nobody")) == 3
