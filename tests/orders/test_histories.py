"""Histories of calls that overlap, each kind against its model: see `history.py` and `histories_*.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.orders.histories_fits import Controls
from tests.orders.histories_server import Configuration, Engine, Streams
from tests.orders.histories_stored import Edits, Uploads
from tests.orders.histories_trainers import Routing, Steps
from tests.orders.history import History, run_histories
from trocar_api.v1 import fit_pb2
from trocar_server.app.lifecycle import Lifecycle
from trocar_server.edit_store.edit_store import EditStore
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.lease import ReplicaPool
from trocar_server.training.datasets.layout import DatasetLayout
from trocar_server.training.durable_steps import DurableSteps
from trocar_server.training.fit.fit_run import FitRun
from trocar_server.training.numbering import Numbering

KINDS = (Engine, Steps, Controls, Edits, Uploads, Streams, Configuration, Routing)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_calls_that_overlap(kind: type[History]) -> None:
    run_histories(kind)


async def _applied_nothing(*_: Any) -> list[str]:
    """Stand in for a method that says that it is done."""
    return []


def _resume_with_nothing(statistics: Any, *_: Any) -> None:
    statistics._entries.clear()


def _drop_all_shards(layout: Any, principal: str) -> None:
    for path in layout.folder.glob("owners/*/shards/*"):
        path.unlink()


@dataclass(frozen=True)
class Fault:
    """A planted fault, and a history that meets it.

    Attributes:
        kind: Of histories.
        replaced: What is replaced, its attribute, and by what.
        rules: Rules with their arguments; all calls end after each of them.
    """

    kind: type[History]
    replaced: tuple[Any, str, Any]
    rules: tuple[tuple[str, dict[str, Any]], ...]

    def replay(self, seed: int) -> None:
        """Follow the rules in one order of the loop."""
        history = self.kind()
        history.begin(seed=seed)
        try:
            for name, given in self.rules:
                getattr(history, name)(**given)
                history.rest()
        finally:
            history.teardown()


FAULTS = [
    Fault(
        Edits,
        (EditStore, "delete", lambda *_: None),
        (("store", {"name": "one", "low": 1, "is_replacing": False}), ("delete", {"name": "one"})),
    ),
    Fault(
        Uploads,
        (DatasetLayout, "drop_unused_shards", _drop_all_shards),
        (("upload", {"name": "a"}), ("upload", {"name": "b"}), ("delete", {"name": "a"})),
    ),
    Fault(
        Streams,
        (StreamStatistics, "_resume", _resume_with_nothing),
        (("stream", {"after": 0, "count": 3}), ("stream", {"after": 3, "count": 2})),
    ),
    Fault(
        Controls,
        (FitRun, "remember", _applied_nothing),
        (("start", {}), ("control", {"command": fit_pb2.FIT_COMMAND_PAUSE}), ("restart", {})),
    ),
    Fault(Configuration, (Lifecycle, "reload", _applied_nothing), (("reload", {"name": "other weights"}),)),
    Fault(Routing, (DurableSteps, "record", _applied_nothing), (("step", {}), ("lose", {"is_stop": False}))),
]
"""One of each kind that has no history of its own below."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.__name__)
def test_a_planted_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.replay(0)
    monkeypatch.setattr(*fault.replaced)
    with pytest.raises(AssertionError):
        fault.replay(0)


SEEDS = range(5)


def hand_over(seed: int) -> None:
    """Cut a call off when it has been given a replica, and has not gone on yet."""
    history = Engine()
    history.begin(seed=seed)
    (deployment,) = history.server.app.engine.deployments.values()

    lease = deployment.pool.lease(None)

    async def cut() -> None:
        await lease.__aexit__(None, None, None)
        history.open[0][1].cancel()

    try:
        history.run(lease.__aenter__())
        history.extract(0)
        while not deployment.pool.waiting_count:
            history.go_on(count=1)
        history.run(cut())
    finally:
        history.teardown()


def two_steps(seed: int) -> None:
    """Send the second step before the first has ended, and the first once more."""
    history = Steps()
    history.begin(seed=seed)
    try:
        history.step()
        history.step()
        history.cut_off(number=0, is_lost=False)
        history.rest()
        history.weights_are_those_of_the_steps()
    finally:
        history.teardown()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replica_that_is_lost_in_a_hand_over_is_noticed(seed: int) -> None:
    hand_over(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaPool, "_return", lambda *_: None)
        with pytest.raises(AssertionError, match="leases of plain: 1"):
            hand_over(seed)


def is_noticed(seed: int) -> bool:
    """Whether two steps of this order of the loop show a fault."""
    try:
        two_steps(seed)
    except AssertionError:
        return True
    return False


def test_a_step_out_of_turn_is_noticed() -> None:
    """In one of twenty orders, of which most show it: which do depends on all awaits of a step."""

    async def at_once(self: Any, number: int) -> None:
        """Do not wait for the steps before."""
        self.next_number = max(self.next_number, number)

    assert not any(map(is_noticed, SEEDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numbering, "_wait", at_once)
        assert any(map(is_noticed, range(20)))
