"""Routing table: which replica a call goes to."""

import asyncio
from typing import Any

import pytest

from tests.support.servers.replica_report import replica_report
from trocar_server.cluster.routing import Replica, ReplicaTable


def report(name: str, slot: int, model_id: str = "m", **values: Any) -> dict[str, Any]:
    return replica_report(name, model_id, f"{name}:1", slot=str(slot), **values)


def table(*reports: dict[str, Any]) -> ReplicaTable:
    found = ReplicaTable()
    found.update(reports, {"m": 2})
    return found


def chosen(found: ReplicaTable, *excluded: Replica) -> str:
    replica = found.least_waiting("m", excluded)
    return replica.replica_id if replica else ""


def test_the_replica_with_the_least_waiting_work_is_chosen() -> None:
    assert chosen(table(report("a", 0, waiting_s=2.0, call_count=1), report("b", 1, waiting_s=1.0))) == "b"


def test_calls_since_the_last_report_count_as_much_as_earlier_ones() -> None:
    found = table(report("a", 0, waiting_s=1.0, call_count=2), report("b", 1, waiting_s=1.4, call_count=2))
    found.serving("m")[0].sent_count = 1
    assert chosen(found) == "b"


def test_calls_of_this_gateway_are_spread_over_idle_replicas() -> None:
    found, counts = table(report("a", 0), report("b", 1), report("c", 2)), {"a": 0, "b": 0, "c": 0}
    for _ in range(9):
        replica = found.least_waiting("m")
        assert replica is not None
        replica.sent_count += 1
        replica.open_count += 1
        counts[replica.replica_id] += 1
    assert counts == {"a": 3, "b": 3, "c": 3}


def test_a_replica_that_broke_a_call_is_the_last_choice() -> None:
    found = table(report("a", 0), report("b", 1, waiting_s=9.0, call_count=1))
    first, second = found.serving("m")
    first.suspect()
    assert chosen(found) == "b"
    assert chosen(found, second) == "a"


def test_draining_replicas_and_other_models_are_not_chosen() -> None:
    found = table(report("a", 0, is_draining=True), report("b", 1, model_id="n"))
    assert chosen(found) == ""
    assert not found.is_complete
    home = found.at("a")
    assert home is not None
    assert home.address == "a:1"


async def test_an_update_keeps_open_calls() -> None:
    found = table(report("a", 0))
    found.serving("m")[0].open_count = 3
    found.update([report("a", 0, waiting_s=1.0)], {"m": 1})
    replica = found.serving("m")[0]
    assert (replica.open_count, replica.waiting_s, found.is_complete) == (3, 1.0, True)


@pytest.mark.parametrize(
    ("reports", "wanted", "is_news"),
    [
        ([report("a", 0, waiting_s=1.0, call_count=1)], 2, False),  # four a second
        ([report("a", 0), report("b", 1)], 2, True),
        ([report("b", 1)], 2, True),
        ([], 2, True),
        ([report("a", 0, is_draining=True)], 2, True),
        ([report("a", 0)], 1, True),
    ],
)
async def test_who_waits_is_woken_when_replicas_come_go_or_drain(
    reports: list[dict[str, Any]], wanted: int, is_news: bool
) -> None:
    found = table(report("a", 0))
    waiting = asyncio.create_task(found.changed(60.0))
    await asyncio.sleep(0)
    found.update(reports, {"m": wanted})
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() == is_news
    waiting.cancel()
