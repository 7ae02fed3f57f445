"""Durable steps: the journal of one trainer, so that a server that takes it over loses no acknowledged call.

    await steps.record(number, kind, batch)     # before a call runs
    steps.applied(compute_s)                    # after it has
    await steps.discard(number)                 # or it has failed, and changed nothing

An entry is durable before its call runs: whoever reads the journal runs the call again, gets the same
result, and gives it to the caller that repeats its number. So a call is applied exactly once, whether its
server died before, during or after it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakSet

import structlog

from trocar_server.errors import ServiceError
from trocar_server.training.files.step_journal import JournalEntry
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.losses.batch import Batch
from trocar_server.training.numbering import KeptCall
from trocar_server.training.shielded import shielded
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.trainer_calls import Applied

REPLAY_S = 10.0
"""Seconds of computing in the journals of a server's trainers: a takeover of all has to repeat them."""
_CHECKPOINT_SHARE = 0.1
"""The most of a trainer's time that checkpoints take for that, unless its own journal is too long."""
JOURNAL_BYTES = 1 << 30
"""Bytes of a journal after which a checkpoint ends it."""

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
        is_long = self.compute_s > REPLAY_S or self.byte_count > JOURNAL_BYTES
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
        """Remove the entry of a call that failed; without it a takeover would repeat the failure."""
        journal = (await asyncio.to_thread(self.storage.get)).journal
        with suppress(ServiceError):
            await shielded(asyncio.to_thread(journal.discard, self.trainer_id, self.checkpoint, number))

    async def entries(self, first_number: int) -> AsyncIterator[JournalEntry]:
        """Yield the entries that follow the checkpoint.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        journal = (await asyncio.to_thread(self.storage.get)).journal
        found = journal.entries(self.trainer_id, self.checkpoint, first_number)
        while (entry := await asyncio.to_thread(next, found, None)) is not None:
            yield entry


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
