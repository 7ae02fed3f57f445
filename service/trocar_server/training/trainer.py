"""Trainer as callers see it: ordered calls, lifetime, fit. Belongs to one event loop.

`core` does the computing, on torch's owner thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, TypeVar, cast

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.schedule.admission import PassThroughput
from trocar_server.engine.schedule.device import device_user
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.tasks import shielded
from trocar_server.training.checks.long_batches import refuse_long_batch
from trocar_server.training.durable_steps import (
    DurableSteps,
    is_lasting,
    results_from_json,
    results_to_json,
)
from trocar_server.training.files.checkpoint_files import PRINCIPAL, Checkpoint, SavedTrainer
from trocar_server.training.files.export import Export, make_export
from trocar_server.training.files.snapshots import snapshot_tensors, snapshot_weights
from trocar_server.training.files.step_journal import JournalEntry
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.losses.batch import Batch
from trocar_server.training.model.description import TrainerDescription
from trocar_server.training.numbering import Numbering
from trocar_server.training.phases import TRAINER, Machine, TrainerPhase, TrainerSignal
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.prediction_count import prediction_count
from trocar_server.training.step.rollback import closed
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.step.trainer_state import TrainerState
from trocar_server.training.trainer_calls import Applied, CallKind, Evaluated

_STATUS_WAIT_S = 0.02
_REPEAT_S = 0.05
"""So long calls of a journal are repeated in one turn of the device, in seconds."""
_log = structlog.get_logger("trocar")
Result = TypeVar("Result")

MakeBatch = Callable[[PassGuard], Batch]
"""Makes a batch on torch's owner thread."""
_RESULTS = "results"
"""Key in a checkpoint's attached data: results of the last numbered calls."""


