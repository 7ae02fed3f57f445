"""`EditStoreService`: named lists of edits, owned by their callers."""

import asyncio
from collections.abc import Sequence

import structlog

from trocar_api.reasons import ErrorReason
from trocar_api.stored_names import is_stored_name
from trocar_api.v1 import edit_store_pb2 as pb
from trocar_api.v1 import edit_store_pb2_grpc
from trocar_api.wire import Chunk
from trocar_server.edit_store import EditStore, StoredEntry
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.operand_checks import check_received, operands_of_edits
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.call.repeated import is_repeated
from trocar_server.rpc.codec.edits import edits_from_wire
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.stored.stored_lists import description_of, edits_of
from trocar_server.rpc.transfer.messages import CallContext, PayloadReceiver

MAX_TENSOR_BYTES = 8 << 20
"""Of one list."""

_log = structlog.get_logger("trocar")


class EditStoreService(edit_store_pb2_grpc.EditStoreServiceServicer):
    """Servicer of stored edits."""

    def __init__(self, engine: Engine, store: EditStore) -> None:
        self._engine = engine
        self._store = store

    async def StoreEdits(self, request: pb.StoreEditsRequest, context: CallContext) -> pb.StoreEditsResponse:
        """Check a list against the model's example input and store it."""
        self._check(request)
        edits = edits_from_wire("edits", request.edits, self._engine.limits.max_edits)
        payloads = _received(edits, request)
        await check_received(operands_of_edits(edits, payloads))
        await self._engine.checks.check_edits(request.model_id, edits)
        entry = await self._put(request, b"".join(payload.tobytes() for payload in payloads), context)
        return pb.StoreEditsResponse(stored=_stored(entry))

    async def ListEdits(self, request: pb.ListEditsRequest, context: CallContext) -> pb.ListEditsResponse:
        """List the caller's stored lists."""
        principal = principal_of(context)
        return await asyncio.to_thread(self._list, principal, request.model_id)

    async def DeleteEdits(
        self, request: pb.DeleteEditsRequest, context: CallContext
    ) -> pb.DeleteEditsResponse:
        """Delete one list."""
        principal = principal_of(context)
        await asyncio.to_thread(self._store.delete, principal, request.model_id, request.name)
        return pb.DeleteEditsResponse()

    async def _put(self, request: pb.StoreEditsRequest, tensors: bytes, context: CallContext) -> StoredEntry:
        """Store a list; a call that was sent before has succeeded where just this list is stored."""
        key = principal_of(context), request.model_id, request.name
        description = description_of(request.model_id, request.name, request.edits)
        try:
            return await asyncio.to_thread(
                self._store.put, *key, description, tensors, is_replacing=request.is_replacing
            )
        except ServiceError as error:
            metadata = context.invocation_metadata() or ()
            if error.reason is not ErrorReason.EDITS_EXIST or not is_repeated(metadata):
                raise
            result = await asyncio.to_thread(self._store.get, *key)
            if (result.description, result.tensors) != (description, tensors):
                raise
            return result

    def _check(self, request: pb.StoreEditsRequest) -> None:
        if not is_stored_name(request.name):
            raise invalid("name", "is 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit")
        self._engine.catalogue.loaded(request.model_id)
        if not request.edits:
            raise invalid("edits", "none given; at least one is needed")

    def _list(self, principal: str, model_id: str) -> pb.ListEditsResponse:
        stored = _listed(self._store.entries(principal, model_id))
        for lost in self._store.unreadable(principal):
            if model_id in ("", lost.model_id) or not lost.model_id:
                stored.append(pb.StoredEdits(model_id=lost.model_id, name=lost.name, problem=lost.problem))
        return pb.ListEditsResponse(stored=stored)


def _listed(entries: Sequence[StoredEntry]) -> list[pb.StoredEdits]:
    result = []
    for entry in entries:
        try:
            result.append(_stored(entry))
        except ServiceError as error:
            _log.warning("stored edits cannot be listed", problem=error.message)
            result.append(pb.StoredEdits(model_id=entry.model_id, name=entry.name, problem=error.message))
    return result


def _stored(entry: StoredEntry) -> pb.StoredEdits:
    return pb.StoredEdits(
        model_id=entry.model_id,
        name=entry.name,
        edits=edits_of(entry),
        byte_count=len(entry.tensors),
        stored_at_s=entry.stored_at_s,
    )


def _received(edits: Sequence[EditRequest], request: pb.StoreEditsRequest) -> list[Payload]:
    counts = [spec.byte_count for edit in edits for spec in edit.edit.operands]
    if sum(counts) > MAX_TENSOR_BYTES:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the tensors of the edits are {sum(counts):,} bytes, the limit of a stored list is "
            f"{MAX_TENSOR_BYTES:,}; send larger ones with each call",
            byte_count=str(sum(counts)),
            limit=str(MAX_TENSOR_BYTES),
        )
    receiver = PayloadReceiver(counts)
    receiver.feed(
        Chunk(chunk.payload_index, chunk.offset_bytes, memoryview(chunk.data)) for chunk in request.chunks
    )
    return receiver.finish()
