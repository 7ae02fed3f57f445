"""Calls of stored edits and of data sets, and their models: entries by name, complete or not."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tests.orders.case import Case, Request, asked
from tests.support.models.tiny_models import Plain
from tests.support.oracles.tiny_training import samples
from tests.support.servers.serving import custom
from tests.support.wire.shards import shard_of
from trocar_api.v1 import dataset_pb2, direction_pb2, edit_pb2
from trocar_api.v1 import edit_store_pb2 as pb
from trocar_server.directions.direction import About, Direction, encoded_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.orders.world import State
    from tests.support.orders.stepped_server import SteppedServer

SETTINGS = {"models": {"plain": custom(Plain, (3, 8, 8))}}
STORE = "EditStoreService/StoreEdits"

# --- Stored edits -------------------------------------------------------------------------------------


def edit(low: float) -> edit_pb2.Edit:
    return edit_pb2.Edit(selector="conv", clamp=edit_pb2.ClampEdit(low=low))


def store(name: str, low: float, *, is_replacing: bool = False) -> pb.StoreEditsRequest:
    return pb.StoreEditsRequest(model_id="plain", name=name, edits=[edit(low)], is_replacing=is_replacing)


def has(name: str, low: float) -> Callable[[State], State]:
    def change(state: State) -> State:
        others = [one for one in state["edits"] if one[1] != name]
        return state | {"edits": sorted([*others, ("plain", name, edit(low).SerializeToString())])}

    return change


def lacks(name: str) -> Callable[[State], State]:
    return lambda state: state | {"edits": [one for one in state["edits"] if one[1] != name]}


async def storing(server: SteppedServer) -> Request:
    await asked(server, STORE, store("one", 1.0))
    return [store("two", 2.0)]


async def replacing(server: SteppedServer) -> Request:
    await asked(server, STORE, store("one", 1.0))
    return [store("one", 2.0, is_replacing=True)]


async def deleting(server: SteppedServer) -> Request:
    await asked(server, STORE, store("one", 1.0))
    await asked(server, STORE, store("two", 1.0))
    return [pb.DeleteEditsRequest(model_id="plain", name="one")]


# --- Directions ---------------------------------------------------------------------------------------

STORE_DIRECTION = "DirectionService/StoreDirection"


def direction(name: str) -> direction_pb2.StoreDirectionRequest:
    vectors = np.arange(4, dtype=np.float64)[None]
    file = encoded_alone(Direction(vectors, np.zeros(1), About("given", "conv")))
    return direction_pb2.StoreDirectionRequest(model_id="plain", name=name, place="conv", file=file)


def has_direction(name: str) -> Callable[[State], State]:
    return lambda state: state | {"directions": sorted([*state["directions"], ("plain", name, "conv")])}


def lacks_direction(name: str) -> Callable[[State], State]:
    return lambda state: state | {"directions": [one for one in state["directions"] if one[1] != name]}


async def storing_direction(server: SteppedServer) -> Request:
    await asked(server, STORE_DIRECTION, direction("one"))
    return [direction("two")]


async def deleting_directions(server: SteppedServer) -> Request:
    await asked(server, STORE_DIRECTION, direction("one"))
    await asked(server, STORE_DIRECTION, direction("two"))
    return [direction_pb2.DeleteDirectionsRequest(model_id="plain", name="one")]


# --- Data sets ----------------------------------------------------------------------------------------

COUNT = 3


def shard(seed: int) -> bytes:
    inputs, targets = samples(COUNT, seed)
    return shard_of(inputs=inputs, targets=targets)


def manifest(name: str, *shards: bytes) -> dataset_pb2.BeginUploadRequest:
    described = [
        dataset_pb2.DatasetShard(sha256=sha256(data), byte_count=len(data), sample_count=COUNT)
        for data in shards
    ]
    return dataset_pb2.BeginUploadRequest(
        manifest=dataset_pb2.DatasetManifest(name=name, sample_count=COUNT * len(shards), shards=described)
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parts(dataset_id: str, data: bytes) -> Request:
    first = dataset_pb2.UploadShardRequest(dataset_id=dataset_id, sha256=sha256(data), data=data[:100])
    rest = (data[100:200], data[200:])
    return [first, *(dataset_pb2.UploadShardRequest(data=one) for one in rest)]


async def began(server: SteppedServer, name: str, *shards: bytes) -> str:
    answer = await asked(server, "DatasetService/BeginUpload", manifest(name, *shards))
    return dataset_pb2.BeginUploadResponse.FromString(answer.replies[0]).dataset_id


async def uploaded(server: SteppedServer, name: str, *shards: bytes) -> str:
    """Upload a data set but for the last call."""
    dataset_id = await began(server, name, *shards)
    for data in shards:
        await asked(server, "DatasetService/UploadShard", *parts(dataset_id, data))
    return dataset_id


async def stored(server: SteppedServer, name: str, *shards: bytes) -> str:
    dataset_id = await uploaded(server, name, *shards)
    await asked(server, "DatasetService/CommitUpload", dataset_pb2.CommitUploadRequest(dataset_id=dataset_id))
    return dataset_id


async def beginning(server: SteppedServer) -> Request:
    await uploaded(server, "old", shard(0))
    return [manifest("new", shard(0), shard(1))]


async def sending(server: SteppedServer) -> Request:
    return parts(await began(server, "new", shard(0), shard(1)), shard(1))


async def committing(server: SteppedServer) -> Request:
    return [dataset_pb2.CommitUploadRequest(dataset_id=await uploaded(server, "new", shard(0), shard(1)))]


async def removing(server: SteppedServer) -> Request:
    await stored(server, "new", shard(0), shard(1))
    return [dataset_pb2.DeleteDatasetRequest(dataset_id=await stored(server, "old", shard(0)))]


def entry(name: str, *, is_complete: bool, count: int = 2 * COUNT) -> Callable[[State], State]:
    def change(state: State) -> State:
        others = [one for one in state["datasets"] if one[0] != name]
        return state | {"datasets": sorted([*others, (name, is_complete, count)])}

    return change


def without(name: str) -> Callable[[State], State]:
    return lambda state: state | {"datasets": [one for one in state["datasets"] if one[0] != name]}


def shard_arrived(state: State) -> State:
    return state | {"shards": sorted([*state["shards"], sha256(shard(1))[:8]])}


CASES = [
    Case(STORE, storing, has("two", 2.0), "", SETTINGS),
    Case(STORE, replacing, has("one", 2.0), "replacing", SETTINGS),
    Case("EditStoreService/DeleteEdits", deleting, lacks("one"), "", SETTINGS),
    Case(STORE_DIRECTION, storing_direction, has_direction("two"), "", SETTINGS),
    Case("DirectionService/DeleteDirections", deleting_directions, lacks_direction("one"), "", SETTINGS),
    Case("DatasetService/BeginUpload", beginning, entry("new", is_complete=False), "", SETTINGS),
    Case("DatasetService/UploadShard", sending, shard_arrived, "", SETTINGS),
    Case("DatasetService/CommitUpload", committing, entry("new", is_complete=True), "", SETTINGS),
    Case("DatasetService/DeleteDataset", removing, without("old"), "", SETTINGS),
]
