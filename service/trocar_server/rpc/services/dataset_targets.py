"""Targets of a data set on the server, for a fit of directions to its samples."""

from collections.abc import Sequence

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import direction_pb2 as pb
from trocar_server.directions.direction_request import rejected
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.fields import invalid
from trocar_server.training.datasets.reader import DatasetReader

_READ_AT_ONCE = 256


def with_targets(message: pb.DirectionFit, reader: DatasetReader) -> pb.DirectionFit:
    """Return the description of a fit with the number of samples and the targets of a data set.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `DIRECTION_REJECTED`, they do not fit the kind; the errors of data
            sets.
    """
    given = [name for name in ("labels", "targets", "classes") if getattr(message, name)]
    if given or message.sample_count:
        raise invalid(f"direction_fit.{given[0] if given else 'sample_count'}", "is that of the data set")
    if reader.info.signature is None:
        raise ServiceError(
            ErrorReason.DATASET_INVALID, "the data set is still being uploaded; finish its upload first"
        )
    filled = pb.DirectionFit()
    filled.CopyFrom(message)
    filled.sample_count = len(reader)
    if message.kind == pb.DIRECTION_KIND_PCA:
        return filled
    name = _target_name(message.dataset_target, sorted(reader.info.signature.targets))
    values = _targets(reader, name)
    if message.kind == pb.DIRECTION_KIND_RIDGE:
        filled.targets.extend(values.astype(np.float64).tolist())
        return filled
    if not np.issubdtype(values.dtype, np.integer):
        raise rejected(f"target '{name}' has numbers that are no classes; use kind='ridge'")
    classes, labels = np.unique(values, return_inverse=True)
    names = reader.info.categories
    filled.classes.extend(names[each] if 0 <= each < len(names) else str(each) for each in classes.tolist())
    filled.labels.extend(labels.tolist())
    return filled


def _target_name(asked: str, names: Sequence[str]) -> str:
    if asked in names:
        return asked
    if not asked and len(names) == 1:
        return names[0]
    listed = ", ".join(repr(name) for name in names) or "none"
    raise invalid("direction_fit.dataset_target", f"'{asked[:80]}' is not one of the data set's: {listed}")


def _targets(reader: DatasetReader, name: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Return one target of all samples; inputs are read with it, and not decoded."""
    parts = []
    for first in range(0, len(reader), _READ_AT_ONCE):
        samples = reader.samples(range(first, min(first + _READ_AT_ONCE, len(reader))))
        parts.append(np.stack([np.asarray(sample.targets[name]) for sample in samples]))
    values = np.concatenate(parts)
    if values.ndim != 1:
        raise rejected(
            f"target '{name}' is of shape {values.shape[1:]} for each sample; a direction needs one number"
        )
    return values
