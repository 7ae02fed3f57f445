"""gRPC status of a domain error: one table, and the details that carry the reason."""

from collections.abc import Mapping

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from trocar_api.reasons import ERROR_DOMAIN, ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.text import shortened

DETAILS_KEY = "grpc-status-details-bin"
_LEAST_RETRY_S, _RETRY_S, _MOST_RETRY_S = 0.05, 0.2, 60.0
"""Retry delays in seconds: the least, the default, and the most."""

# Note: [Size of the status]
# gRPC accepts 8 KiB of metadata by default (`GRPC_ARG_MAX_METADATA_SIZE`), and loses the whole status if
# there is more. The message goes out twice, percent-encoded and within the details; the details grow by a
# third in base64. 2048 + (2048 + 1536 + 350 for the rest) * 4/3 leaves 0.9 KiB for the other headers. Our own
# client accepts 64 KiB, but the server cannot tell clients apart.
_MAX_MESSAGE_BYTES = 2048
_MAX_FACTS_BYTES = 1536

STATUS_CODES: dict[ErrorReason, StatusCode] = {
    ErrorReason.UNKNOWN_MODEL: StatusCode.NOT_FOUND,
    ErrorReason.MODEL_NOT_LOADED: StatusCode.FAILED_PRECONDITION,
    ErrorReason.MODEL_CONFLICT: StatusCode.ALREADY_EXISTS,
    ErrorReason.MODEL_INVALID: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_ARCHITECTURE: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_WEIGHTS: StatusCode.NOT_FOUND,
    ErrorReason.WEIGHTS_UNAVAILABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.WEIGHTS_MISMATCH: StatusCode.FAILED_PRECONDITION,
    ErrorReason.WEIGHTS_CORRUPT: StatusCode.DATA_LOSS,
    ErrorReason.INVALID_SELECTOR: StatusCode.INVALID_ARGUMENT,
    ErrorReason.UNKNOWN_MODULE: StatusCode.NOT_FOUND,
    ErrorReason.MODULE_NOT_CALLED: StatusCode.FAILED_PRECONDITION,
    ErrorReason.AMBIGUOUS_CALL: StatusCode.INVALID_ARGUMENT,
    ErrorReason.CALL_OUT_OF_RANGE: StatusCode.OUT_OF_RANGE,
    ErrorReason.UNKNOWN_PICK: StatusCode.INVALID_ARGUMENT,
    ErrorReason.NOT_A_TENSOR: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_NODE: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_FUNCTION: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_PARAMETER: StatusCode.NOT_FOUND,
    ErrorReason.NOT_TRACEABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.DUPLICATE_NAME: StatusCode.INVALID_ARGUMENT,
    ErrorReason.INVALID_ARGUMENT: StatusCode.INVALID_ARGUMENT,
    ErrorReason.REDUCTION_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.EDIT_SHAPE_MISMATCH: StatusCode.INVALID_ARGUMENT,
    ErrorReason.EDIT_DTYPE_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.EDIT_NOT_POSSIBLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.EDIT_NOT_REACHED: StatusCode.FAILED_PRECONDITION,
    ErrorReason.NON_FINITE_VALUE: StatusCode.INVALID_ARGUMENT,
    ErrorReason.UNKNOWN_EDITS: StatusCode.NOT_FOUND,
    ErrorReason.EDITS_EXIST: StatusCode.ALREADY_EXISTS,
    ErrorReason.EDITS_CORRUPT: StatusCode.DATA_LOSS,
    ErrorReason.EDITS_UNAVAILABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_DIRECTION: StatusCode.NOT_FOUND,
    ErrorReason.DIRECTION_EXISTS: StatusCode.ALREADY_EXISTS,
    ErrorReason.DIRECTION_MISMATCH: StatusCode.FAILED_PRECONDITION,
    ErrorReason.DIRECTION_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.DIRECTION_CORRUPT: StatusCode.DATA_LOSS,
    ErrorReason.DIRECTIONS_UNAVAILABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_SOURCE: StatusCode.NOT_FOUND,
    ErrorReason.NOT_DIFFERENTIABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.OBJECTIVE_OUT_OF_RANGE: StatusCode.OUT_OF_RANGE,
    ErrorReason.OBJECTIVE_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.START_NOT_POSSIBLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.INVALID_TENSOR: StatusCode.INVALID_ARGUMENT,
    ErrorReason.INVALID_IMAGE: StatusCode.INVALID_ARGUMENT,
    ErrorReason.IMAGE_TOO_LARGE: StatusCode.INVALID_ARGUMENT,
    ErrorReason.EMPTY_BATCH: StatusCode.INVALID_ARGUMENT,
    ErrorReason.NO_PREPROCESSING: StatusCode.FAILED_PRECONDITION,
    ErrorReason.INPUT_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.REQUEST_TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.REPLY_TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.PASS_TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.PASS_TOO_LONG: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.TRAINER_INVALID: StatusCode.INVALID_ARGUMENT,
    ErrorReason.TARGET_REJECTED: StatusCode.INVALID_ARGUMENT,
    ErrorReason.FIT_INVALID: StatusCode.INVALID_ARGUMENT,
    ErrorReason.DATASET_INVALID: StatusCode.INVALID_ARGUMENT,
    ErrorReason.UNKNOWN_TRAINER: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_CHECKPOINT: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_DATASET: StatusCode.NOT_FOUND,
    ErrorReason.UNKNOWN_FIT: StatusCode.NOT_FOUND,
    ErrorReason.TRAINER_BUSY: StatusCode.FAILED_PRECONDITION,
    ErrorReason.TRAINER_BROKEN: StatusCode.FAILED_PRECONDITION,
    ErrorReason.NON_FINITE_STEP: StatusCode.FAILED_PRECONDITION,
    ErrorReason.STEP_OUT_OF_ORDER: StatusCode.ABORTED,
    ErrorReason.SPOOL_FAILED: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.CHECKPOINT_CORRUPT: StatusCode.DATA_LOSS,
    ErrorReason.DATASET_CORRUPT: StatusCode.DATA_LOSS,
    ErrorReason.STORAGE_FULL: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.STORAGE_UNAVAILABLE: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_SEGMENT: StatusCode.NOT_FOUND,
    ErrorReason.QUOTA_EXCEEDED: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.TOKEN_MISSING: StatusCode.UNAUTHENTICATED,
    ErrorReason.TOKEN_INVALID: StatusCode.UNAUTHENTICATED,
    ErrorReason.SCOPE_MISSING: StatusCode.PERMISSION_DENIED,
    ErrorReason.NOT_CACHED: StatusCode.NOT_FOUND,
    ErrorReason.UNIMPLEMENTED: StatusCode.UNIMPLEMENTED,
    ErrorReason.VERSION_SKEW: StatusCode.FAILED_PRECONDITION,
    ErrorReason.UNKNOWN_METHOD: StatusCode.UNIMPLEMENTED,
    ErrorReason.SERVER_DRAINING: StatusCode.UNAVAILABLE,
    ErrorReason.SERVER_BUSY: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.DEADLINE_EXCEEDED: StatusCode.DEADLINE_EXCEEDED,
    ErrorReason.CANCELLED: StatusCode.CANCELLED,
    ErrorReason.OUT_OF_MEMORY: StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.INTERNAL: StatusCode.INTERNAL,
}


