"""Passes inside one long operator: refused before they begin, and survived by a stop and by the operator."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.slow_models import TOKEN_WORK, WIDTH, LongConvolution, LongFilter, Sleeps
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.scraping import scrape, scrape_until
from tests.support.servers.server_processes import server_processes
from tests.support.servers.serving import custom
from tests.support.servers.waiting import wait_until
from tests.support.wire import open_inference
from tests.support.wire.wire import raw_channel
from trocar import Client
from trocar.errors import FitInvalidError, PassTooLongError, TrocarError
from trocar_server.app.stopping import EXIT_HELD

TOKENS = 16_384
"""35 billion multiply-adds of 131 KB."""
LIMITS = {"max_pass_s": 0.05}
IDS = np.ones((1, TOKENS), np.int64)
SHORT = np.ones((1, 8), np.int64)


def long_model() -> dict[str, Any]:
    inputs = {"input_ids": {"dtype": "int64", "shape": ["batch", "tokens"], "below": 10}}
    return custom(LongConvolution, (8,), inputs=inputs)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    models = {"long": long_model(), "filter": custom(LongFilter, (WIDTH, 8))}
    with running_server(models=models, device="cpu", limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[Client]:
    with trocar.connect(running.address) as found:
        yield found


def test_a_pass_over_the_limit_is_refused_with_the_numbers(running: RunningServer, client: Client) -> None:
    with pytest.raises(
        PassTooLongError, match=r"the limit `max_pass_s` is 0\.05 s\. Nothing was computed"
    ) as told:
        client.extract("long", IDS, ["fc"])
    details = told.value.details
    assert int(details["work"]) >= TOKENS * TOKEN_WORK
    assert float(details["expected_s"]) > float(details["limit_s"]) == 0.05
    assert running.engine.admission.reserved()[0] == 0
    assert client.extract("long", SHORT, ["fc"])["fc"].shape == (1, 4)


def test_an_early_value_of_the_same_inputs_is_answered(client: Client) -> None:
    """The pass stops before the long operator."""
    assert client.extract("long", IDS, ["embedding"])["embedding"].shape[1] == TOKENS
    with pytest.raises(PassTooLongError):
        client.extract("long", IDS, ["conv"])


def test_a_pass_that_begins_in_the_middle_counts_what_follows(client: Client) -> None:
    shape = (1, WIDTH, TOKENS)
    value = np.zeros(shape, np.float32)
    after = client.extract("filter", value, ["fc"], start_at="conv", start_shape=shape)
    assert after["fc"].shape == (1, 4)
    with pytest.raises(PassTooLongError):
        client.extract("filter", value, ["fc"], start_at="stem", start_shape=shape)


def test_gradients_streams_and_open_inference_are_refused_too(running: RunningServer, client: Client) -> None:
    with pytest.raises(PassTooLongError):
        client.gradients("long", IDS, of=trocar.logit(0), at=["conv"])
    with client.extract_stream("long", [SHORT, IDS, SHORT], ["fc"]) as stream:
        errors = [type(result.error) for result in stream]
    assert errors == [type(None), PassTooLongError, type(None)]
    with raw_channel(running.address) as channel:
        request = open_inference.request_of("long", {"input_ids": IDS})
        with pytest.raises(Exception, match="the pass would take"):
            open_inference.infer(channel, request)


def test_steps_evaluations_and_fits_are_refused_and_leave_the_trainer_as_it_was(client: Client) -> None:
    with client.train("long", trainable=["fc"]) as trainer:
        with pytest.raises(PassTooLongError):
            trainer.step(IDS, [0])
        with pytest.raises(PassTooLongError):
            trainer.evaluate(IDS, [0])
        with pytest.raises(FitInvalidError, match="the pass would take"):
            trainer.fit((IDS, np.zeros(1, np.int64)), epochs=1, batch_size=1)
        assert trainer.step(SHORT, [0]).number == 0


def test_a_deadline_that_the_pass_cannot_keep_is_told_at_once(client: Client) -> None:
    models = {"long": long_model()}
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as found:
        ids = np.ones((64, TOKENS), np.int64)  # 2.3 trillion
        with pytest.raises(PassTooLongError, match="the time to the call's deadline is"):
            found.extract("long", ids, ["fc"], options=trocar.options(timeout_s=8))


def test_calls_of_growing_sizes_are_answered_within_their_limits() -> None:
    """Nothing that takes less than the limit is refused, whatever ran before."""
    models = {"long": long_model()}
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as found:
        for tokens in (8, 8, 64, 2048, 32, 4096):
            for rows in (1, 4):
                ids = np.ones((rows, tokens), np.int64)
                assert found.extract("long", ids, ["fc"], options=trocar.options(timeout_s=60))[
                    "fc"
                ].shape == (rows, 4)


def test_a_model_that_holds_the_device_shows_in_status_and_metrics() -> None:
    models = {"sleeps": custom(Sleeps, (1,))}
    limits = {"max_pass_s": 0.05}
    with (
        running_server(models=models, device="cpu", limits=limits, metrics_port=0) as server,
        trocar.connect(server.address) as client,
    ):
        assert not client.status().device.is_over_limit
        value = np.full((1, 1), 5.0, np.float32)
        sleeping = threading.Thread(target=lambda: client.extract("sleeps", value, ["fc"]))
        sleeping.start()
        wait_until(lambda: client.status().device.is_over_limit)
        device = client.status().device
        assert device.user == "sleeps"
        assert device.held_s > 0.05
        assert "sleeps" in str(client.status())
        scrape_until(server, lambda now: now.value("trocar_device_over_limit", model="sleeps") == 1)
        assert scrape(server).value("trocar_device_held_seconds", model="sleeps") > 0.05
        sleeping.join()
        assert client.status().device.user == ""


def sleep_in(address: str) -> None:
    """Make a call that holds the device for ten minutes."""

    def call() -> None:
        with suppress(TrocarError), trocar.connect(address) as client:
            client.extract(
                "sleeps", np.full((1, 1), 600.0, np.float32), ["fc"], options=trocar.options(timeout_s=1000)
            )

    threading.Thread(target=call, daemon=True).start()


def test_a_stop_ends_while_a_pass_holds_the_device_and_loses_no_acknowledged_step(tmp_path: Path) -> None:
    models = {"sleeps": custom(Sleeps, (1,)), "tiny": custom(TinyNet, SHAPE)}
    batch, labels = np.zeros((2, *SHAPE), np.float32), [0, 1]
    with server_processes() as processes:
        server = processes.start(tmp_path, models=models, grace_s=1.0)
        with trocar.connect(server.address) as client:
            trainer = client.train("tiny", trainable=["fc"])
            loss = [trainer.step(batch, labels).loss for _ in range(3)][-1]
            sleep_in(server.address)
            wait_until(lambda: client.status().device.user == "sleeps")
        assert server.terminate() == EXIT_HELD
        again = processes.start(tmp_path, models={"tiny": models["tiny"]})
        with trocar.connect(again.address) as client:
            found = client.trainer(trainer.trainer_id)
            assert found.info().next_number == 3
            assert found.step(batch, labels).loss < loss


def test_a_step_that_holds_the_device_is_not_saved_half_done(tmp_path: Path) -> None:
    """Its trainer is as at its last checkpoint, and others are saved."""
    models = {"sleeps": custom(Sleeps, (1,)), "tiny": custom(TinyNet, SHAPE)}
    batch, labels = np.zeros((2, *SHAPE), np.float32), [0, 1]
    with server_processes() as processes:
        server = processes.start(tmp_path, models=models, grace_s=1.0)
        with trocar.connect(server.address) as client:
            held, other = client.train("sleeps", losses="mse"), client.train("tiny", trainable=["fc"])
            held.step(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
            held.save()
            other.step(batch, labels)

            def step() -> None:
                with suppress(TrocarError):
                    held.step(
                        np.full((1, 1), 600.0, np.float32), np.zeros((1, 1), np.float32), timeout_s=1000
                    )

            threading.Thread(target=step, daemon=True).start()
            wait_until(lambda: client.status().device.user == held.trainer_id)
            assert server.terminate() == EXIT_HELD
        again = processes.start(tmp_path, models=models)
        with trocar.connect(again.address) as client:
            assert client.trainer(other.trainer_id).info().next_number == 1
            assert client.trainer(held.trainer_id).info().next_number == 1
