"""Stored data sets on the server: requests and replies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from trocar._base.names import few
from trocar._base.tables import Columns, html_facts, size_text
from trocar._base.tensors import DTYPE_NAMES
from trocar._request.stored.stored_times import stored_time
from trocar._uploads.shards import Parts, Shard, pieces
from trocar._uploads.upload_plan import UploadPlan
from trocar.errors import BadReplyError
from trocar_api.stored_names import is_stored_name
from trocar_api.v1 import dataset_pb2 as pb
from trocar_api.v1.tensor_pb2 import TensorSpec


@dataclass(frozen=True)
class DatasetTensor:
    """Dtype and shape of one sample of a tensor."""

    dtype: str
    """For example "float32"."""
    shape: tuple[int, ...]
    """Without the dimension of the samples; empty for one number a sample."""


@dataclass(frozen=True)
class DatasetTarget(DatasetTensor):
    """Target of a data set."""

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
    """One input; None for images, texts and sound, and while it is being uploaded."""
    targets: Mapping[str, DatasetTarget]
    """What there is to learn, by name; the name is "" where there is only one."""
    categories: tuple[str, ...] = field(repr=False)
    """Names of the classes by label. Empty when unknown, and always in `Client.datasets`."""
    stored_at: datetime | None
    """When it was uploaded, in UTC; None where the operator listed it."""
    problem: str = ""
    """Why the server cannot read it; all but the id is unknown then."""
    has_texts: bool = False
    """Whether its inputs are texts, which the model's tokenizer takes."""
    has_sound: bool = False
    """Whether its inputs are sound, which the model's feature extractor takes."""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.dataset_id}  cannot be read: {self.problem}"
        state = "" if self.is_complete else ", not complete"
        return f"{self.dataset_id}  {self.name}: {self.sample_count:,} samples{state}"

    def __repr__(self) -> str:
        return f"<StoredDataset {self}>"

    def _repr_html_(self) -> str:
        """Show the facts in a notebook."""
        facts = {title: text(self) for title, text in DATASET_COLUMNS.items()}
        return html_facts({**facts, "problem": self.problem, "categories": few(self.categories)})


def _inputs_text(dataset: StoredDataset) -> str:
    if dataset.has_images:
        return "images"
    if dataset.has_texts:
        return "texts"
    if dataset.has_sound:
        return "sound"
    return "" if dataset.inputs is None else f"{dataset.inputs.dtype} {dataset.inputs.shape}"


def _state_text(dataset: StoredDataset) -> str:
    if dataset.problem:
        return "unreadable"
    return "listed" if dataset.is_listed else "complete" if dataset.is_complete else "uploading"


DATASET_COLUMNS: Columns[StoredDataset] = {
    "id": lambda dataset: dataset.dataset_id,
    "name": lambda dataset: dataset.name,
    "samples": lambda dataset: f"{dataset.sample_count:,}",
    "inputs": _inputs_text,
    "targets": lambda dataset: ", ".join(
        f"{name or 'target'} {target.dtype}" for name, target in dataset.targets.items()
    ),
    "size": lambda dataset: "" if dataset.is_listed else size_text(dataset.byte_count),
    "state": _state_text,
}
"""The columns of a list of data sets."""


def begin_request(plan: UploadPlan, shards: Sequence[Shard]) -> pb.BeginUploadRequest:
    """Build the request that announces an upload."""
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
    """Return the shards that the server misses.

    Raises:
        BadReplyError: It names one that does not exist.
    """
    if any(not 0 <= index < len(shards) for index in reply.missing_shards):
        raise BadReplyError(f"the server wants shards {list(reply.missing_shards)[:8]} of {len(shards)}")
    return [shards[index] for index in reply.missing_shards]


def stored_dataset(message: pb.Dataset) -> StoredDataset:
    """Convert a data set's description.

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
        problem=message.problem,
        has_texts=message.has_texts,
        has_sound=message.has_sound,
    )


def _time(message: pb.Dataset) -> datetime | None:
    if message.is_listed:
        return None
    return stored_time(message.name, message.stored_at_s)


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


def is_dataset_id(text: str) -> bool:
    """Whether a text names a data set on the server, and nothing on this machine."""
    return is_stored_name(text) and not Path(text).exists()
