"""Deadlines and cancels stop the backward pass, too; the replica is usable at once."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, GatedBackward
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts, live_tensor_count
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.surgery import PassGuard

ROWS = noise(2, 3)
PLACES = ["/in", "first", "counted", "first/param(weight)"]
EDITS = [trocar.edit("last/param(weight)", "scale", 2), trocar.edit("first/grad_out", "scale", 2)]


@pytest.fixture(scope="module")
def hosted() -> Iterator[RunningServer]:
    with running_server(models={"gated": custom(GatedBackward)}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def near(hosted: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(hosted.address) as connected:
        yield connected


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the server tells a pass to stop."""
    event, stop = threading.Event(), PassGuard._stop

    def told(guard: PassGuard, reason: Any) -> None:
        stop(guard, reason)
        event.set()

    monkeypatch.setattr(PassGuard, "_stop", told)
    return event


def gradients(client: trocar.Client, **options: Any) -> trocar.FeatureMaps:
    return client.gradients("gated", ROWS, of=trocar.logit(1), at=PLACES, edits=EDITS, **options)


def assert_usable(
    server: RunningServer, client: trocar.Client, expected: trocar.FeatureMaps, hooks: Any
) -> None:
    server.on_owner(lambda: None)  # the pass has ended
    found = gradients(client)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert found.objective == expected.objective
    assert hook_counts(server) == hooks


def test_a_deadline_stops_the_backward_pass(
    hosted: RunningServer, near: trocar.Client, gate: Gate, stopped: threading.Event
) -> None:
    expected, hooks = gradients(near), hook_counts(hosted)
    gate.reset()
    gate.hold()
    with pytest.raises(trocar.errors.DeadlineExceededError):
        gradients(near, options=trocar.options(timeout_s=0.5))
    assert gate.entered.is_set()
    assert stopped.wait(WAIT_S)
    gate.release()
    hosted.on_owner(lambda: None)
    assert gate.pass_count == 0
    assert_usable(hosted, near, expected, hooks)


async def cancelled(server: RunningServer, gate: Gate, stopped: threading.Event) -> None:
    """Cancel a call while its backward pass is held, and let that go on."""
    gate.reset()
    stopped.clear()
    gate.hold()
    async with trocar.aio.connect(server.address) as client:
        call = client.gradients("gated", ROWS, of=trocar.logit(1), at=PLACES, edits=EDITS)
        task = asyncio.create_task(call)
        assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(stopped.wait, WAIT_S)
    gate.release()
    await asyncio.to_thread(server.on_owner, lambda: None)


def test_a_cancel_stops_the_backward_pass(
    hosted: RunningServer, near: trocar.Client, gate: Gate, stopped: threading.Event
) -> None:
    expected, hooks = gradients(near), hook_counts(hosted)
    asyncio.run(cancelled(hosted, gate, stopped))
    assert gate.pass_count == 0
    assert_usable(hosted, near, expected, hooks)


def test_nothing_is_left_of_twenty_backward_passes_that_were_stopped(
    hosted: RunningServer, near: trocar.Client, gate: Gate, stopped: threading.Event
) -> None:
    expected, hooks = gradients(near), hook_counts(hosted)
    counts = []
    for _ in range(2):
        for _ in range(10):
            asyncio.run(cancelled(hosted, gate, stopped))
        counts.append(live_tensor_count())
    assert counts[1] <= counts[0] + 2
    assert_usable(hosted, near, expected, hooks)