def status_message(error: ServiceError) -> str:
    """Status message as sent; gRPC's status and its details must carry the same text."""
    return shortened(error.message, _MAX_MESSAGE_BYTES, is_percent_encoded=True)


def status_details(error: ServiceError, request_id: str) -> bytes:
    """Serialise a `google.rpc.Status` with the reason, and a retry delay if a retry helps.

    Message and facts are shortened, the reason never is. See Note: [Size of the status].
    """
    status = Status(code=STATUS_CODES[error.reason].value[0], message=status_message(error))
    details = [
        ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=_facts(error.details)),
        RequestInfo(request_id=request_id),
    ]
    if error.reason is ErrorReason.SERVER_BUSY:
        details.append(RetryInfo(retry_delay=_retry_delay(error.retry_after_s)))
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    serialized: bytes = status.SerializeToString()
    return serialized


def _retry_delay(retry_after_s: float | None) -> Duration:
    delay_s = _RETRY_S if retry_after_s is None else min(max(retry_after_s, _LEAST_RETRY_S), _MOST_RETRY_S)
    delay = Duration()
    delay.FromMilliseconds(round(delay_s * 1000))
    return delay


def _facts(details: Mapping[str, str]) -> dict[str, str]:
    """Distribute the room among the facts: long ones get what short ones leave."""
    room = _MAX_FACTS_BYTES
    shares = range(len(details), 0, -1)
    facts = {}
    for share, (key, value) in zip(shares, sorted(details.items(), key=_fact_length), strict=True):
        facts[key] = shortened(value, room // share)
        room -= len(facts[key].encode())
    return facts


def _fact_length(fact: tuple[str, str]) -> int:
    return len(fact[1])
