"""Every way in which a call can fail becomes an exception that says what to do."""

import pickle

import grpc
import numpy as np
import pytest

import trocar
from tests.unit.client.fake_server import FakeServer
from trocar.errors import EXCEPTIONS
from trocar_api.reasons import ErrorReason

IMAGES = np.zeros((1, 3, 2, 2), np.float32)


def test_the_table_is_complete_and_no_class_serves_two_reasons() -> None:
    assert EXCEPTIONS.keys() == set(ErrorReason)
    assert len(set(EXCEPTIONS.values())) == len(ErrorReason)


def test_reasons_become_their_exception(server: FakeServer) -> None:
    for reason in ErrorReason:
        server.fail(grpc.StatusCode.UNKNOWN, "no module 'layer5'; nearest: layer4", reason, nearest="layer4")
        with trocar.connect(server.target) as client, pytest.raises(EXCEPTIONS[reason]) as caught:
            client.extract("resnet18", IMAGES, taps=["layer5"])
        error = caught.value
        assert type(error) is EXCEPTIONS[reason]
        assert error.reason is reason
        assert error.details == {"nearest": "layer4"}
        assert str(error).startswith("no module 'layer5'; nearest: layer4")
        assert len(error.request_id) == 32


def test_reasons_reach_unary_calls_of_both_clients(client: trocar.Client, server: FakeServer) -> None:
    server.fail(grpc.StatusCode.NOT_FOUND, "no model 'resnt'; nearest: resnet18", "UNKNOWN_MODEL")
    with pytest.raises(trocar.errors.UnknownModelError, match="nearest: resnet18"):
        client.model("resnt")


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "down", trocar.errors.ServerUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "late", trocar.errors.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, "gone", trocar.errors.CallCancelledError),
        (grpc.StatusCode.UNAUTHENTICATED, "who?", trocar.errors.PermissionDeniedError),
        (grpc.StatusCode.PERMISSION_DENIED, "no", trocar.errors.PermissionDeniedError),
        (grpc.StatusCode.UNIMPLEMENTED, "what?", trocar.VersionSkewError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trocar.errors.ServerBusyError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (9 vs. 4)",
            trocar.errors.RequestTooLargeError,
        ),
        (grpc.StatusCode.NOT_FOUND, "none", trocar.NotFoundError),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", trocar.InvalidRequestError),
        (grpc.StatusCode.INTERNAL, "oops", trocar.errors.InternalServerError),
        (grpc.StatusCode.UNKNOWN, "oops", trocar.errors.InternalServerError),
        (grpc.StatusCode.DATA_LOSS, "torn", trocar.ServerError),
    ],
)
def test_bare_codes_are_mapped(
    server: FakeServer, code: grpc.StatusCode, message: str, expected: type[trocar.TrocarError]
) -> None:
    server.fail(code, message)
    with trocar.connect(server.target, retries=0) as client, pytest.raises(expected) as caught:
        client.models()
    assert type(caught.value) is expected
    is_unreached = code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details == ({"grpc": message} if is_unreached else {})


def test_a_newer_servers_reason_falls_back_to_the_code(server: FakeServer) -> None:
    server.fail(grpc.StatusCode.NOT_FOUND, "no spaceship 'x'", "UNKNOWN_SPACESHIP")
    with (
        trocar.connect(server.target) as client,
        pytest.raises(trocar.NotFoundError, match="no spaceship") as caught,
    ):
        client.models()
    assert caught.value.reason is None
    assert caught.value.details == {"reason": "UNKNOWN_SPACESHIP"}


def test_an_internal_error_names_the_request(server: FakeServer) -> None:
    server.fail(grpc.StatusCode.INTERNAL, "a defect", "INTERNAL")
    with trocar.connect(server.target) as client, pytest.raises(trocar.errors.InternalServerError) as caught:
        client.models()
    assert caught.value.request_id in str(caught.value)


def test_broken_details_do_not_hide_the_error(server: FakeServer) -> None:
    server.failure = (grpc.StatusCode.NOT_FOUND, "none", (("grpc-status-details-bin", b"\xff\xff"),))
    with trocar.connect(server.target) as client, pytest.raises(trocar.NotFoundError, match="none"):
        client.models()


def test_long_messages_arrive_whole(server: FakeServer) -> None:
    keys = ", ".join(f"layer{index}.weight" for index in range(800))
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, keys, "WEIGHTS_MISMATCH")
    with trocar.connect(server.target) as client, pytest.raises(trocar.errors.WeightsMismatchError) as caught:
        client.load("resnet18")
    assert str(caught.value) == keys


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CLIENT: Received message larger than max (9 vs. 8)", trocar.errors.ReplyTooLargeError),
        (
            "Stream removed (CLIENT: Received message larger than max (9 vs. 8))",
            trocar.errors.ReplyTooLargeError,
        ),
        ("SERVER: Received message larger than max (9 vs. 8)", trocar.errors.RequestTooLargeError),
        (
            "Stream removed (SERVER: Received message larger than max (9 vs. 8))",
            trocar.errors.RequestTooLargeError,
        ),
    ],
)
def test_which_end_refused_a_message_is_told_by_the_text_of_every_version_of_grpc(
    server: FakeServer, message: str, expected: type[trocar.TrocarError]
) -> None:
    server.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
    with trocar.connect(server.target) as client, pytest.raises(expected, match="larger than its receiver"):
        client.models()


def test_a_message_over_the_receivers_limit_is_explained(server: FakeServer) -> None:
    server.behaviour = lambda *_: iter([b"\x7a" + b"\x00" * (17 << 20)])
    with (
        trocar.connect(server.target) as client,
        pytest.raises(trocar.errors.ReplyTooLargeError, match="larger"),
    ):
        client.extract("resnet18", IMAGES, taps=["layer4"])


def test_errors_can_be_pickled() -> None:
    error = trocar.errors.UnknownModuleError("no module", details={"nearest": "x"}, request_id="1")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.details, copy.request_id) == (
        "no module",
        ErrorReason.UNKNOWN_MODULE,
        {"nearest": "x"},
        "1",
    )


def test_groups_can_be_caught_together() -> None:
    assert issubclass(trocar.errors.UnknownModuleError, trocar.NotFoundError)
    assert issubclass(trocar.errors.UnknownModuleError, trocar.errors.SelectorError)
    assert all(issubclass(kind, trocar.TrocarError) for kind in EXCEPTIONS.values())
