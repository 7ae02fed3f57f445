"""Durable steps: the journal of one trainer, so that a server that takes it over loses no acknowledged call.

    await steps.record(number, kind, batch)     # before a call runs
    steps.applied(compute_s)                    # after it has
    await steps.discard(number)                 # or it has failed, and changed nothing

An entry is durable before its call runs: whoever reads the journal runs the call again, gets the same
result, and gives it to the caller that repeats its number. So a call is applied exactly once, whether its
server died before, during or after it.

# Note: [Calls that end their server]
A call may have ended its server: the kernel's out-of-memory killer came, or native code crashed. Each server
that repeats it would end, too, one after another. Only the last entry can be such a call: every other one has
a successor, which was written after it was done. So an attempt to repeat the last one is counted before it
begins, and forgotten when the server outlives it. After `MOST_ATTEMPTS` that none outlived the call is given
up; its caller got no answer, and may send it again under the same number. One attempt is too few to tell: a
server may also end by chance in this moment, and the last entry may be an acknowledged call.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.errors import ServiceError
from trocar_server.tasks import shielded
from trocar_server.training.files.step_journal import JournalEntry
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.losses.batch import Batch
from trocar_server.training.numbering import KeptCall
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.trainer_calls import Applied

REPLAY_S = 3.0
"""Seconds of computing in the journals of a server's trainers: a takeover of all has to repeat them.

It does so while the machine starts what was lost again, and takes several times as long.
"""
LONGEST_REPLAY_S = 10.0
"""The same in the journal of one trainer, however long its checkpoints take."""
_CHECKPOINT_SHARE = 0.1
"""The most of a trainer's time that checkpoints take below that."""
JOURNAL_BYTES = 1 << 30
"""Bytes of a journal after which a checkpoint ends it."""
MOST_ATTEMPTS = 2
"""Servers that may end while they repeat the last call; see Note: [Calls that end their server]."""
_READ_ENTRIES, _READ_BYTES = 32, 1 << 20
"""Entries are read until they are so many, or have so many bytes."""
_LASTING_REASONS = (
    ErrorReason.NON_FINITE_STEP,
    ErrorReason.TARGET_REJECTED,
    ErrorReason.INPUT_REJECTED,
    ErrorReason.TRAINER_INVALID,
    ErrorReason.MODULE_NOT_CALLED,
    ErrorReason.NOT_DIFFERENTIABLE,
    ErrorReason.STEP_OUT_OF_ORDER,
)
"""Of calls that fail whenever they are repeated, with this batch; other failures pass."""

Counts = tuple[int, int]
"""Steps and updates of a trainer."""
_log = structlog.get_logger("trocar")


