"""Faults planted one by one: each is noticed by the sweep of its kind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.orders import fit_calls, server_calls, stored_calls, trainer_calls
from tests.orders.case import Event
from tests.orders.sweep import GAPS, controlled, swept
from trocar_server.app import lifecycle
from trocar_server.engine.host.deployments import Deployments
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.engine.schedule.lease import ReplicaPool
from trocar_server.models import ModelState
from trocar_server.rpc.services import edit_store_service, trainer_service
from trocar_server.training import publishing, trainer, trainers
from trocar_server.training.datasets import DatasetStore
from trocar_server.training.durable_steps import DurableSteps
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.phases import FitSignal
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import Applied

if TYPE_CHECKING:
    from pathlib import Path

    from tests.orders.case import Case
    from tests.orders.sweep import Control

CASES = [*trainer_calls.CASES, *stored_calls.CASES, *server_calls.CASES, *fit_calls.CASES]


async def _nothing(*_: Any) -> None:
    """Stand in for a method that a fault leaves out."""


def _nothing_at_once(*_: Any) -> None:
    """Stand in for a function that a fault leaves out."""


async def _unshielded(work: Any) -> Any:
    return await work


async def _load(self: Any, model_id: str) -> Any:
    """Load a model, which counts as loading for good if the call is cancelled."""
    entry = self._entry_to_load(model_id)
    if model_id not in self._by_id:
        entry.begin()
        self._by_id[model_id] = deployment = await self.build(entry.spec, 1)
        entry.hosted, entry.state = deployment.hosted, ModelState.LOADED
    return entry


async def _control(self: Fits, trainer: Trainer, _command: Any) -> str:
    """Cancel a fit, and acknowledge it even if the fit has stopped before, with its server."""
    run = self._runs[trainer.trainer_id]
    run.send(FitSignal.CANCEL)
    assert run.task is not None
    await asyncio.wait([run.task])
    return "ended"


async def _numbered(self: Trainer, number: Any, kind: Any, make_batch: Any, deadline: Any) -> Any:
    """Run a call, which counts as applied only if its caller has waited for it."""
    async with self.numbering.turn(number, kind) as turn:
        if turn.result is None:
            done: list[Any] = []
            await self._on_owner(partial(self._apply, kind, make_batch), deadline, done)
            turn.finish(Applied(turn.number, done[0], self.core.update_count))
    return turn.result


async def _discard(self: DurableSteps, number: int) -> None:
    """Remove an entry, unless the call is cancelled once more."""
    journal = (await asyncio.to_thread(self.storage.get)).journal
    await asyncio.to_thread(journal.discard, self.trainer_id, self.checkpoint, number)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        what: In words.
        name: Of the case that notices it.
        event: The event that shows it, at some await.
        owner: The class or module with the name that is replaced.
        attribute: That name.
        planted: In its place.
    """

    what: str
    name: str
    event: Event
    owner: Any
    attribute: str
    planted: Any


FAULTS = [
    Fault(
        "the journal keeps a cancelled step", "Train-journal", Event.CANCEL, DurableSteps, "discard", _nothing
    ),
    Fault(
        "the journal keeps a step that is cancelled twice",
        "StepOptimizer-journal",
        Event.TWICE,
        DurableSteps,
        "discard",
        _discard,
    ),
    Fault("a step is applied again", "Train", Event.LATE, Trainer, "_numbered", _numbered),
    Fault("a trainer is half closed", "CloseTrainer", Event.CANCEL, trainers, "shielded", _unshielded),
    Fault("a checkpoint is half restored", "RestoreTrainer", Event.CANCEL, trainer, "shielded", _unshielded),
    Fault(
        "a repeat is not known", "StoreEdits", Event.LATE, edit_store_service, "is_repeated", _nothing_at_once
    ),
    Fault("part of a shard stays", "UploadShard", Event.CANCEL, DatasetStore, "release", _nothing_at_once),
    Fault("a load that is cancelled goes on for good", "LoadModel", Event.CANCEL, Deployments, "load", _load),
    Fault("health does not follow", "Drain-start", Event.LATE, lifecycle.Lifecycle, "_set_health", _nothing),
    Fault("a reservation stays", "Extract", Event.CANCEL, Reservation, "end", _nothing_at_once),
    Fault("a lease stays", "Extract", Event.CANCEL, ReplicaPool, "_give_back", _nothing_at_once),
    Fault("an acknowledged end is lost", "ControlFit-cancel", Event.STOP, Fits, "_control", _control),
    Fault("a model is half removed", "UnpublishModel", Event.CANCEL, publishing, "shielded", _unshielded),
    Fault(
        "a repeated publication conflicts",
        "PublishTrainer",
        Event.LATE,
        trainer_service,
        "is_repeated",
        _nothing_at_once,
    ),
]


def _case(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


def _places(control: Control, event: Event) -> list[tuple[int, int]]:
    """Return every await, and from there to a second event, if there is one, every gap."""
    gaps = GAPS if event is Event.TWICE else GAPS[:1]
    return [(at, gap) for at in range(1, control.await_count + 1) for gap in gaps]


@pytest.mark.parametrize(("name", "event"), sorted({(fault.name, fault.event) for fault in FAULTS}))
def test_where_a_fault_would_show_there_is_none(name: str, event: Event, tmp_path: Path) -> None:
    """Tried at every await, also in the ordinary run: these are the places of faults that there were."""
    case = _case(name)
    control = controlled(case, 0, tmp_path / "control")
    for at, gap in _places(control, event):
        swept(case, control, event, at, 0, tmp_path / f"{at}-{gap}", gap)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_noticed(fault: Fault, tmp_path: Path) -> None:
    case = _case(fault.name)
    control = controlled(case, 0, tmp_path / "control")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault.owner, fault.attribute, fault.planted)
        for at, gap in _places(control, fault.event):
            try:
                swept(case, control, fault.event, at, 0, tmp_path / f"{at}-{gap}", gap)
            except (AssertionError, TimeoutError):
                return
    pytest.fail("no await shows it")
