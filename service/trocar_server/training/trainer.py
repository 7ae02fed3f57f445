"""One trainer as callers see it: its calls in order, its life, its fit. Belongs to one event loop.

The work itself is `core`'s, on the thread that owns torch.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from functools import partial
from typing import Any, TypeVar, cast

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.engine.passes import domain_errors
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.batch import Batch
from trocar_server.training.checkpoint_files import Checkpoint, SavedTrainer
from trocar_server.training.core import TrainerCore
from trocar_server.training.counting import correct_count
from trocar_server.training.export import Export, make_export
from trocar_server.training.numbering import Numbering
from trocar_server.training.snapshots import snapshot_state_dict, snapshot_tensors
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.state import TrainerState
from trocar_server.training.step_result import EvalResult, StepResult
from trocar_server.training.storage import StorageOnDemand

Result = TypeVar("Result")

MakeBatch = Callable[[PassGuard], Batch]
"""Makes a batch on the thread that owns torch."""


@unique
class TrainerActivity(StrEnum):
    """What a trainer does."""

    READY = "ready"
    FITTING = "fitting"
    PAUSED = "paused"
    BROKEN = "broken"


@unique
class Kind(StrEnum):
    """Numbered calls."""

    STEP = "a step"
    FORWARD_BACKWARD = "a forward and backward pass"
    OPTIMIZER_STEP = "an optimizer step"


@dataclass(frozen=True)
class Applied:
    """What became of a numbered call."""

    number: int
    result: StepResult
    update_count: int
    """Updates of the weights by then."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation gave."""

    result: EvalResult
    correct_count: int | None
    """Right predictions, where there are class indices to compare with."""


