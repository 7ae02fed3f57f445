"""`DatasetService`: data sets for training, owned by their callers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import dataset_pb2 as pb
from trocar_api.v1 import dataset_pb2_grpc
from trocar_api.v1.tensor_pb2 import Dtype, TensorSpec
from trocar_server.engine.schedule.admission import Admission, MethodClass
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.codec.fields import check_count, invalid
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.transfer.messages import Arrivals, CallContext
from trocar_server.training.datasets import (
    ArraySignature,
    DatasetInfo,
    DatasetLibrary,
    IncomingShard,
    Manifest,
    Shard,
    TargetSignature,
)
from trocar_server.training.datasets.upload_checks import MAX_CATEGORIES, MAX_SHARDS


class DatasetService(dataset_pb2_grpc.DatasetServiceServicer):
    """Servicer of data sets."""

    def __init__(self, library: DatasetLibrary, admission: Admission) -> None:
        self._library = library
        self._admission = admission
        self._store = library.store

    async def BeginUpload(
        self, request: pb.BeginUploadRequest, context: CallContext
    ) -> pb.BeginUploadResponse:
        """Store a manifest and list the missing shards."""
        begun = await asyncio.to_thread(self._store.begin, principal_of(context), _manifest(request.manifest))
        return pb.BeginUploadResponse(dataset_id=begun.dataset_id, missing_shards=begun.missing)

    async def UploadShard(
        self, request_iterator: AsyncIterator[pb.UploadShardRequest], context: CallContext
    ) -> pb.UploadShardResponse:
        """Receive one shard; an incomplete one leaves nothing behind."""
        principal = principal_of(context)
        arrivals = Arrivals(aiter(request_iterator), self._admission.limits, _byte_count)
        first = await arrivals.next()
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        with self._admission.admit(MethodClass.DATA, current_flow()) as reservation:
            reservation.reserve(len(first.data) or 1)  # further messages come when this one is on disk
            await self._receive(principal, first, arrivals)
        return pb.UploadShardResponse()

    async def _receive(
        self,
        principal: str,
        first: pb.UploadShardRequest,
        arrivals: Arrivals[pb.UploadShardRequest],
    ) -> None:
        dataset_id = first.dataset_id
        async with self._receiving(principal, dataset_id, first.sha256) as incoming:
            await asyncio.to_thread(self._store.write, incoming, first.data)
            while (message := await arrivals.next()) is not None:
                if message.dataset_id or message.sha256:
                    raise invalid("dataset_id", "it and sha256 come with the first message only")
                await asyncio.to_thread(self._store.write, incoming, message.data)
            await asyncio.to_thread(self._store.keep, principal, dataset_id, incoming)

    @asynccontextmanager
    async def _receiving(self, principal: str, dataset_id: str, sha256: str) -> AsyncIterator[IncomingShard]:
        """Receive a shard; however the call ends, its worker threads end, too."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._store.receive, principal, dataset_id, sha256))
        try:
            yield await asyncio.shield(opening)
        finally:
            await asyncio.shield(self._release(principal, opening))

    async def _release(self, principal: str, opening: asyncio.Future[IncomingShard]) -> None:
        with suppress(ServiceError):
            await asyncio.to_thread(self._store.release, principal, await opening)

    async def CommitUpload(
        self, request: pb.CommitUploadRequest, context: CallContext
    ) -> pb.CommitUploadResponse:
        """Create a data set from the uploaded shards."""
        info = await asyncio.to_thread(self._store.commit, principal_of(context), request.dataset_id)
        return pb.CommitUploadResponse(dataset=_dataset(info, with_categories=True))

    async def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: CallContext
    ) -> pb.ListDatasetsResponse:
        """List the data sets that the caller can train on, and its quota usage."""
        principal = principal_of(context)
        entries = await asyncio.to_thread(self._library.entries, principal)
        return pb.ListDatasetsResponse(
            datasets=[_dataset(info, with_categories=False) for info in entries],
            byte_count=await asyncio.to_thread(self._store.byte_count, principal),
            max_byte_count=self._store.max_bytes,
        )

    async def GetDataset(self, request: pb.GetDatasetRequest, context: CallContext) -> pb.GetDatasetResponse:
        """Describe one data set."""
        info = await asyncio.to_thread(self._library.get, principal_of(context), request.dataset_id)
        return pb.GetDatasetResponse(dataset=_dataset(info, with_categories=True))

    async def DeleteDataset(
        self, request: pb.DeleteDatasetRequest, context: CallContext
    ) -> pb.DeleteDatasetResponse:
        """Delete one data set or end an upload."""
        await asyncio.to_thread(self._library.delete, principal_of(context), request.dataset_id)
        return pb.DeleteDatasetResponse()


def _byte_count(message: pb.UploadShardRequest) -> int:
    return len(message.data)


def _manifest(message: pb.DatasetManifest) -> Manifest:
    check_count("shards", len(message.shards), MAX_SHARDS, ErrorReason.DATASET_INVALID)
    check_count("categories", len(message.categories), MAX_CATEGORIES, ErrorReason.DATASET_INVALID)
    return Manifest(
        name=message.name,
        sample_count=message.sample_count,
        categories=tuple(message.categories),
        shards=tuple(Shard(shard.sha256, shard.byte_count, shard.sample_count) for shard in message.shards),
    )


def _dataset(info: DatasetInfo, *, with_categories: bool) -> pb.Dataset:
    inputs = info.signature.inputs if info.signature else None
    return pb.Dataset(
        dataset_id=info.dataset_id,
        name=info.name,
        is_complete=info.is_complete,
        is_listed=info.is_listed,
        sample_count=info.sample_count,
        byte_count=info.byte_count,
        has_images=info.signature is not None and info.signature.has_images,
        has_texts=info.signature is not None and info.signature.is_text,
        has_sound=info.signature is not None and info.signature.is_sound,
        inputs=None if inputs is None else _tensor(inputs),
        targets=[_target(name, signature) for name, signature in info.signature.targets.items()]
        if info.signature
        else [],
        categories=map(sendable, info.categories) if with_categories else [],
        stored_at_s=info.stored_at_s,
        problem=sendable(info.problem),
    )


def _target(name: str, signature: TargetSignature) -> pb.DatasetTarget:
    count = None if signature.labels is None else len(signature.labels)
    return pb.DatasetTarget(
        name=name, tensor=_tensor(signature), low=signature.low, high=signature.high, value_count=count
    )


def _tensor(signature: ArraySignature | TargetSignature) -> TensorSpec:
    return TensorSpec(dtype=Dtype.Value(f"DTYPE_{signature.dtype.upper()}"), shape=signature.shape)
