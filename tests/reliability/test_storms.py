"""Callers that vanish, give up or stop reading, many at once: nothing of their calls is left."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.files.scale import SEED, count
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.doomed_clients import doomed_clients
from tests.support.servers.footprint import hook_counts, live_tensor_count
from tests.support.servers.proxy import running_proxy
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, tensor

KILLED = count(300)
CANCELLED = count(300)
BROKEN = count(40)
STALLED = count(64)
BATCH = noise(64, 3, 64, 64)
"""3 MB in, and a convolution's 4 MB back: a call is long enough to be cut off anywhere."""
STALLED_BYTES_EACH = 4 << 20
WAIT_S = 60


@pytest.fixture(scope="module")
def stormy() -> Iterator[RunningServer]:
    models = {"plain": custom(Plain, (3, 64, 64), replicas=2)}
    with running_server(models=models, device="cpu", limits={"max_queue": 1000}) as running:
        yield running


@pytest.fixture(autouse=True)
def _as_before(stormy: RunningServer) -> Iterator[None]:
    """Whatever a storm does: two seconds later no call is in flight, and the next one is answered right."""
    model, inputs = rebuilt(Plain), noise(2, 3, 64, 64)
    expected = extract(stormy, inputs)
    hooks, tasks, tensors = hook_counts(stormy), task_count(stormy), live_tensor_count()
    yield
    until(lambda: in_flight(stormy) == 0)
    until(lambda: task_count(stormy) <= tasks)
    assert hook_counts(stormy) == hooks
    np.testing.assert_array_equal(extract(stormy, inputs), expected)
    assert live_tensor_count() <= tensors + 5
    assert expected.shape == (2, model.fc.out_features)


def extract(server: RunningServer, inputs: np.ndarray) -> np.ndarray:
    with trocar.connect(server.address) as client:
        return client.extract("plain", inputs, taps="fc")["fc"]


def in_flight(server: RunningServer) -> int:
    """Count replicas that are lent and calls that wait for one."""
    pool = server.engine.deployment("plain").pool
    return pool.leased_count + pool.waiting_count


def task_count(server: RunningServer) -> int:
    """Count what the server's event loop works on: every call is a task of its own."""

    async def number() -> int:
        return len(asyncio.all_tasks())

    return server.run(number)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come by itself; the test fails where it does not."""
    tick = threading.Event()
    for _ in range(WAIT_S * 50):
        if holds():
            return
        tick.wait(0.02)
    pytest.fail("it never came to hold")


def test_clients_that_are_killed_leave_nothing(stormy: RunningServer) -> None:
    """SIGKILL at random moments, four at a time, while others get their right answers."""
    with doomed_clients(stormy.address, "plain", BATCH.shape, "conv") as doomed:
        assert doomed.run(KILLED, together=4, seed=SEED) == KILLED


def call_of(channel: grpc.Channel) -> Any:
    message = request("plain", "conv", inputs=[tensor(BATCH.shape)], chunks=[chunk(BATCH.tobytes())])
    return extract_call(channel, [message.SerializeToString()])


def test_calls_that_are_cancelled_at_any_moment_leave_nothing(stormy: RunningServer) -> None:
    chance, tick = random.Random(SEED), threading.Event()
    with raw_channel(stormy.address) as channel:
        for _ in range(CANCELLED // 10):
            calls = [call_of(channel) for _ in range(10)]
            for call in calls:
                tick.wait(chance.random() * 0.01)
                call.cancel()


def test_connections_that_break_at_any_moment_leave_nothing(stormy: RunningServer) -> None:
    chance, tick = random.Random(SEED), threading.Event()
    with running_proxy(stormy.address) as proxy, raw_channel(proxy.address) as channel:
        for _ in range(BROKEN):
            calls = [call_of(channel) for _ in range(4)]
            tick.wait(chance.random() * 0.05)
            proxy.break_connections()
            for call in calls:
                call.cancel()
        assert proxy.connection_count > 1


def test_readers_that_stall_hold_no_replica(stormy: RunningServer) -> None:
    """Each asks for 4 MB, reads nothing, and stays; others are served meanwhile."""
    with ExitStack() as opened:
        calls = [call_of(opened.enter_context(raw_channel(stormy.address))) for _ in range(STALLED)]
        until(lambda: in_flight(stormy) == 0)
        assert extract(stormy, noise(2, 3, 64, 64)).shape == (2, 5)
        for call in calls:
            call.cancel()
