"""The table of status codes, and the details that carry the reason."""

import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from trocar_api.reasons import ERROR_DOMAIN, ErrorReason
from trocar_server.errors import ServiceError, busy
from trocar_server.rpc.call.status import STATUS_CODES, status_details

_METADATA_ROOM_BYTES = 48 << 10  # base64 makes the 64 KiB of it that our client accepts


def details(error: ServiceError, request_id: str = "r1") -> Status:
    return Status.FromString(status_details(error, request_id))


def unpacked(status: Status, kind: type) -> list[object]:
    found = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


def test_reasons_travel_with_domain_message_and_facts() -> None:
    for reason in ErrorReason:
        status = details(ServiceError(reason, "what to do", nearest="layer4"))
        (info,) = unpacked(status, ErrorInfo)
        assert status.code == STATUS_CODES[reason].value[0]
        assert status.message == "what to do"
        assert info == ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata={"nearest": "layer4"})


def test_the_request_id_travels_along() -> None:
    assert unpacked(details(ServiceError(ErrorReason.INTERNAL, "x"), "abc"), RequestInfo) == [
        RequestInfo(request_id="abc")
    ]


def test_only_a_busy_server_asks_to_try_again() -> None:
    for reason in ErrorReason:
        is_asked = bool(unpacked(details(ServiceError(reason, "x")), RetryInfo))
        assert is_asked is (reason is ErrorReason.SERVER_BUSY)


@pytest.mark.parametrize(("known", "sent_ms"), [(None, 200), (0.0, 50), (1.5, 1500), (1e9, 60_000)])
def test_when_to_come_again_travels_along(known: float | None, sent_ms: int) -> None:
    (asked,) = unpacked(details(busy("x", known)), RetryInfo)
    assert asked.retry_delay.ToMilliseconds() == sent_ms  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [StatusCode.OK, StatusCode.UNKNOWN])
def test_no_reason_has_a_code_that_means_something_else(code: StatusCode) -> None:
    """UNKNOWN is what gRPC says when nobody caught the error."""
    assert code not in STATUS_CODES.values()


def test_clients_try_again_elsewhere_where_a_server_runs_empty_and_in_no_other_case() -> None:
    unavailable = [reason for reason, code in STATUS_CODES.items() if code is StatusCode.UNAVAILABLE]
    assert unavailable == [ErrorReason.SERVER_DRAINING]


def test_internal_is_for_defects_only() -> None:
    internal = [reason for reason, code in STATUS_CODES.items() if code is StatusCode.INTERNAL]
    assert internal == [ErrorReason.INTERNAL]


@pytest.mark.parametrize("text", ["\ud800", "line\nbreak", "nul\0", "größe 🙂"])
def test_any_text_can_be_sent(text: str) -> None:
    """A model's own error, or a key of its output, may hold what UTF-8 cannot."""
    status = details(ServiceError(ErrorReason.INPUT_REJECTED, f"it says {text}", fact=text), "r1")
    assert status.message.startswith("it says ")


def test_long_details_are_shortened_so_that_the_status_arrives() -> None:
    """2,000 mismatched keys are 96 KB: more metadata than a client takes, so that it loses the reason."""
    keys = "\n".join(f"features.denseblock4.denselayer{number}.conv2.weight" for number in range(2000))
    error = ServiceError(ErrorReason.WEIGHTS_MISMATCH, "x", missing=keys)
    assert len(status_details(error, "r1")) < _METADATA_ROOM_BYTES
