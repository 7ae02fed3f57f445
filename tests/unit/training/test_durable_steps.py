"""Durable steps: how long the journals of a server's trainers may become."""

import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from tests.unit.training.stores import ID, with_trainer
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.durable_steps import (
    JOURNAL_BYTES,
    LONGEST_REPLAY_S,
    REPLAY_S,
    DurableSteps,
    results_from_json,
    results_to_json,
)
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.losses.batch import Batch
from trocar_server.training.numbering import KeptCall
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.trainer_calls import Applied

STORAGE: Any = None  # asked for files only


def journals(*seconds: float) -> list[DurableSteps]:
    shared: WeakSet[DurableSteps] = WeakSet()
    return [DurableSteps(str(index), STORAGE, shared, compute_s=one) for index, one in enumerate(seconds)]


@pytest.mark.parametrize(
    ("seconds", "due"),
    [
        ((REPLAY_S,), [False]),
        ((REPLAY_S + 1,), [True]),
        ((1.2, 1.2, 0.3), [False, False, False]),
        ((1.2, 1.2, 0.9), [True, True, False]),  # those that are no shorter than the mean
        ((0.3,) * 12, [True] * 12),
    ],
)
def test_all_journals_of_a_server_together_are_kept_short(seconds: Any, due: list[bool]) -> None:
    assert [journal.needs_checkpoint((0, 0)) for journal in journals(*seconds)] == due


def test_trainers_of_slow_checkpoints_write_them_less_often() -> None:
    slow, other = journals(LONGEST_REPLAY_S - 2, LONGEST_REPLAY_S - 2)
    slow.checkpoint_s = 1.0
    assert (slow.needs_checkpoint((0, 0)), other.needs_checkpoint((0, 0))) == (False, True)
    slow.compute_s = LONGEST_REPLAY_S + 0.1
    assert slow.needs_checkpoint((0, 0))


def test_closed_trainers_do_not_count() -> None:
    kept, closed = journals(2.0, 2.0)
    assert kept.needs_checkpoint((0, 0))
    del closed
    assert not kept.needs_checkpoint((0, 0))


def test_a_changed_trainer_and_a_large_journal_need_a_checkpoint() -> None:
    (journal,) = journals(0.0)
    assert journal.needs_checkpoint((1, 1))
    journal.byte_count = JOURNAL_BYTES + 1
    assert journal.needs_checkpoint((0, 0))


async def test_the_next_server_reads_what_was_recorded_a_few_at_a_time(tmp_path: Path) -> None:
    storage = StorageOnDemand(tmp_path, keep=2)
    with_trainer(storage.get())
    steps = DurableSteps(ID, storage)
    for number in range(5, 45):
        await steps.record(number, "a step", Batch((torch.full((2,), float(number)),), size=2))
    await steps.record(45, "a step", Batch((torch.zeros(1 << 19),), size=1))  # 2 MiB
    await steps.record(46, "an update", None)
    await steps.discard(46)
    await steps.discard(46)  # it is gone already
    again = DurableSteps(ID, storage)
    found = [several async for several in again.entries(5)]
    assert [entry.number for several in found for entry in several] == list(range(5, 46))
    assert [len(several) for several in found] == [32, 9]
    assert again.byte_count == 40 * 8 + (2 << 20)
    assert all(entry.batch is not None for several in found for entry in several)
    storage.close()


async def test_a_checkpoint_ends_the_journal_before_it(tmp_path: Path) -> None:
    storage = StorageOnDemand(tmp_path, keep=2)
    with_trainer(storage.get())
    steps = DurableSteps(ID, storage, compute_s=4.0)
    await steps.record(0, "a step", None)
    steps.applied((1, 1), 0.5)
    assert (steps.counts, steps.compute_s) == ((1, 1), 4.5)
    await steps.begin(1, (1, 1))
    assert (steps.checkpoint, steps.compute_s, steps.byte_count) == (1, 0.0, 0)
    assert [several async for several in DurableSteps(ID, storage).entries(0)] == []
    await steps.record(1, "a step", None)
    assert [[entry.number for entry in several] async for several in steps.entries(1)] == [[1]]
    storage.close()


async def test_a_call_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    storage = StorageOnDemand(tmp_path, keep=2)
    with_trainer(storage.get())
    steps = DurableSteps("f" * 32, storage)
    with pytest.raises(ServiceError) as error:
        await steps.record(0, "a step", None)
    assert error.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert steps.byte_count == 0
    storage.close()


def test_results_of_calls_come_back_from_a_checkpoint() -> None:
    result = StepResult(
        0.1, {"ce": 0.25}, [0.1, 1e-3], 2.0**-30, {0: 3, 12: 1 << 40}, True, False, 8, 0.5, 7, 9
    )
    kept = [
        KeptCall(7, "a step", Applied(7, result, 3)),
        KeptCall(8, "an update", Applied(8, StepResult(0.5), 4)),
    ]
    found = results_from_json(json.loads(json.dumps(results_to_json(kept))))
    assert repr(found) == repr(kept).replace("learning_rates=()", "learning_rates=[]")
