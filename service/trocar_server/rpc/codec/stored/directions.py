"""Codec of directions: requests of fits from the wire, stored directions to it."""

import numpy as np

from trocar_api.v1 import direction_pb2 as pb
from trocar_api.v1.position_pb2 import Positions
from trocar_server.directions import Direction, DirectionKind, DirectionRequest, StoredDirections
from trocar_server.directions.direction_request import MAX_CLASSES, MAX_SAMPLES
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_count, invalid

_KINDS = {
    pb.DIRECTION_KIND_LOGISTIC: DirectionKind.LOGISTIC,
    pb.DIRECTION_KIND_RIDGE: DirectionKind.RIDGE,
    pb.DIRECTION_KIND_MEAN_DIFFERENCE: DirectionKind.MEAN_DIFFERENCE,
    pb.DIRECTION_KIND_PCA: DirectionKind.PCA,
}
_ENUM_PREFIX = "DIRECTION_KIND_"


def direction_request(message: pb.DirectionFit) -> DirectionRequest:
    """Convert and check a fit.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `DIRECTION_REJECTED`.
    """
    if message.kind not in _KINDS:
        raise invalid("direction_fit.kind", f"{message.kind} is unset or unknown")
    for name in ("labels", "targets", "groups", "folds"):
        check_count(f"direction_fit.{name}", len(getattr(message, name)), MAX_SAMPLES)
    for name in ("classes", "class_weights"):
        check_count(f"direction_fit.{name}", len(getattr(message, name)), MAX_CLASSES)
    if any(len(name) > MAX_TEXT_CHARACTERS for name in message.classes):
        raise invalid("direction_fit.classes", f"has a name of over {MAX_TEXT_CHARACTERS} characters")
    return DirectionRequest(
        name=message.name,
        kind=_KINDS[message.kind],
        sample_count=message.sample_count,
        labels=np.array(message.labels, np.int64),
        classes=tuple(message.classes),
        targets=np.array(message.targets, np.float64),
        fold_count=message.fold_count,
        groups=np.array(message.groups, np.int64),
        given_folds=np.array(message.folds, np.int64),
        l2=message.l2 if message.HasField("l2") else 1.0,
        class_weights=tuple(message.class_weights),
        is_balanced=message.is_balanced,
        is_standardized=message.is_standardized,
        component_count=message.component_count if message.HasField("component_count") else 1,
        is_replacing=message.is_replacing,
    )


def directions_to_wire(stored: StoredDirections) -> list[pb.Direction]:
    """Describe the directions of one name; a problem is an entry of its own."""
    if stored.problem:
        return [pb.Direction(model_id=stored.model_id, name=stored.name, problem=stored.problem)]
    return [_direction(stored, each) for each in stored.directions]


def _direction(stored: StoredDirections, direction: Direction) -> pb.Direction:
    about = direction.about
    vectors, channels = direction.vectors.shape
    return pb.Direction(
        model_id=stored.model_id,
        name=stored.name,
        place=about.place,
        kind=pb.DirectionKind.Value(_ENUM_PREFIX + about.kind.upper()),
        vector_count=vectors,
        channel_count=channels,
        classes=about.classes,
        mean_norm=about.mean_norm,
        sample_count=about.sample_count,
        score_name=about.score_name,
        score=about.score,
        fold_scores=about.fold_scores,
        auc=about.auc,
        digest=direction.digest,
        model_digest=about.model_digest,
        data_digest=about.data_digest,
        positions=Positions.FromString(bytes.fromhex(about.positions)) if about.positions else None,
        byte_count=direction.vectors.nbytes + direction.bias.nbytes,
        stored_at_s=stored.stored_at_s,
    )
