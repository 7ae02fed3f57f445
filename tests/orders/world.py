"""What can be seen of a server: its state, as its callers are told it, and what it holds inside."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2

from tests.support.orders.stepped_server import SteppedServer, stepped_server
from tests.support.servers.footprint import hook_count
from trocar_api.v1 import dataset_pb2, direction_pb2, edit_store_pb2, model_pb2, server_pb2, trainer_pb2
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.phases import HELD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trocar_server.training.trainer import Trainer

State = dict[str, Any]
"""What callers are told: trainers, checkpoints, edits, data sets, models, drain; without ids and times."""

_ID = re.compile(r"[0-9a-f]{32,64}")
_NUMBER = re.compile(r"[0-9]{4,}")
_SETTLE_S = 60.0


async def look(server: SteppedServer) -> State:
    """Return the state of a server, once no fit runs; held and paused ones stay so."""
    ask = server.door.ask
    await fits_rest(server)
    datasets = await ask("DatasetService/ListDatasets", dataset_pb2.ListDatasetsRequest())
    edits = await ask("EditStoreService/ListEdits", edit_store_pb2.ListEditsRequest())
    directions = await ask("DirectionService/ListDirections", direction_pb2.ListDirectionsRequest())
    models = await ask("ModelService/ListModels", model_pb2.ListModelsRequest())
    health = await ask("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest())
    drain = await ask("ServerService/Drain", server_pb2.DrainRequest())
    await ask("TrainerService/ListTrainers", trainer_pb2.ListTrainersRequest())
    fits = [await fit_events(server, one) for one in server.app.trainers.all()]
    told = model_pb2.ListModelsResponse.FromString(models.replies[0]).models
    return {
        "trainers": sorted([await trainer_state(one) for one in server.app.trainers.all()]),
        "fits": sorted(filter(None, fits)),
        "unreadable": len(server.app.trainers.unreadable()),
        "datasets": sorted(
            (one.name, one.is_complete, one.sample_count)
            for one in dataset_pb2.ListDatasetsResponse.FromString(datasets.replies[0]).datasets
        ),
        "shards": sorted(
            path.name[:8] for path in server.app.lifecycle.data_dir.glob("datasets/owners/*/shards/*")
        ),
        "edits": sorted(
            (one.model_id, one.name, one.edits[0].SerializeToString())
            for one in edit_store_pb2.ListEditsResponse.FromString(edits.replies[0]).stored
        ),
        "directions": sorted(
            (one.model_id, one.name, one.place)
            for one in direction_pb2.ListDirectionsResponse.FromString(directions.replies[0]).directions
        ),
        "models": {one.model_id: one.state for one in told if not _ID.fullmatch(one.model_id)},
        "is_serving": health_pb2.HealthCheckResponse.FromString(health.replies[0]).status == 1,
        "is_draining": server_pb2.DrainResponse.FromString(drain.replies[0]).is_draining,
    }


async def fits_rest(server: SteppedServer) -> None:
    """Wait until no fit runs."""
    fits = server.app.fits
    until = asyncio.get_running_loop().time() + _SETTLE_S
    while asyncio.get_running_loop().time() < until:
        busy = [one for one in server.app.trainers.all() if str(one.state) == "fitting"]
        runs = [fits._runs.get(one.trainer_id) for one in busy]
        if all(run is not None and run.phase in HELD for run in runs):
            return
        await asyncio.sleep(0.1)


async def fit_events(server: SteppedServer, trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return the events of a trainer's fits, by kind and step, after a check that their numbers are in order.

    Where a pause or its end comes between the others is a matter of chance; and so are the checkpoints, and
    the times at which features are laid out, of a fit that was resumed.
    """
    if trainer.stored_facts.get("fit") is None:
        return []
    events = (await server.app.fits._logs.of(trainer.trainer_id)).since(0)
    assert [event.number for event in events] == list(range(len(events)))
    told = [one for one in events if one.kind not in ("cache", "checkpoint")]
    return sorted((one.kind, *map(str, map(one.facts.get, ("step", "epoch", "loss")))) for one in told)


async def trainer_state(trainer: Trainer) -> tuple[Any, ...]:
    """Return what makes a trainer: its next number, updates, accumulated batches, weights, checkpoints."""
    checkpoints = [(saved.number, saved.update_count, saved.note) for saved in await trainer.checkpoints()]
    core = trainer.core
    return (
        trainer.numbering.next_number,
        core.update_count,
        core.accumulated_count,
        weights_digest(trainer),
        tuple(one for one in checkpoints if one[2]),
        str(trainer.state),
    )


def weights_digest(trainer: Trainer) -> str:
    """Return a digest of the weights, buffers included."""
    digest = hashlib.sha256()
    for name, value in trainer.core.module.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]


def files(folder: Path) -> set[str]:
    """Return the files below a folder, without ids, and without the numbers of checkpoints and steps."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
    return {_NUMBER.sub("#", _ID.sub("#", name)) for name in names}


def copied(folder: Path, copy: Path) -> None:
    """Copy a folder as it is now; names of one file stay names of one file."""
    copies: dict[int, Path] = {}
    for path in sorted(folder.rglob("*")):
        target, inode = copy / path.relative_to(folder), path.stat().st_ino
        if path.is_dir():
            target.mkdir(parents=True)
        elif inode in copies:
            os.link(copies[inode], target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            copies[inode] = Path(shutil.copy(path, target))


async def settled(before: set[asyncio.Task[Any]]) -> None:
    """Wait until no task is left but those of before, or for a while."""
    until = asyncio.get_running_loop().time() + _SETTLE_S
    while asyncio.get_running_loop().time() < until:
        others = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not others:
            return
        await asyncio.wait(others, timeout=1.0)


def leaks(server: SteppedServer, before: set[asyncio.Task[Any]]) -> list[str]:
    """Return what ended calls have left behind: tasks, reservations, leases, hooks, waiting calls."""
    app, left = server.app, list[str]()
    if tasks := asyncio.all_tasks() - before - {asyncio.current_task()}:
        left.append(f"tasks: {[one.get_coro() for one in tasks]}")
    if app.engine.caches.count or app.engine.caches.byte_count:
        left.append(f"keys and values of {app.engine.caches.count} texts")
    if any(app.engine.admission.reserved()) or app.engine.admission.flows():
        left.append(f"reserved: {app.engine.admission.reserved()} {app.engine.admission.flows()}")
    for name, deployment in app.engine.deployments.items():
        pool = deployment.pool
        if pool.leased_count or pool.waiting_count:
            left.append(f"leases of {name}: {pool.leased_count}, waiting {pool.waiting_count}")
        left += [f"hooks of {name}" for replica in pool.free if hook_count(replica.module)]
    for trainer in app.trainers.all():
        numbering = trainer.numbering
        if trainer.is_in_use and str(trainer.state) == "ready":
            left.append("a trainer counts as used")
        if numbering._lock.locked() or numbering._waiting or numbering._present:
            left.append("a trainer's numbering is not at rest")
    if app.rpc.running.calls or any(not call.task.done() for call in server.door.calls):
        left.append("running calls")
    return left


@asynccontextmanager
async def served(
    folder: Path, name: str, *, is_shared: bool = False, **settings: Any
) -> AsyncIterator[SteppedServer]:
    """Start a server on a folder; of several that share trainers, one that takes over the others'."""
    owners = OwnerFolders(folder / "owners", name) if is_shared else None
    async with stepped_server(folder / "data", owners=owners, **settings) as server:
        if owners is not None:
            for other in owners.others():
                for trainer_id in owners.trainer_ids(other):
                    await server.app.trainers.take_over(other, trainer_id)
        yield server