@dataclass(eq=False)
class DurableSteps:
    """The journal of one trainer. Belongs to one event loop.

    Args:
        trainer_id: The trainer.
        storage: Stores the journal.
        journals: Those of all trainers of the server; this one adds itself.
    """

    trainer_id: str
    storage: StorageOnDemand
    journals: "WeakSet[DurableSteps]" = field(default_factory=WeakSet)
    checkpoint: int = 0
    """The checkpoint that the entries follow; 0 before the first."""
    counts: Counts | None = (0, 0)
    """Counts of the state that checkpoint and entries make; None if the trainer was changed otherwise."""
    compute_s: float = 0.0
    byte_count: int = 0
    checkpoint_s: float = 0.0
    """Seconds that the last checkpoint took."""

    def __post_init__(self) -> None:
        self.journals.add(self)

    def needs_checkpoint(self, counts: Counts) -> bool:
        """Whether the next call must be preceded by a checkpoint, given the trainer's counts."""
        is_long = self.compute_s > LONGEST_REPLAY_S or self.byte_count > JOURNAL_BYTES
        return counts != self.counts or is_long or self._is_due()

    def _is_due(self) -> bool:
        """Whether all journals together are too long to repeat, and this one is no shorter than the mean."""
        seconds = [journal.compute_s for journal in self.journals]
        total_s = sum(seconds)
        is_worth_it = self.checkpoint_s < _CHECKPOINT_SHARE * self.compute_s
        return total_s > REPLAY_S and is_worth_it and self.compute_s * len(seconds) >= total_s

    async def begin(self, checkpoint: int, counts: Counts) -> None:
        """Begin after a checkpoint; earlier entries are removed."""
        self.checkpoint, self.counts = checkpoint, counts
        self.compute_s, self.byte_count = 0.0, 0
        journal = (await asyncio.to_thread(self.storage.get)).journal
        await asyncio.to_thread(journal.keep_only, self.trainer_id, checkpoint)

    async def record(self, number: int, kind: str, batch: Batch | None) -> None:
        """Write an entry, durably.

        Raises:
            ServiceError: As `StepJournal.write`.
        """
        journal = (await asyncio.to_thread(self.storage.get)).journal
        entry = JournalEntry(number, kind, batch)
        self.byte_count += await shielded(
            asyncio.to_thread(journal.write, self.trainer_id, self.checkpoint, entry)
        )

    def applied(self, counts: Counts, compute_s: float) -> None:
        """Note that the recorded call has been applied.

        Args:
            counts: The trainer's counts after it.
            compute_s: Its seconds.
        """
        self.counts = counts
        self.compute_s += compute_s

    async def discard(self, number: int) -> None:
        """Remove the entry of a call that failed, or was cancelled; a takeover would apply it otherwise."""
        # Shielded as a whole: the call may be cancelled once more while its entry is removed.
        with suppress(ServiceError):
            await shielded(self._discard(number))

    async def _discard(self, number: int) -> None:
        journal = (await asyncio.to_thread(self.storage.get)).journal
        await asyncio.to_thread(journal.discard, self.trainer_id, self.checkpoint, number)

    async def may_repeat(self, number: int) -> bool:
        """Count an attempt to repeat the last call, and return whether it may begin; then `repeated` follows.

        See Note: [Calls that end their server]. Where the disk is full attempts are not counted: the trainer
        must come back all the same.
        """
        journal = (await asyncio.to_thread(self.storage.get)).journal
        begin = partial(journal.begin_attempt, self.trainer_id, self.checkpoint, number)
        with suppress(ServiceError):
            return await asyncio.to_thread(begin) < MOST_ATTEMPTS
        return True

    async def repeated(self, number: int) -> None:
        """Note that the last call was repeated, or has failed, and has not ended the server."""
        journal = (await asyncio.to_thread(self.storage.get)).journal
        await asyncio.to_thread(journal.end_attempts, self.trainer_id, self.checkpoint, number)

    async def has_entry(self, number: int) -> bool:
        """Whether there is an entry of this number after the checkpoint, damaged or not."""
        journal = (await asyncio.to_thread(self.storage.get)).journal
        return await asyncio.to_thread(journal.has, self.trainer_id, self.checkpoint, number)

    async def entries(self, first_number: int) -> AsyncIterator[list[JournalEntry]]:
        """Yield the entries that follow the checkpoint, several small ones at once.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        journal = (await asyncio.to_thread(self.storage.get)).journal
        result = journal.entries(self.trainer_id, self.checkpoint, first_number)
        while several := await asyncio.to_thread(_several, result):
            self.byte_count += sum(entry.byte_count for entry in several)
            yield several


def is_lasting(error: ServiceError) -> bool:
    """Whether a call fails so whenever it is repeated; a trainer that lacked memory need not break again."""
    if error.reason is not ErrorReason.TRAINER_BROKEN:
        return error.reason in _LASTING_REASONS
    cause = error.__cause__
    if isinstance(cause, ServiceError):
        return is_lasting(cause)
    return cause is not None and not is_out_of_memory(cause)


def _several(entries: Iterator[JournalEntry]) -> list[JournalEntry]:
    """Return the next entries, at least one if there is one."""
    result: list[JournalEntry] = []
    for entry in entries:
        result.append(entry)
        if len(result) == _READ_ENTRIES or sum(one.byte_count for one in result) >= _READ_BYTES:
            break
    return result


def results_to_json(kept: Sequence[KeptCall[Applied]]) -> list[dict[str, Any]]:
    """Return the results of calls, for a checkpoint."""
    return [
        {"number": call.number, "kind": call.kind, "update_count": call.result.update_count}
        | {"result": asdict(call.result.result)}
        for call in kept
    ]


def results_from_json(stored: Sequence[Mapping[str, Any]]) -> list[KeptCall[Applied]]:
    """Return the results of calls of a checkpoint."""
    return [
        KeptCall(
            one["number"], one["kind"], Applied(one["number"], _result(one["result"]), one["update_count"])
        )
        for one in stored
    ]


def _result(stored: Mapping[str, Any]) -> StepResult:
    changed = {int(position): count for position, count in stored["changed"].items()}
    return StepResult(**{**stored, "changed": changed})
