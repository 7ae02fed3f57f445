"""Base weights, hooks and requests beside each other: what edits and gradients must leave as it was.

The long version, of 1,000 calls, is `tests.sweeps.surgery_isolation`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import trocar
from tests.support.servers.footprint import hook_counts, live_tensor_count
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.wire.surgical_calls import MODELS, equal, footprint, mixed_call, run, stress

CLIENTS, CALLS = 8, 20


@pytest.fixture(scope="module")
def hosted() -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu", limits={"max_queue": 1000}) as running:
        yield running


def test_mixed_calls_leave_every_replica_as_it_was(hosted: RunningServer) -> None:
    with trocar.connect(hosted.address) as client:
        before = footprint(hosted)
        outcomes = stress(client, random.Random(3), 200)
    hosted.on_owner(lambda: None)  # the last pass has ended
    assert footprint(hosted) == before
    assert outcomes["done"] > 80, outcomes
    assert {"EditShapeMismatchError", "NotDifferentiableError", "DeadlineExceededError"} <= outcomes.keys()


def test_replies_are_those_of_solo_runs(hosted: RunningServer) -> None:
    """8 clients mix edits, gradients and plain requests; each reply is bit-equal to that of a solo run."""
    marks = range(CLIENTS * CALLS)
    calls = {mark: mixed_call(random.Random(mark), mark) for mark in marks}
    hooks = hook_counts(hosted)

    def runs(number: int) -> dict[int, trocar.FeatureMaps]:
        with trocar.connect(hosted.address, timeout_s=120) as own:
            return {mark: run(own, calls[mark]) for mark in marks[number * CALLS : (number + 1) * CALLS]}

    with ThreadPoolExecutor(CLIENTS) as threads:
        replies = {mark: maps for done in threads.map(runs, range(CLIENTS)) for mark, maps in done.items()}
    with trocar.connect(hosted.address) as alone:
        different = [mark for mark, maps in replies.items() if not equal(maps, run(alone, calls[mark]))]
    assert not different
    assert hook_counts(hosted) == hooks


def test_no_tensor_is_left(hosted: RunningServer) -> None:
    counts = []
    with trocar.connect(hosted.address) as client:
        for _ in range(3):
            stress(client, random.Random(9), 60)
            hosted.on_owner(lambda: None)
            counts.append(live_tensor_count())
    assert max(counts[1:]) <= counts[0] + 5, counts
