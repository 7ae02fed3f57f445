"""What metrics and the access log say of generated texts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.causal_models import TinyGpt2
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.scraping import scrape
from tests.support.servers.waiting import wait_until

PROMPT = np.arange(5, dtype=np.int64)[None]
OPTIONS: dict[str, Any] = {"stop_token_ids": []}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    factory = f"{TinyGpt2.__module__}:{TinyGpt2.__name__}"
    models = {"gpt2": {"factory": factory, "input_shape": (4,), "weights": "random:0"}}
    with running_server(models=models, device="cpu", metrics_port=0) as running:
        yield running


def test_tokens_passes_and_the_time_between_tokens_are_counted(server: RunningServer) -> None:
    with capture_logs() as lines, trocar.connect(server.address) as client:
        client.generate("gpt2", PROMPT, max_new_tokens=7, n=2, **OPTIONS).finish()
        client.generate("gpt2", PROMPT, max_new_tokens=1, **OPTIONS).finish()
        wait_until(lambda: sum(line["event"] == "call" and "tokens" in line for line in lines) == 2)
    found = scrape(server)
    assert found.value("trocar_generated_tokens_total", model="gpt2") == 15
    assert found.value("trocar_passes_total", model="gpt2", engine="eager", numerics="exact") == 15
    assert found.value("trocar_token_seconds_count", model="gpt2") == 12  # not before the first of a text
    assert found.value("trocar_compute_seconds_count", model="gpt2") == 15
    assert found.value("trocar_queue_seconds_count", model="gpt2") == 15
    assert [line["tokens"] for line in lines if "tokens" in line] == [14, 1]


def test_kept_keys_and_values_are_shown_while_texts_are_generated(server: RunningServer) -> None:
    positions, of_position = PROMPT.shape[1] + 100 - 1, 2 * 2 * 16 * 4  # of two layers, float32
    with trocar.connect(server.address) as client:
        runs = [client.generate("gpt2", PROMPT, max_new_tokens=100, n=500, **OPTIONS) for _ in range(3)]
        wait_until(lambda: scrape(server).value("trocar_kept_caches") == 3)
        assert scrape(server).value("trocar_kept_cache_bytes") == 3 * positions * of_position
        for run in runs:
            run.close()
    wait_until(lambda: scrape(server).value("trocar_kept_caches") == 0)
    assert scrape(server).value("trocar_kept_cache_bytes") == 0


def test_a_run_reserves_the_time_of_one_step(server: RunningServer) -> None:
    """A run of many tokens takes no more of its caller's seconds than its next pass, and returns them."""
    pool, admission = server.engine.deployment("gpt2").pool, server.engine.admission
    with trocar.connect(server.address) as client:
        client.generate("gpt2", PROMPT, max_new_tokens=5, **OPTIONS).finish()
        assert pool.throughput.is_known
        run = client.generate("gpt2", PROMPT, max_new_tokens=100, n=500, **OPTIONS)
        _, seconds, calls = server.run(lambda: reserved(server))
        assert 0 < seconds < 100 * pool.throughput.seconds()
        assert calls == 1
        run.close()
    wait_until(lambda: admission.reserved() == (0, 0.0, 0))


async def reserved(server: RunningServer) -> tuple[int, float, int]:
    return server.engine.admission.reserved()
