"""RPC errors: failed gRPC calls converted to exceptions that a user can act on."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # ships no types

from trocar._transport.channel import own_version
from trocar._transport.connection_failures import connection_problem, web_status
from trocar.errors import (
    EXCEPTIONS,
    CallCancelledError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ReplyTooLargeError,
    RequestTooLargeError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
    TrocarError,
    VersionSkewError,
)
from trocar_api.reasons import ERROR_DOMAIN, ErrorReason
from trocar_api.v1.stream_pb2 import BatchError


class ClientClosedError(ServerUnavailableError, ValueError):
    """A call on a closed client; gRPC itself raises a `ValueError`."""


DETAILS_KEY = "grpc-status-details-bin"
_TOO_LARGE = re.compile(r"message larger than max|message too large", re.IGNORECASE)
_BY_CLIENT = re.compile(r"\bCLIENT: Received")  # first in the text up to grpcio 1.81, within it in 1.85

_BARE_CODES: dict[grpc.StatusCode, tuple[type[TrocarError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        ServerUnavailableError,
        "no connection to {target}: {problem}",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        DeadlineExceededError,
        "the call to {target} exceeded its deadline; pass a larger timeout_s",
    ),
    grpc.StatusCode.CANCELLED: (CallCancelledError, "the call was cancelled: {text}"),
    grpc.StatusCode.UNAUTHENTICATED: (
        PermissionDeniedError,
        "the server requires a valid token: trocar.connect(..., token=...) ({text})",
    ),
    grpc.StatusCode.PERMISSION_DENIED: (PermissionDeniedError, "the token does not allow this call: {text}"),
    grpc.StatusCode.UNIMPLEMENTED: (
        VersionSkewError,
        "{target} does not implement this method; is it a Trocar server, no older than this client, "
        "version {version}? ({text})",
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (ServerBusyError, "the server is out of capacity: {text}"),
    grpc.StatusCode.NOT_FOUND: (NotFoundError, "{text}"),
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequestError, "{text}"),
    grpc.StatusCode.FAILED_PRECONDITION: (InvalidRequestError, "{text}"),
    grpc.StatusCode.OUT_OF_RANGE: (InvalidRequestError, "{text}"),
    grpc.StatusCode.INTERNAL: (InternalServerError, "the call failed inside the server: {text}"),
    grpc.StatusCode.UNKNOWN: (InternalServerError, "the call failed inside the server: {text}"),
}


@dataclass(frozen=True)
class _ErrorInfo:
    reason: str = ""
    metadata: Mapping[str, str] | None = None
    retry_after_s: float | None = None


def error_from_batch(error: BatchError, request_id: str = "") -> TrocarError:
    """Convert a stream's error about a failed batch."""
    reason = ErrorReason.__members__.get(error.reason)
    kind = TrocarError if reason is None else EXCEPTIONS[reason]
    return kind(error.message, details=dict(error.details), request_id=request_id)


def image_of(error: Exception) -> int | None:
    """Return the index of the image in its batch that an error is about, from 0; None if it has none."""
    text = error.details.get("image", "") if isinstance(error, TrocarError) else ""
    return int(text) if text.isdecimal() else None


def is_broken_connection(error: grpc.RpcError) -> bool:
    """Whether a stream broke in the middle, without a decision of either side."""
    if _error_info(error.trailing_metadata()).reason:
        return False
    # gRPC's asyncio API reports for a stream that it can no longer write to (1.81): INTERNAL, "from Core".
    is_from_core = error.code() is grpc.StatusCode.INTERNAL and "from Core" in (error.details() or "")
    return is_from_core or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def error_from_rpc(
    error: grpc.RpcError, *, target: str = "the server", request_id: str = "", is_tls: bool = False
) -> TrocarError:
    """Convert a failed call of the sync or the asyncio API.

    The server's `ErrorInfo` decides. Without one (the failure came from gRPC itself, or from a
    proxy) the status code does.

    Args:
        error: What the call raised.
        target: Target of the call, for the message.
        request_id: The id that was sent with the call.
        is_tls: Whether this end speaks TLS.
    """
    code, text = error.code(), error.details() or "no details"
    info = _error_info(error.trailing_metadata())
    reason = ErrorReason.__members__.get(info.reason)
    if reason is None:
        return _from_code(code, text, info, target, request_id, is_tls=is_tls)
    if reason is ErrorReason.INTERNAL:
        text = f"{text} (request {request_id})"
    if reason is ErrorReason.UNKNOWN_METHOD:
        text = f"{text} (this client is of version {own_version()})"
    converted = EXCEPTIONS[reason](text, details=info.metadata, request_id=request_id)
    if isinstance(converted, ServerBusyError):
        converted.retry_after_s = info.retry_after_s
    return converted


def _from_code(
    code: grpc.StatusCode, text: str, info: _ErrorInfo, target: str, request_id: str, *, is_tls: bool
) -> TrocarError:
    kind, message = _BARE_CODES.get(code, (ServerError, f"the call failed with {code.name}: {{text}}"))
    details = dict(info.metadata or {})
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE.search(text):
        kind = ReplyTooLargeError if _BY_CLIENT.search(text) else RequestTooLargeError
        message = "one message is larger than its receiver accepts: {text}"
    if info.reason:  # a newer server's reason that this client has no class for
        message, details = "{text}", {"reason": info.reason, **details}
    problem = ""
    if not info.reason and (code is grpc.StatusCode.UNAVAILABLE or web_status(text)):
        kind, message = _BARE_CODES[grpc.StatusCode.UNAVAILABLE]
        problem = connection_problem(text, target, is_tls=is_tls)
        details["grpc"] = text
    said = message.format(target=target, text=text, version=own_version(), problem=problem)
    return kind(said, details=details, request_id=request_id)


def _error_info(metadata: Iterable[Any] | None) -> _ErrorInfo:
    """Read our `ErrorInfo` from the trailing metadata; empty without one."""
    for key, value in metadata or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            return _parsed(status_pb2.Status.FromString(value).details)
        except DecodeError:
            break
    return _ErrorInfo()


def _parsed(details: Iterable[Any]) -> _ErrorInfo:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    error_info, retry_after_s = _ErrorInfo(), None
    for detail in details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            error_info = _ErrorInfo(info.reason, dict(info.metadata))
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return replace(error_info, retry_after_s=retry_after_s)