@dataclass(eq=False)
class Trainer:
    """A trainer.

    Attributes:
        trainer_id: 32 hexadecimal digits.
        principal: Its owner.
        spec: The spec that it was created from.
        core: Runs the steps. Its tensors belong to the owner thread.
        created_at_s: In seconds since 1970.
        ttl_s: Seconds after its last use at which it is closed.
        request_id: Request id of the call that created it.
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
    _machine: Machine[TrainerPhase, TrainerSignal] = field(
        default_factory=lambda: Machine(TRAINER, TrainerPhase.READY)
    )
    stored_facts: dict[str, Any] = field(default_factory=dict)
    """Facts in the trainer's record on disk."""
    restored: dict[str, Any] = field(default_factory=dict)
    """Data attached to the checkpoint from which it was restored."""
    skipped_checkpoints: tuple[int, ...] = ()
    """Damaged checkpoints, newer than the one from which it was restored."""
    notices: tuple[str, ...] = ()
    """Notices for its owner about its restoration, until it is saved again."""
    durable: DurableSteps | None = None
    """Its journal, if calls survive the loss of the server."""
    throughput: PassThroughput = field(default_factory=PassThroughput)
    """Throughput of steps and half steps."""
    eval_throughput: PassThroughput = field(default_factory=PassThroughput)
    _saved_steps: tuple[int, int] | None = (0, 0)
    """`_steps` at the newest checkpoint; None if the trainer was changed otherwise since."""
    _call_count: int = 0
    """Calls that run or wait, apart from those of its model."""
    _reader_count: int = 0
    """Runs that need one version of the weights."""
    _checked_shapes: list[Any] = field(default_factory=list)
    """Of the arguments of the last batch whose time was checked."""
    _described: TrainerDescription | None = None
    _counting: "asyncio.Future[TrainerDescription] | None" = None
    """The running count, or the last one."""
    _remembering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _steps(self) -> tuple[int, int]:
        return self.core.step_count, self.core.update_count

    @property
    def phase(self) -> TrainerPhase:
        """Its phase in this server."""
        return self._machine.phase

    @property
    def is_closed(self) -> bool:
        """Whether it is closed here: by its owner, by expiry or by a takeover."""
        return self.phase is TrainerPhase.CLOSED

    @property
    def state(self) -> str:
        """What clients see: its phase, or `broken` where a failed step left its weights unknown."""
        return "broken" if self.core.is_broken else str(self.phase)

    def send(self, signal: TrainerSignal) -> None:
        """Change its phase, as `phases.TRAINER` says."""
        self._machine.send(signal)

    @property
    def expires_at_s(self) -> float:
        """Expiry time unless it is used before, in seconds since 1970."""
        deployment = self._deployment
        passed_at_s = 0.0 if deployment is None else deployment.pool.used_at_s
        return max(self.used_at_s, passed_at_s) + self.ttl_s

    @property
    def is_in_use(self) -> bool:
        """Whether a fit is active, or a call of the trainer or of its model runs or waits."""
        deployment = self._deployment
        pass_count = 0
        if deployment is not None:
            pass_count = deployment.pool.leased_count + deployment.pool.waiting_count
        return self.phase is not TrainerPhase.READY or self._call_count + pass_count > 0

    @property
    def _deployment(self) -> Deployment | None:
        """Serves its model, for calls with the trainer's id as that of a model."""
        return self.engine.deployments.get(self.trainer_id)

    def use(self) -> None:
        """Renew its time to live."""
        self.used_at_s = time.time()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep it inside the context; its time to live begins at the end."""
        self._call_count += 1
        try:
            yield
        finally:
            self._call_count -= 1
            self.use()

    async def describe(self) -> TrainerDescription:
        """Count parameters and bytes; return the previous counts while the device is busy for long.

        Names and sizes change seldom, and such a call must not wait behind a step.
        """
        is_busy = self.engine.owner.is_busy
        counting = self._counting  # another call may replace it while this one waits
        if counting is None or counting.done():
            counting = self._counting = self.engine.owner.submit(self.core.describe)
        wait_s = _STATUS_WAIT_S if is_busy and self._described is not None else None
        done, _ = await asyncio.wait([counting], timeout=wait_s)
        if done:
            self._described = counting.result()
        assert self._described is not None  # otherwise it was awaited above
        return self._described

    def check_free(self) -> None:
        """Refuse to change the weights during a fit.

        Raises:
            ServiceError: `TRAINER_BUSY`, or `UNKNOWN_TRAINER` if it was closed meanwhile.
        """
        if self.is_closed:
            raise closed()
        if self.phase is not TrainerPhase.READY:
            raise ServiceError(
                ErrorReason.TRAINER_BUSY, "a fit of the trainer is running; wait for it, or cancel it"
            )

    def check_changeable(self) -> None:
        """Refuse to change the weights while a fit does, or while something is computed with one version.

        Raises:
            ServiceError: `TRAINER_BUSY`, or `UNKNOWN_TRAINER` if it was closed meanwhile.
        """
        self.check_free()
        if self._reader_count:
            raise ServiceError(
                ErrorReason.TRAINER_BUSY,
                "text is being generated with the trainer's weights; wait for its end, or close the run",
            )

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Keep the weights inside the context; calls that would change them are refused.

        A step that runs already ends first.

        Raises:
            ServiceError: `TRAINER_BUSY`, a fit is running; `UNKNOWN_TRAINER`, it was closed.
        """
        with self._in_use():
            async with self.numbering.at_rest():
                self.check_free()
                self._reader_count += 1
            try:
                yield
            finally:
                self._reader_count -= 1

    async def forward_backward(
        self, number: int | None, make_batch: MakeBatch, deadline: float | None, *, is_step: bool
    ) -> Applied:
        """Run a batch forward and backward; with `is_step`, update once enough batches are accumulated."""
        kind = CallKind.STEP if is_step else CallKind.FORWARD_BACKWARD
        self._call_count += 1  # as `_in_use`, without a call: steps are the most frequent calls
        try:
            return await self._numbered(number, kind, make_batch, deadline)
        finally:
            self._call_count -= 1
            self.use()

    async def optimizer_step(self, number: int | None, deadline: float | None) -> Applied:
        """Update the weights with the accumulated gradients."""
        with self._in_use():
            return await self._numbered(number, CallKind.OPTIMIZER_STEP, None, deadline)

    async def replay(self) -> None:
        """Repeat the calls of the journal: those after the checkpoint from which it was restored.

        Raises:
            ServiceError: The journal cannot be read, or a call that was applied failed now.
        """
        assert self.durable is not None
        async for entries in self.durable.entries(self.numbering.next_number):
            last = None if await self.durable.has_entry(entries[-1].number + 1) else entries.pop()
            while entries:
                await self._repeat_some(self.durable, entries)
            if last is not None:
                await self._repeat_last(self.durable, last)
                return
        number = self.numbering.next_number
        if await self.durable.has_entry(number):
            self._journal_ended(
                f"the server's journal is damaged at step {number}: that step and those after it are lost, "
                "take them again from there"
            )

    async def _repeat_last(self, durable: DurableSteps, entry: JournalEntry) -> None:
        """Repeat the call that may have ended its server, see Note: [Calls that end their server]."""
        if not await durable.may_repeat(entry.number):
            self._journal_ended(
                f"step {entry.number} is left out, as each server that ran it was killed: the batch may need "
                "more memory than there is, take the step again with a smaller one"
            )
            return
        try:
            await self._repeat_some(durable, [entry])
        except ServiceError as error:
            # The entry of a call that failed was removed, unless its server was lost before.
            if not is_lasting(error):
                raise
            _log.info("a step failed again", trainer_id=self.trainer_id, why=error.message)
        finally:
            await durable.repeated(entry.number)

    def _journal_ended(self, notice: str) -> None:
        """Tell that entries are left; the next call saves a checkpoint, which removes them."""
        self.changed()
        self.notices += (notice,)
        _log.warning("a journal was not repeated to its end", trainer_id=self.trainer_id, why=notice)

    async def _repeat_some(self, durable: DurableSteps, entries: list[JournalEntry]) -> None:
        """Repeat the first of these calls, as many as fit into a turn of the device, and remove them."""
        done: list[Applied] = []
        try:
            await self._on_owner(partial(self._repeat, entries, done), None, [])
        finally:
            await self._note(durable, entries, done)
            del entries[: len(done)]

    async def _note(
        self, durable: DurableSteps, entries: Sequence[JournalEntry], done: Sequence[Applied]
    ) -> None:
        """Note the calls that were repeated: the first of these entries."""
        for entry, applied in zip(entries, done, strict=False):
            async with self.numbering.turn(entry.number, entry.kind) as turn:
                turn.finish(applied)
            durable.applied(self._steps, applied.result.compute_s)

    def _repeat(self, entries: Sequence[JournalEntry], done: list[Applied], guard: PassGuard) -> None:
        """Apply entries in order until `_REPEAT_S` have passed: others wait for the device, too.

        One at a time, hand-overs between threads take longer than small steps on a machine with much to do.
        """
        until = time.monotonic() + _REPEAT_S
        for entry in entries:
            result = self._apply(CallKind(entry.kind), _given(entry.batch), guard)
            done.append(Applied(entry.number, result, self.core.update_count))
            if time.monotonic() > until:
                return

    async def evaluate(self, make_batch: MakeBatch, deadline: float | None) -> Evaluated:
        """Return the loss of a batch in eval mode, without changing any state."""

        def work(guard: PassGuard) -> Evaluated:
            batch = make_batch(guard)
            self.refuse_long(batch, guard)
            result = self.core.evaluate(batch, guard)
            dim = 1 if result.output is None else self.core.class_dim(result.output.ndim)
            return Evaluated(result, prediction_count(self.spec.losses, result.output, batch.targets, dim))

        done: list[Evaluated] = []
        with self._in_use():
            await self._on_owner(work, deadline, done)
        return done[0]

    async def save(self, note: str = "", request_id: str = "") -> Checkpoint:
        """Write a checkpoint: when this returns it survives a crash.

        Args:
            note: Text for people.
            request_id: Of the request; a repeated one gets the first one's checkpoint, while it is kept.

        Raises:
            ServiceError: `STORAGE_FULL`, `STORAGE_UNAVAILABLE`, `TRAINER_BROKEN`, `TRAINER_BUSY`.
        """
        self.check_free()  # a fit saves its own checkpoints, with its position in the data
        with self._in_use():
            return await shielded(self._save(note, request_id))

    async def save_changes(self) -> None:
        """Write an automatic checkpoint, if anything has changed since the last one.

        Raises:
            ServiceError: As `save`.
        """
        if not self.core.is_broken and self._saved_steps != self._steps:
            await self._save(is_automatic=True)

    async def write(
        self,
        state: TrainerState,
        note: str = "",
        fit: Mapping[str, Any] | None = None,
        *,
        is_automatic: bool = True,
        request_id: str = "",
    ) -> Checkpoint:
        """Write a state taken earlier as a checkpoint.

        Args:
            state: The core's state.
            note: Text for people.
            fit: Position of the fit that saves it.
            is_automatic: Whether it was saved without a request; then it displaces no requested checkpoint.
            request_id: Of the request for it.

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
            is_automatic=is_automatic,
            next_number=self.numbering.next_number,
            request_id=request_id,
            attached={
                "fit": fit,
                PRINCIPAL: self.principal,
                **({} if self.durable is None else {_RESULTS: results_to_json(self.numbering.kept())}),
            },
        )
        steps = self._steps
        saved = await asyncio.to_thread(write)
        self._saved_steps = steps
        self.checkpoint_number = saved.number
        self.skipped_checkpoints, self.notices = (), ()
        if self.durable is not None:
            await self.durable.begin(saved.number, steps)
        return saved

    async def restore(self, number: int | None) -> None:
        """Restore a checkpoint; the newest when None.

        Raises:
            ServiceError: `UNKNOWN_CHECKPOINT`, `CHECKPOINT_CORRUPT`, `TRAINER_BUSY`.
        """
        self.check_changeable()
        with self._in_use():
            store = (await asyncio.to_thread(self.storage.get)).checkpoints
            saved = await asyncio.to_thread(store.load, self.trainer_id, number)
            await shielded(self._restore(saved))

    @property
    def fitted_categories(self) -> tuple[str, ...]:
        """Names of the classes of a new head, of the data set of the newest fit; empty when unknown."""
        return tuple((self.stored_facts.get("fit") or {}).get("categories", ()))

    async def remember(self, name: str, value: Any) -> None:
        """Write a fact into the trainer's record, durably; the last write wins.

        Raises:
            ServiceError: `STORAGE_FULL`, `STORAGE_UNAVAILABLE`; in memory it is kept until the server ends.
        """
        self.stored_facts = {**self.stored_facts, name: value}
        store = (await asyncio.to_thread(self.storage.get)).trainers
        async with self._remembering:
            await asyncio.to_thread(store.update, self.trainer_id, self.stored_facts)

    def resume_at(self, saved: SavedTrainer) -> None:
        """Apply the parts of a checkpoint beside the weights."""
        self.restored = dict(saved.attached)
        self.checkpoint_number = saved.checkpoint.number
        self._saved_steps = self._steps
        # Older checkpoints have the number in `attached`.
        self.numbering.begin_at(int(saved.attached.get("next_number", saved.checkpoint.next_number)))
        if self.durable is not None:
            self.numbering.keep(results_from_json(saved.attached.get(_RESULTS, ())))
            self.durable.checkpoint, self.durable.counts = saved.checkpoint.number, self._steps
        self.skipped_checkpoints = saved.skipped
        used = saved.checkpoint
        now = f"the trainer was restored to checkpoint {used.number} (update {used.update_count})"
        self.notices = tuple(f"{problem}; {now}" for problem in saved.problems)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints that can be restored, oldest first."""
        store = (await asyncio.to_thread(self.storage.get)).checkpoints
        return await asyncio.to_thread(store.entries, self.trainer_id)

    async def damaged_checkpoints(self) -> list[tuple[int, str]]:
        """Return the numbers of checkpoints that cannot be restored, and why."""
        store = (await asyncio.to_thread(self.storage.get)).checkpoints
        return await asyncio.to_thread(store.damaged, self.trainer_id)

    async def load_adapter(self, data: bytes, request_id: str = "") -> Checkpoint:
        """Replace the adapter's weights by a PEFT file's, and write a checkpoint.

        Args:
            data: The file.
            request_id: As of `save`.

        Raises:
            ServiceError: `TRAINER_INVALID`, there is no adapter, or the file does not fit it; `TRAINER_BUSY`.
        """
        with self._in_use():
            return await shielded(self._load_adapter(data, request_id))

    async def export_adapter(self) -> tuple[int, Export]:
        """Return the adapter and a new head under PEFT's names, and the update count of the weights.

        Raises:
            ServiceError: `TRAINER_INVALID`, there is no adapter; `TRAINER_BROKEN`.
        """

        def copy() -> tuple[int, Export]:
            tensors, config = self.core.adapter()
            return self.core.update_count, make_export(snapshot_tensors(tensors), adapter_config=config)

        with self._in_use():
            async with self.numbering.at_rest():
                return await self.engine.owner.run(copy)

    async def export(self, *, has_optimizer: bool, is_gradients: bool = False) -> tuple[int, Export]:
        """Return weights or accumulated gradients as one file, and the update count of the weights.

        Raises:
            ServiceError: `TRAINER_BROKEN`, for weights.
        """

        def copy() -> tuple[int, Export]:
            if is_gradients:
                return self.core.update_count, make_export(snapshot_tensors(self.core.gradients()))
            weights = snapshot_weights(self.core)
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

        with self._in_use():
            async with self.numbering.at_rest():
                return await self.engine.owner.run(copy)

    async def _save(self, note: str = "", request_id: str = "", *, is_automatic: bool = False) -> Checkpoint:
        async with self.numbering.at_rest():
            self.check_free()
            if (earlier := await self._saved_for(request_id)) is not None:
                return earlier
            state = await self.engine.owner.run(self.core.state)
            return await self.write(state, note, is_automatic=is_automatic, request_id=request_id)

    async def _saved_for(self, request_id: str) -> Checkpoint | None:
        if not request_id:
            return None
        outcome = (one for one in await self.checkpoints() if one.request_id == request_id)
        return next(outcome, None)

    async def _load_adapter(self, data: bytes, request_id: str) -> Checkpoint:
        async with self.numbering.at_rest():
            self.check_changeable()
            if (earlier := await self._saved_for(request_id)) is not None:
                return earlier
            await self.engine.owner.run(lambda: self.core.load_adapter(data))
            self.changed()
            state = await self.engine.owner.run(self.core.state)
            return await self.write(state, "a loaded adapter", request_id=request_id)

    async def _restore(self, saved: SavedTrainer) -> None:
        async with self.numbering.at_rest():
            self.check_changeable()
            numbers = [checkpoint.number for checkpoint in await self.checkpoints()]
            await self.engine.owner.run(lambda: self.core.load_state(saved.state))
            self.resume_at(saved)
            # A restart goes on from the newest checkpoint, and another server with the journal behind it.
            if self.durable is not None or numbers[-1:] != [saved.checkpoint.number]:
                self.changed()
            if self.durable is not None:
                await self._write_now()

    def changed(self) -> None:
        """Note that neither the newest checkpoint nor the journal makes its state, until it is saved."""
        self._saved_steps = None
        if self.durable is not None:
            self.durable.counts = None

    async def _numbered(
        self, number: int | None, kind: CallKind, make_batch: MakeBatch | None, deadline: float | None
    ) -> Applied:
        async with self.numbering.turn(number, kind) as turn:
            if turn.result is None:
                if self._reader_count or self._machine.phase is not TrainerPhase.READY:
                    self.check_changeable()
                if self.durable is not None:
                    make_batch = await self._recorded(self.durable, turn.number, kind, make_batch, deadline)
                done: list[StepResult] = []
                try:
                    await self._on_owner(partial(self._apply, kind, make_batch), deadline, done)
                finally:
                    if done:  # also if its caller is gone: a late cancellation has not stopped it
                        turn.finish(Applied(turn.number, done[0], self.core.update_count))
                        if self.durable is not None:
                            self.durable.applied(self._steps, done[0].compute_s)
                    elif self.durable is not None:
                        await self.durable.discard(turn.number)
        assert turn.result is not None  # it was known before, or has just finished
        return turn.result

    async def _recorded(
        self,
        durable: DurableSteps,
        number: int,
        kind: CallKind,
        make_batch: MakeBatch | None,
        deadline: float | None,
    ) -> MakeBatch | None:
        """Write a call into the journal, before it runs; returns what makes its batch."""
        batches: list[Batch] = []
        if make_batch is not None:
            await self._on_owner(make_batch, deadline, batches)
        batch = batches[0] if batches else None
        if durable.needs_checkpoint(self._steps):
            began = time.monotonic()
            # A cancelled call must not leave a checkpoint with the journal of the one before.
            await shielded(self._write_now())
            durable.checkpoint_s = time.monotonic() - began
        try:
            await durable.record(number, kind, batch)
        except BaseException:  # the entry of a cancelled call is written all the same
            await durable.discard(number)
            raise
        return _given(batch)

    def _apply(self, kind: CallKind, make_batch: MakeBatch | None, guard: PassGuard) -> StepResult:
        if make_batch is None:
            guard.check()
            return self.core.optimizer_step()
        batch = make_batch(guard)
        values = (*batch.args, *batch.kwargs.values())
        shapes = [*map(getattr, values, repeat("shape"), repeat(None))]
        if None in shapes or shapes != self._checked_shapes:  # lists and flags have none
            self.refuse_long(batch, guard)
            self._checked_shapes = shapes
        if kind is CallKind.STEP:
            return self.core.step(batch, guard)
        return self.core.forward_backward(batch, guard)

    def refuse_long(self, batch: Batch, guard: PassGuard) -> None:
        """Refuse a batch whose forward pass would take too long. Owner thread only.

        Raises:
            ServiceError: `PASS_TOO_LONG`.
        """
        refuse_long_batch(self.engine, self.spec.model_id, batch, guard)

    async def _write_now(self) -> Checkpoint:
        """Write a checkpoint within a turn of a call, or at rest."""
        state = await self.engine.owner.run(self.core.state)
        return await self.write(state)

    async def _on_owner(
        self, work: Callable[[PassGuard], Result], deadline: float | None, done: list[Result]
    ) -> None:
        """Run work on torch's owner thread; `done` gets its result, even if its caller is gone by then."""
        guard = PassGuard(deadline)
        device_user.set(self.trainer_id)

        def run() -> None:
            if self._machine.phase is TrainerPhase.CLOSED:
                raise closed()
            with domain_errors(self.core.hosted):
                done.append(work(guard))

        await self.engine.run(run, guard, deadline)


def _given(batch: Batch | None) -> MakeBatch | None:
    """Return what makes a batch that is there already; None without one."""
    return None if batch is None else lambda _: batch