@dataclass(eq=False)
class Trainer:
    """A trainer.

    Attributes:
        trainer_id: 32 hexadecimal digits.
        principal: Whose it is.
        spec: As it was made.
        core: What computes. Its tensors belong to the owner thread.
        created_at_s: In seconds since 1970.
        ttl_s: Seconds after its last use at which it is closed.
        request_id: Of the call that made it.
    """

    trainer_id: str
    principal: str
    spec: TrainerSpec
    core: TrainerCore
    engine: Engine
    storage: StorageOnDemand
    created_at_s: float
    ttl_s: float
    request_id: str = ""
    numbering: Numbering[Applied] = field(default_factory=Numbering[Applied])
    used_at_s: float = field(default_factory=time.time)
    checkpoint_number: int | None = None
    activity: TrainerActivity = TrainerActivity.READY
    """`FITTING` or `PAUSED` while there is a fit."""
    stored_facts: dict[str, Any] = field(default_factory=dict)
    """What the trainer's record says."""
    restored: dict[str, Any] = field(default_factory=dict)
    """What came with the checkpoint from which it was restored."""
    is_closed: bool = False

    @property
    def state(self) -> TrainerActivity:
        """What it does now."""
        if self.core.is_broken:
            return TrainerActivity.BROKEN
        return self.activity

    @property
    def expires_at_s(self) -> float:
        """When it is closed unless it is used."""
        return self.used_at_s + self.ttl_s

    def use(self) -> None:
        """Renew its time to live."""
        self.used_at_s = time.time()

    def check_free(self) -> None:
        """Refuse to change the weights while a fit does.

        Raises:
            ServiceError: `TRAINER_BUSY`, or `UNKNOWN_TRAINER` when it was closed meanwhile.
        """
        if self.is_closed:
            raise ServiceError(ErrorReason.UNKNOWN_TRAINER, "the trainer was closed")
        if self.activity is not TrainerActivity.READY:
            raise ServiceError(
                ErrorReason.TRAINER_BUSY, "a fit of the trainer is not at its end; wait for it, or cancel it"
            )

    async def forward_backward(
        self, number: int | None, make_batch: MakeBatch, deadline: float | None, *, is_step: bool
    ) -> Applied:
        """Run a batch forwards and backwards, and with `is_step` update when enough were accumulated."""

        def work(guard: PassGuard) -> StepResult:
            batch = make_batch(guard)
            return self.core.step(batch, guard) if is_step else self.core.forward_backward(batch, guard)

        return await self._numbered(number, Kind.STEP if is_step else Kind.FORWARD_BACKWARD, work, deadline)

    async def optimizer_step(self, number: int | None, deadline: float | None) -> Applied:
        """Update the weights with the gradients that are there."""
        return await self._numbered(
            number, Kind.OPTIMIZER_STEP, lambda _: self.core.optimizer_step(), deadline
        )

    async def evaluate(self, make_batch: MakeBatch, deadline: float | None) -> Evaluated:
        """Return the loss of a batch in eval mode; nothing changes."""
        self.use()

        def work(guard: PassGuard) -> Evaluated:
            batch = make_batch(guard)
            result = self.core.evaluate(batch, guard)
            return Evaluated(result, correct_count(self.spec.losses, result.output, batch.targets))

        return await self._on_owner(work, deadline)

    async def save(self, note: str = "") -> Checkpoint:
        """Write a checkpoint: when this returns it survives a crash.

        Raises:
            ServiceError: `STORAGE_FULL`, `STORAGE_UNAVAILABLE`, `TRAINER_BROKEN`, `TRAINER_BUSY`.
        """
        self.use()
        self.check_free()  # a fit's own checkpoints know its place in the data
        async with self.numbering.at_rest():
            state = await self.engine.owner.run(self.core.state)
            return await self.write(state, note)

    async def write(
        self, state: TrainerState, note: str = "", fit: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Write a state that was taken before.

        Args:
            state: Of the core.
            note: For people.
            fit: The place of the fit that saves it.

        Raises:
            ServiceError: As `save`.
        """
        store = (await asyncio.to_thread(self.storage.get)).checkpoints
        write = partial(
            store.save,
            self.trainer_id,
            state,
            update_count=cast("dict[str, int]", state.facts["counts"])["update_count"],
            note=note,
            is_automatic=fit is not None,
            attached={"next_number": self.numbering.next_number, "fit": fit},
        )
        saved = await asyncio.to_thread(write)
        self.checkpoint_number = saved.number
        return saved

    async def restore(self, number: int | None) -> None:
        """Go back to a checkpoint; the newest when None.

        Raises:
            ServiceError: `UNKNOWN_CHECKPOINT`, `CHECKPOINT_CORRUPT`, `TRAINER_BUSY`.
        """
        self.use()
        self.check_free()
        store = (await asyncio.to_thread(self.storage.get)).checkpoints
        saved = await asyncio.to_thread(store.load, self.trainer_id, number)
        async with self.numbering.at_rest():
            self.check_free()
            await self.engine.owner.run(lambda: self.core.load_state(saved.state))
            self.resume_at(saved)

    async def remember(self, name: str, value: Any) -> None:
        """Write something into the trainer's record, durably; None takes it out."""
        self.stored_facts = {**self.stored_facts, name: value}
        if value is None:
            del self.stored_facts[name]
        store = (await asyncio.to_thread(self.storage.get)).trainers
        await asyncio.to_thread(store.update, self.trainer_id, self.stored_facts)

    def resume_at(self, saved: SavedTrainer) -> None:
        """Take over what a checkpoint says beside the weights."""
        self.restored = dict(saved.attached)
        self.checkpoint_number = saved.checkpoint.number
        self.numbering.begin_at(int(saved.attached.get("next_number", 0)))

    async def checkpoints(self) -> list[Checkpoint]:
        """Return what can be restored, oldest first."""
        store = (await asyncio.to_thread(self.storage.get)).checkpoints
        return await asyncio.to_thread(store.entries, self.trainer_id)

    async def export(self, *, has_optimizer: bool, is_gradients: bool = False) -> tuple[int, Export]:
        """Return weights, or the gradients that wait, as one file, and the updates that weights have seen."""
        self.use()

        def copy() -> tuple[int, Export]:
            if is_gradients:
                return self.core.update_count, make_export(snapshot_tensors(self.core.gradients()))
            weights = snapshot_state_dict(self.core.hosted.module)
            optimizer = None
            if has_optimizer:
                prefix = "optimizer/"
                tensors = self.core.state().tensors
                optimizer = {
                    name.removeprefix(prefix).replace("/", "."): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
            return self.core.update_count, make_export(weights, None, optimizer)

        async with self.numbering.at_rest():
            return await self.engine.owner.run(copy)

    async def _numbered(
        self,
        number: int | None,
        kind: Kind,
        work: Callable[[PassGuard], StepResult],
        deadline: float | None,
    ) -> Applied:
        self.use()
        async with self.numbering.turn(number, kind) as turn:
            if turn.result is None:
                self.check_free()
                result = await self._on_owner(work, deadline)
                turn.finish(Applied(turn.number, result, self.core.update_count))
        assert turn.result is not None  # it was known, or is finished
        return turn.result

    async def _on_owner(self, work: Callable[[PassGuard], Result], deadline: float | None) -> Result:
        guard = PassGuard(deadline)

        def run() -> Result:
            with domain_errors(self.core.hosted):
                return work(guard)

        return await self.engine.run(run, guard, deadline)
