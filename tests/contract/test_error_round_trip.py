"""Whatever the server raises arrives at the client as the exception of that reason, with all it says."""

import numpy as np
import pytest

import trocar
from tests.support.servers.running_server import RunningServer
from trocar.errors import EXCEPTIONS
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

ROW = np.zeros((1, 3), np.float32)


@pytest.fixture
def raising(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The next calls of both kinds raise the last error of the list."""
    errors: list[BaseException] = []

    def fail(*_: object) -> None:
        raise errors[-1]

    monkeypatch.setattr(server.engine, "deployment", fail)
    monkeypatch.setattr(server.engine.catalogue, "entries", fail)
    return errors


def test_a_stream_ends_with_the_exception_of_its_reason(
    client: trocar.Client, raising: list[BaseException]
) -> None:
    for reason in ErrorReason:
        raising.append(ServiceError(reason, "what happened; what to do", nearest="layer4", count="3"))
        with pytest.raises(EXCEPTIONS[reason]) as caught:
            client.extract("identity", ROW, "identity")
        assert type(caught.value) is EXCEPTIONS[reason]
        assert str(caught.value).startswith("what happened; what to do")
        assert caught.value.details == {"nearest": "layer4", "count": "3"}


def test_a_unary_call_ends_with_the_exception_of_its_reason(
    client: trocar.Client, raising: list[BaseException]
) -> None:
    for reason in ErrorReason:
        raising.append(ServiceError(reason, "the events of the training"))
        with pytest.raises(EXCEPTIONS[reason]) as caught:
            client.models()
        assert type(caught.value) is EXCEPTIONS[reason]


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), SystemExit("secret")])
def test_a_defect_shows_a_request_id_and_nothing_else(
    client: trocar.Client, raising: list[BaseException], error: BaseException
) -> None:
    raising.append(error)
    with pytest.raises(trocar.errors.InternalServerError) as caught:
        client.extract("identity", ROW, "identity")
    assert "secret" not in str(caught.value)
    assert caught.value.request_id in str(caught.value)


@pytest.mark.parametrize("text", ["größe 🙂", "line\nbreak", "nul\0", "100 % %41"])
def test_text_arrives_as_it_was(client: trocar.Client, raising: list[BaseException], text: str) -> None:
    raising.append(ServiceError(ErrorReason.INVALID_ARGUMENT, text))
    with pytest.raises(trocar.errors.InvalidArgumentError) as caught:
        client.models()
    assert str(caught.value) == text


def test_text_that_utf8_cannot_hold_keeps_its_reason(
    client: trocar.Client, raising: list[BaseException]
) -> None:
    raising.append(ServiceError(ErrorReason.INVALID_ARGUMENT, "a key '\ud800'"))
    with pytest.raises(trocar.errors.InvalidArgumentError):
        client.models()


def test_a_list_of_two_thousand_keys_keeps_its_reason(
    client: trocar.Client, raising: list[BaseException]
) -> None:
    keys = "\n".join(f"features.denseblock4.denselayer{number}.conv2.weight" for number in range(2000))
    raising.append(ServiceError(ErrorReason.WEIGHTS_MISMATCH, "2000 missing", missing=keys))
    with pytest.raises(trocar.errors.WeightsMismatchError):
        client.models()
