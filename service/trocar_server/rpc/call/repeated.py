"""Repeated calls: a deletion whose reply was lost finds nothing when it is sent again, and has succeeded."""

import grpc

from trocar_api.reasons import ErrorReason
from trocar_api.repeats import GRPC_ATTEMPTS_KEY, REPEATED_KEY
from trocar_server.errors import ServiceError
from trocar_server.rpc.transfer.messages import CallContext

_GONE = {
    "/trocar_api.v1.DatasetService/DeleteDataset": ErrorReason.UNKNOWN_DATASET,
    "/trocar_api.v1.DirectionService/DeleteDirections": ErrorReason.UNKNOWN_DIRECTION,
    "/trocar_api.v1.EditStoreService/DeleteEdits": ErrorReason.UNKNOWN_EDITS,
    "/trocar_api.v1.TrainerService/UnpublishModel": ErrorReason.UNKNOWN_MODEL,
}
"""What a deletion says whose work is done. The replies of these methods are empty."""


def was_done_before(method: str, error: BaseException, context: CallContext) -> bool:
    """Whether a call failed only because an earlier attempt at it has deleted what it names.

    gRPC, the client or a gateway repeats a call where a connection broke, and says so in its metadata. If the
    object never existed, that is not told.
    """
    if not isinstance(error, ServiceError) or _GONE.get(method) is not error.reason:
        return False
    return is_repeated(context.invocation_metadata() or ())


def is_repeated(metadata: "grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...]") -> bool:
    """Whether metadata is that of a call that was sent before."""
    return any(key in (REPEATED_KEY, GRPC_ATTEMPTS_KEY) for key, _ in metadata)
