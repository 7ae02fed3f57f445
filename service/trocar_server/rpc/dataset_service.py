"""`DatasetService`: data sets for training, each its caller's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import dataset_pb2 as pb
from trocar_api.v1 import dataset_pb2_grpc
from trocar_api.v1.tensor_pb2 import Dtype, TensorSpec
from trocar_server.engine.admission import Admission, MethodClass
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.principal import principal_of
from trocar_server.rpc.text import sendable
from trocar_server.training.datasets import (
    ArrayForm,
    DatasetInfo,
    DatasetLibrary,
    IncomingShard,
    Manifest,
    Shard,
    TargetForm,
)


class DatasetService(dataset_pb2_grpc.DatasetServiceServicer):
    """Answers for data sets."""

    def __init__(self, library: DatasetLibrary, admission: Admission) -> None:
        self._library = library
        self._admission = admission
        self._store = library.store

    async def BeginUpload(self, request: pb.BeginUploadRequest, context: Any) -> pb.BeginUploadResponse:
        """Note a manifest and say which shards are missing."""
        begun = await asyncio.to_thread(self._store.begin, principal_of(context), _manifest(request.manifest))
        return pb.BeginUploadResponse(dataset_id=begun.dataset_id, missing_shards=begun.missing)

    async def UploadShard(
        self, request_iterator: AsyncIterator[pb.UploadShardRequest], context: Any
    ) -> pb.UploadShardResponse:
        """Take in one shard; what has not come whole leaves nothing behind."""
        principal = principal_of(context)
        first = await anext(aiter(request_iterator), None)
        if first is None:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message")
        with self._admission.admit(MethodClass.DATA, current_flow()) as held:
            held.reserve(len(first.data) or 1)  # further messages come when this one is on disk
            await self._receive(principal, first, request_iterator)
        return pb.UploadShardResponse()

    async def _receive(
        self,
        principal: str,
        first: pb.UploadShardRequest,
        request_iterator: AsyncIterator[pb.UploadShardRequest],
    ) -> None:
        dataset_id = first.dataset_id
        async with self._receiving(principal, dataset_id, first.sha256) as incoming:
            await asyncio.to_thread(self._store.write, incoming, first.data)
            async for message in request_iterator:
                if message.dataset_id or message.sha256:
                    raise invalid("dataset_id", "it and sha256 come with the first message only")
                await asyncio.to_thread(self._store.write, incoming, message.data)
            await asyncio.to_thread(self._store.keep, principal, dataset_id, incoming)

    @asynccontextmanager
    async def _receiving(self, principal: str, dataset_id: str, sha256: str) -> AsyncIterator[IncomingShard]:
        """Take in a shard; however the call ends, threads that work for it come to their end, too."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._store.receive, principal, dataset_id, sha256))
        try:
            yield await asyncio.shield(opening)
        finally:
            await asyncio.shield(self._release(principal, opening))

    async def _release(self, principal: str, opening: asyncio.Future[IncomingShard]) -> None:
        with suppress(ServiceError):
            await asyncio.to_thread(self._store.release, principal, await opening)

    async def CommitUpload(self, request: pb.CommitUploadRequest, context: Any) -> pb.CommitUploadResponse:
        """Make a data set of what was uploaded."""
        info = await asyncio.to_thread(self._store.commit, principal_of(context), request.dataset_id)
        return pb.CommitUploadResponse(dataset=_dataset(info, with_categories=True))

    async def ListDatasets(self, request: pb.ListDatasetsRequest, context: Any) -> pb.ListDatasetsResponse:
        """List what the caller can train on, and what he takes of his limit."""
        principal = principal_of(context)
        found = await asyncio.to_thread(self._library.entries, principal)
        return pb.ListDatasetsResponse(
            datasets=[_dataset(info, with_categories=False) for info in found],
            byte_count=await asyncio.to_thread(self._store.byte_count, principal),
            max_byte_count=self._store.max_bytes,
        )

    async def GetDataset(self, request: pb.GetDatasetRequest, context: Any) -> pb.GetDatasetResponse:
        """Describe one data set."""
        info = await asyncio.to_thread(self._library.get, principal_of(context), request.dataset_id)
        return pb.GetDatasetResponse(dataset=_dataset(info, with_categories=True))

    async def DeleteDataset(self, request: pb.DeleteDatasetRequest, context: Any) -> pb.DeleteDatasetResponse:
        """Delete one data set or end an upload."""
        await asyncio.to_thread(self._library.delete, principal_of(context), request.dataset_id)
        return pb.DeleteDatasetResponse()


def _manifest(message: pb.DatasetManifest) -> Manifest:
    return Manifest(
        name=message.name,
        sample_count=message.sample_count,
        categories=tuple(message.categories),
        shards=tuple(Shard(shard.sha256, shard.byte_count, shard.sample_count) for shard in message.shards),
    )


def _dataset(info: DatasetInfo, *, with_categories: bool) -> pb.Dataset:
    inputs = info.form.inputs if info.form else None
    return pb.Dataset(
        dataset_id=info.dataset_id,
        name=info.name,
        is_complete=info.is_complete,
        is_listed=info.is_listed,
        sample_count=info.sample_count,
        byte_count=info.byte_count,
        has_images=info.form is not None and inputs is None,
        inputs=None if inputs is None else _tensor(inputs),
        targets=[_target(name, form) for name, form in info.form.targets.items()] if info.form else [],
        categories=map(sendable, info.categories) if with_categories else [],
        stored_at_s=info.stored_at_s,
    )


def _target(name: str, form: TargetForm) -> pb.DatasetTarget:
    count = None if form.labels is None else len(form.labels)
    return pb.DatasetTarget(name=name, tensor=_tensor(form), low=form.low, high=form.high, value_count=count)


def _tensor(form: ArrayForm | TargetForm) -> TensorSpec:
    return TensorSpec(dtype=Dtype.Value(f"DTYPE_{form.dtype.upper()}"), shape=form.shape)
