"""Codec of stored edits: between the store, which keeps opaque bytes, and plans."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from google.protobuf.message import DecodeError

from trocar_api.v1.edit_pb2 import Edit
from trocar_api.v1.edit_store_pb2 import StoreEditsRequest
from trocar_api.v1.tap_pb2 import Tap
from trocar_server.edit_store import EditStore, StoredEntry, corrupt
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.edits import StoredList, edits_from_wire
from trocar_server.rpc.codec.fields import named
from trocar_server.rpc.codec.stored.named_directions import NO_GATES, Gates, NamedDirections, has_directions


class StoredLists:
    """The stored lists that the edits of requests name.

    Args:
        engine: Provides the models and the limit of edits per call.
        store: The edit store.
        directions: Resolves names of directions.
    """

    def __init__(self, engine: Engine, store: EditStore, directions: NamedDirections) -> None:
        self._engine = engine
        self._store = store
        self.directions = directions

    async def find(
        self,
        principal: str,
        model_id: str,
        edits: Sequence[Edit],
        taps: Sequence[Tap] = (),
        gates: Gates = NO_GATES,
    ) -> dict[str, StoredList]:
        """The list of each stored name among the edits of a request, and its directions by their fields.

        Args:
            principal: The caller.
            model_id: The model.
            edits: Of the request.
            taps: Of the request.
            gates: Others than those of edits, by field.

        Raises:
            ServiceError: `UNKNOWN_EDITS`, `EDITS_CORRUPT` or `EDITS_UNAVAILABLE` with the field named;
                `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`; as `NamedDirections.find`.
        """
        result: dict[str, StoredList] = {}
        if gates or has_directions(edits, taps):
            self._engine.catalogue.loaded(model_id)
            result = await self.directions.find(principal, model_id, edits, taps, gates)
        if len(edits) > self._engine.limits.max_edits:  # refused soon
            return result
        for i, edit in enumerate(edits):
            if edit.WhichOneof("operation") != "stored" or edit.stored in result:
                continue
            self._engine.catalogue.loaded(model_id)
            with named(f"edits[{i}].stored"):
                result[edit.stored] = await asyncio.to_thread(self._read, principal, model_id, edit.stored)
        return result

    def _read(self, principal: str, model_id: str, name: str) -> StoredList:
        return list_of(self._store.get(principal, model_id, name))


def description_of(model_id: str, name: str, edits: Sequence[Edit]) -> bytes:
    """Serialised description of edits, without the bytes of their tensors."""
    return StoreEditsRequest(model_id=model_id, name=name, edits=edits).SerializeToString()


def edits_of(entry: StoredEntry) -> Sequence[Edit]:
    """Edits of a list, as they were sent.

    Raises:
        ServiceError: `EDITS_CORRUPT`.
    """
    try:
        return StoreEditsRequest.FromString(entry.description).edits
    except DecodeError:
        raise _of_another_version(entry) from None


def list_of(entry: StoredEntry) -> StoredList:
    """Stored list as included in plans.

    Raises:
        ServiceError: `EDITS_CORRUPT`, it has fields unknown to this server.
    """
    messages = edits_of(entry)
    try:
        edits = edits_from_wire("edits", messages, len(messages))
    except ServiceError:
        raise _of_another_version(entry) from None
    counts = [spec.byte_count for request in edits for spec in request.edit.operands]
    if sum(counts) != len(entry.tensors):
        raise _of_another_version(entry)
    content = hashlib.sha256(hashlib.sha256(entry.description).digest() + entry.tensors).digest()
    return StoredList(_with_name(edits, entry.name), tuple(_split(entry.tensors, counts)), content)


def _with_name(edits: Sequence[EditRequest], name: str) -> tuple[EditRequest, ...]:
    return tuple(replace(request, stored=name) for request in edits)


def _split(content: bytes, counts: Sequence[int]) -> list[Payload]:
    """Copies at separate addresses: torch views them as numbers, and writes need room."""
    payloads, start = [], 0
    for count in counts:
        payloads.append(np.frombuffer(content, np.uint8, count, start).copy())
        start += count
    return payloads


def _of_another_version(entry: StoredEntry) -> ServiceError:
    return corrupt(entry.model_id, entry.name, "they were written by another version of the server")
