"""A network that breaks: no step is lost, none is applied twice, no event is missed.

`TROCAR_BROKEN_CALLS=1000` makes more calls.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import trocar
from tests.support.files.scale import count
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    fitted_plainly,
    make_trainer,
    samples,
    stepped_plainly,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.proxy import Proxy
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

CALLS = count(150, "TROCAR_BROKEN_CALLS")
SHARE = 0.3


class Breaker:
    """Breaks the connections of some calls, at random moments."""

    def __init__(self, proxy: Proxy, seed: int, within_s: float = 0.004) -> None:
        self._proxy, self._chance, self._within_s = proxy, random.Random(seed), within_s
        self._timers: list[threading.Timer] = []
        self.count = 0

    def perhaps(self) -> None:
        """Break whatever is under way soon, with a probability of 30 %."""
        if self._chance.random() < SHARE:
            self.count += 1
            delay_s = self._chance.random() * self._within_s
            self._timers.append(threading.Timer(delay_s, self._proxy.break_connections))
            self._timers[-1].start()

    def __enter__(self) -> Breaker:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.join()


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data", limits={"max_batch": 65_536})


@pytest.fixture
def client(proxy: Proxy) -> Iterator[trocar.Client]:
    with trocar.connect(proxy.address) as connected:
        yield connected


def test_steps_are_applied_once(client: trocar.Client, proxy: Proxy, tmp_path: Path) -> None:
    given = batches(CALLS)
    trainer = make_trainer(client)
    with Breaker(proxy, 1) as breaker:
        for number, batch in enumerate(given):
            breaker.perhaps()
            assert trainer.step(*batch).update_count == number + 1
    assert breaker.count > CALLS // 5
    assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_large_batches_are_applied_once(client: trocar.Client, proxy: Proxy, tmp_path: Path) -> None:
    given = batches(12, 24_000)
    assert given[0][0].nbytes > 8 << 20
    trainer = make_trainer(client)
    with Breaker(proxy, 2, 0.1) as breaker:
        for number, batch in enumerate(given):
            breaker.perhaps()
            assert trainer.step(*batch).update_count == number + 1
    assert breaker.count
    assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_steps_in_flight_are_applied_once_and_in_order(
    client: trocar.Client, proxy: Proxy, tmp_path: Path
) -> None:
    given = batches(CALLS // 2)
    trainer = make_trainer(client)

    def step(number: int) -> int:
        breaker.perhaps()
        return trainer.step(*given[number], number=number).update_count

    with Breaker(proxy, 3) as breaker, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(step, range(len(given)))) == list(range(1, len(given) + 1))
    assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_watching_goes_on_without_gaps(client: trocar.Client, proxy: Proxy, tmp_path: Path) -> None:
    data = samples(40, 11)
    expected, losses = fitted_plainly(data, 20, 4)
    trainer = make_trainer(client)
    first = trainer.start_fit(data, epochs=20, batch_size=4)
    seen = []
    with Breaker(proxy, 4, 0.05) as breaker:
        for event in trainer.watch(first):
            seen.append(event)
            if event.number % 10 == 0:
                breaker.perhaps()
    assert breaker.count > 3
    assert [event.number for event in seen] == list(range(first, first + len(seen)))
    assert [event["loss"] for event in seen if event.kind == "step"] == losses
    assert_weights(trainer, expected, tmp_path)


def test_uploads_and_exports_resume(client: trocar.Client, proxy: Proxy, tmp_path: Path) -> None:
    stop, chance = threading.Event(), random.Random(5)
    trainer = make_trainer(client, head=20_000)
    trainer.export(tmp_path / "whole.safetensors")

    def break_often() -> None:
        while not stop.wait(0.05 + chance.random() * 0.8):  # five attempts must be enough on a busy machine
            proxy.break_connections()

    thread = threading.Thread(target=break_often)
    thread.start()
    try:
        for seed in range(3):
            images, labels = samples(30_000, seed)
            stored = client.upload_dataset((images, labels))
            assert stored.sample_count == 30_000
            trainer.export(tmp_path / f"{seed}.safetensors")
    finally:
        stop.set()
        thread.join()
    whole = np.fromfile(tmp_path / "whole.safetensors", np.uint8)
    for seed in range(3):
        assert np.array_equal(np.fromfile(tmp_path / f"{seed}.safetensors", np.uint8), whole)


def test_what_is_made_and_begun_is_so_once(client: trocar.Client, proxy: Proxy) -> None:
    """Trainers and fits: as many as were asked for."""
    data = client.upload_dataset(samples(8)).dataset_id
    with Breaker(proxy, 6, 0.03) as breaker:
        for count in range(1, 13):
            breaker.perhaps()
            trainer = make_trainer(client, head=5)
            assert len(client.trainers()) == count
            breaker.perhaps()
            first = trainer.start_fit(data, batch_size=8)
            events = list(trainer.watch(first))
            assert [event.kind for event in events].count("started") == 1
            assert trainer.info().update_count == 1
    assert breaker.count
