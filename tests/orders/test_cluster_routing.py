"""Calls through a gateway, while their caller leaves, or their replica is lost, or stops, at each await.

A lost replica goes on, as one does that is only slow: what it does then must reach no trainer that another
replica has taken over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.orders import trainer_calls
from tests.orders.case import Request
from tests.orders.cluster import Nodes, cluster
from tests.orders.world import leaks, settled
from tests.support.orders.amount import SEED, pairs
from tests.support.orders.seeded_loop import Watch, run
from trocar_server.cluster import gateway

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.orders.doorway import Answer

EVENTS = ("cancel", "late", "disconnect", "lose", "stop")
ATTEMPTS = 6


@dataclass(frozen=True)
class Routed:
    """A call through the gateway: its method, what makes its messages, and the codes of a repeat."""

    method: str
    prepare: Callable[[Any], Awaitable[Request]]
    again: tuple[str, ...] = ("OK",)

    def __str__(self) -> str:
        return self.method.rpartition("/")[2]


CASES = [
    Routed("TrainerService/Train", trainer_calls.step),
    Routed("TrainerService/StepOptimizer", trainer_calls.update),
    Routed("TrainerService/SaveTrainer", trainer_calls.saving),
    Routed("TrainerService/CreateTrainer", trainer_calls.creation),
    Routed("TrainerService/CloseTrainer", trainer_calls.closing, trainer_calls.GONE),
]


async def control(case: Routed, folder: Path) -> tuple[list[Any], list[Any], int]:
    """Return the trainers before and after the call, and its number of awaits."""
    async with cluster(folder) as nodes:
        request = await case.prepare(nodes)
        before, watch = await nodes.trainers(), Watch()
        assert (await nodes.door.begin(case.method, *request, watch=watch).ended()).is_ok
        return before, await nodes.trainers(), watch.count


async def disturbed(
    case: Routed, states: tuple[list[Any], list[Any], int], event: str, at: int, folder: Path
) -> None:
    """Make the call with an event at an await, and check both servers and the gateway."""
    before, after, _ = states
    async with cluster(folder) as nodes:
        request = await case.prepare(nodes)
        tasks, acts = asyncio.all_tasks(), list[Any]()
        watch = Watch(at, is_late=event == "late")
        call = nodes.door.begin(case.method, *request, watch=watch)
        home = next(name for name, server in nodes.servers.items() if server.app.trainers.all())

        def act() -> None:
            if event in ("lose", "stop"):
                acts.append(asyncio.ensure_future(getattr(nodes, event)(home)))
            else:
                (call.disconnect if event == "disconnect" else call.cancel)()

        watch.act = act
        answer = await asyncio.wait_for(call.ended(), 600)
        await asyncio.gather(*acts)
        await settled(tasks)
        check(nodes, tasks)
        state = await nodes.trainers()
        assert state in ([after] if answer.is_ok else [before, after]), (answer, state)
        repeated = await again(nodes, case, request)
        assert repeated.code in case.again, repeated
        await settled(tasks)
        check(nodes, tasks)
        assert await nodes.trainers() == after, await nodes.trainers()


async def again(nodes: Nodes, case: Routed, request: Request) -> Answer:
    """Send the call again, as a client does where it learns nothing of its fate."""
    answer = await nodes.door.ask(case.method, *request, is_repeated=True)
    for _ in range(ATTEMPTS):
        if answer.code not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            break
        await nodes.look_again()
        answer = await nodes.door.ask(case.method, *request, is_repeated=True)
    return answer


def check(nodes: Nodes, tasks: set[asyncio.Task[Any]]) -> None:
    """Check that no call has left anything behind: at the gateway, and at the servers that are there."""
    assert nodes.gateway.work_count == 0
    assert [one.replica_id for one in nodes.gateway.table.all() if one.open_count] == []
    for name, server in nodes.servers.items():
        left = [] if name in nodes.lost else leaks(server, tasks)
        assert not left, (name, left)


def sweep(case: Routed, folder: Path, chosen: list[tuple[str, int]] | None = None) -> None:
    (folder / "control").mkdir()
    states = run(SEED, control(case, folder / "control"))
    for event, at in chosen or pairs(EVENTS, states[2], str(case)):
        own = folder / f"{event}-{at}"
        own.mkdir()
        try:
            run(SEED, disturbed(case, states, event, at, own))
        except Exception as error:
            error.add_note(f"{case}: {event} at await {at} of {states[2]}, seed {SEED}")
            raise


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_through_a_gateway_is_applied_once_or_not_at_all(case: Routed, tmp_path: Path) -> None:
    sweep(case, tmp_path)


def test_a_call_that_stays_open_is_noticed(tmp_path: Path) -> None:
    async def attempt(self: Any, replica: Any) -> Any:
        self.tried.append(replica)
        replica.open_count += 1
        problem = await self._exchange(self.gateway.channels.at(replica.address))
        replica.open_count -= 1
        return problem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway._ForwardedCall, "_attempt", attempt)
        with pytest.raises(AssertionError):
            sweep(CASES[0], tmp_path, [("cancel", at) for at in range(1, 9)])
