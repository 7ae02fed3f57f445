"""Durable steps: how long the journals of a server's trainers may become."""

from typing import Any
from weakref import WeakSet

import pytest

from trocar_server.training.durable_steps import JOURNAL_BYTES, LONGEST_REPLAY_S, REPLAY_S, DurableSteps

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
