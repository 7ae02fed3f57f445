"""Data sets that the server keeps: requests, and what the server says of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trocar._tensors import DTYPE_NAMES
from trocar._uploads.plan import UploadPlan
from trocar._uploads.shards import Parts, Shard, pieces
from trocar.errors import BadReplyError
from trocar_api.v1 import dataset_pb2 as pb
from trocar_api.v1.tensor_pb2 import TensorSpec


@dataclass(frozen=True)
class DatasetTensor:
    """What one sample of a tensor looks like."""

    dtype: str
    """For example "float32"."""
    shape: tuple[int, ...]
    """Without the dimension of the samples; empty for one number a sample."""


@dataclass(frozen=True)
class DatasetTarget(DatasetTensor):
    """What there is to learn."""

    low: int | None = None
    """The smallest value, of whole numbers."""
    high: int | None = None
    """The largest value, of whole numbers."""
    value_count: int | None = None
    """How many different values there are, of whole numbers, up to 65,536."""


@dataclass(frozen=True)
class StoredDataset:
    """A data set on the server; prints as a line."""

    dataset_id: str
    """What a fit names it by."""
    name: str
    """For people."""
    is_complete: bool
    """Whether it can be trained on; False for an upload that has not ended."""
    is_listed: bool
    """Whether it is the operator's, for everybody."""
    sample_count: int
    """How many samples it has."""
    byte_count: int
    """Bytes that it takes, equal shards once; 0 where the operator listed it."""
    has_images: bool
    """Whether its inputs are encoded images, which the model's preprocessing takes."""
    inputs: DatasetTensor | None
    """One input; None for images, and while it is being uploaded."""
    targets: Mapping[str, DatasetTarget]
    """What there is to learn, by name; the name is "" where there is only one."""
    categories: tuple[str, ...] = field(repr=False)
    """Names of the classes by label. Empty when unknown, and always in `Client.datasets`."""
    stored_at: datetime | None
    """When it was uploaded, in UTC; None where the operator listed it."""

    def __str__(self) -> str:
        state = "" if self.is_complete else ", not complete"
        return f"{self.dataset_id}  {self.name}: {self.sample_count:,} samples{state}"


def begin_request(plan: UploadPlan, shards: Sequence[Shard]) -> pb.BeginUploadRequest:
    """Build the request that says what will be uploaded."""
    return pb.BeginUploadRequest(
        manifest=pb.DatasetManifest(
            name=plan.name,
            sample_count=sum(shard.sample_count for shard in shards),
            categories=plan.categories,
            shards=[
                pb.DatasetShard(
                    sha256=shard.sha256, byte_count=shard.byte_count, sample_count=shard.sample_count
                )
                for shard in shards
            ],
        )
    )


def shard_requests(dataset_id: str, shard: Shard, parts: Parts) -> Iterator[pb.UploadShardRequest]:
    """Yield the messages of one shard."""
    first = {"dataset_id": dataset_id, "sha256": shard.sha256}
    for piece in pieces(parts):
        yield pb.UploadShardRequest(data=piece, **first)
        first = {}


def missing_shards(reply: pb.BeginUploadResponse, shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards that the server wants.

    Raises:
        BadReplyError: It wants one that there is not.
    """
    if any(not 0 <= index < len(shards) for index in reply.missing_shards):
        raise BadReplyError(f"the server wants shards {list(reply.missing_shards)[:8]} of {len(shards)}")
    return [shards[index] for index in reply.missing_shards]


def stored_dataset(message: pb.Dataset) -> StoredDataset:
    """Convert what the server says of a data set.

    Raises:
        BadReplyError: It was stored at an impossible time, or has a dtype that this client does not know.
    """
    return StoredDataset(
        dataset_id=message.dataset_id,
        name=message.name,
        is_complete=message.is_complete,
        is_listed=message.is_listed,
        sample_count=message.sample_count,
        byte_count=message.byte_count,
        has_images=message.has_images,
        inputs=_tensor(message.inputs) if message.HasField("inputs") else None,
        targets={target.name: _target(target) for target in message.targets},
        categories=tuple(message.categories),
        stored_at=_time(message),
    )


def _time(message: pb.Dataset) -> datetime | None:
    if message.is_listed:
        return None
    try:
        return datetime.fromtimestamp(message.stored_at_s, UTC)
    except (OSError, OverflowError, ValueError) as error:
        raise BadReplyError(f"{message.name!r} was stored {message.stored_at_s} s after 1970") from error


def _target(message: pb.DatasetTarget) -> DatasetTarget:
    tensor = _tensor(message.tensor)
    return DatasetTarget(
        dtype=tensor.dtype,
        shape=tensor.shape,
        low=message.low if message.HasField("low") else None,
        high=message.high if message.HasField("high") else None,
        value_count=message.value_count if message.HasField("value_count") else None,
    )


def _tensor(spec: TensorSpec) -> DatasetTensor:
    if spec.dtype not in DTYPE_NAMES:
        raise BadReplyError(f"the server names dtype {spec.dtype}, which this client does not know")
    return DatasetTensor(DTYPE_NAMES[spec.dtype], tuple(spec.shape))
