import json

import pytest
import typer

from trocar import ErrorReason, TrocarError
from trocar._cli.failures import USAGE, exit_code, fail, failure_json, failure_text, failures_of
from trocar.errors import EXCEPTIONS, ServerUnavailableError, UnknownModuleError


def test_every_error_shows_its_message_and_its_reason() -> None:
    for reason in ErrorReason:
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


def test_json_has_all_that_the_error_has() -> None:
    error = UnknownModuleError("no module 'layer5'", details={"nearest": "layer4"}, request_id="r1")
    error.add_note("while extracting a.jpg")
    assert json.loads(failure_json(error, 1)) == {
        "error": {
            "reason": "UNKNOWN_MODULE",
            "type": "UnknownModuleError",
            "message": "no module 'layer5'",
            "notes": ["while extracting a.jpg"],
            "details": {"nearest": "layer4"},
            "request_id": "r1",
            "exit_code": 1,
        }
    }


@pytest.mark.parametrize(
    ("words", "is_json"),
    [(["models", "--json"], True), (["models"], False), (["extract", "--", "--json"], False)],
)
def test_failures_are_json_where_results_are(
    words: list[str], is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with failures_of(words), pytest.raises(typer.Exit):
        fail("torch is missing", USAGE)
    shown = capsys.readouterr().err
    assert shown.startswith("{") == is_json
    assert (json.loads(shown)["error"]["exit_code"] if is_json else USAGE) == USAGE
    with pytest.raises(typer.Exit):
        fail("after that")
    assert capsys.readouterr().err == "error: after that\n"
