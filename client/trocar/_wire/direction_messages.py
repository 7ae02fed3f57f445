"""Directions from messages of the server."""

from trocar._request.stored.stored_times import stored_time
from trocar._result.directions import StoredDirection
from trocar_api.v1 import direction_pb2 as pb

_PREFIX = "DIRECTION_KIND_"


def stored_direction(message: pb.Direction) -> StoredDirection:
    """Convert a stored direction.

    Raises:
        BadReplyError: It was stored at an impossible time.
    """
    is_known = message.kind in pb.DirectionKind.values()
    return StoredDirection(
        model_id=message.model_id,
        name=message.name,
        place=message.place,
        kind=pb.DirectionKind.Name(message.kind).removeprefix(_PREFIX).lower() if is_known else "unknown",
        vector_count=message.vector_count,
        channel_count=message.channel_count,
        classes=tuple(message.classes),
        mean_norm=message.mean_norm,
        sample_count=message.sample_count,
        score_name=message.score_name,
        score=message.score if message.HasField("score") else None,
        fold_scores=tuple(message.fold_scores),
        auc=message.auc if message.HasField("auc") else None,
        digest=message.digest,
        model_digest=message.model_digest,
        data_digest=message.data_digest,
        stored_at=stored_time(message.name, message.stored_at_s),
        problem=message.problem,
    )
