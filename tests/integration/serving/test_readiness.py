"""When a server is ready: its models are loaded, or listed as failed with the reason; the others are
served."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.event_loop import event_loop
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import Serve, custom
from trocar._cli import main
from trocar_server.app import app
from trocar_server.config import ServerConfig, read_config
from trocar_server.doctor.server_checks import Target, check_server
from trocar_server.errors import ServiceError

PLAIN = custom(Plain, (3, 8, 8))
MISSING = {"weights": "nowhere/missing.safetensors"}
BROKEN: dict[str, dict[str, Any]] = {
    "no-file": MISSING,
    "no-such-architecture": {"architecture": "resnet19"},
    "factory-raises": custom(nn.Identity, (3,), factory=f"{__name__}:raises"),
    "wrong-input": custom(Plain, (7,)),
}


def raises() -> nn.Module:
    raise RuntimeError("no licence server")


class Slow(nn.Module):
    """A model that is built when `allowed` is set."""

    allowed, asked = threading.Event(), threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.asked.set()
        assert self.allowed.wait(60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@contextmanager
def starting(data_dir: Path, **models: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a server that waits in the building of `Slow`; yields its address and what lets it go on."""
    Slow.allowed.clear()
    Slow.asked.clear()
    path = data_dir / "socket"
    config = ServerConfig(
        host=f"unix:{path}", models=models, device="cpu", data_dir=data_dir / "data", grace_s=0.5
    )
    with event_loop("server-loop") as loop:
        begun = asyncio.run_coroutine_threadsafe(app.start(config), loop)
        try:
            assert Slow.asked.wait(60)
            yield f"unix:{path}", Slow.allowed.set
        finally:
            Slow.allowed.set()
            asyncio.run_coroutine_threadsafe(begun.result(60).stop(), loop).result(60)


def test_ready_means_that_the_next_call_works(tmp_path: Path) -> None:
    with capture_logs(), starting(tmp_path, first=PLAIN, slow=custom(Slow)) as (address, go_on):  # noqa: SIM117
        with trocar.connect(address) as client:
            assert client.wait_ready(models="first").version  # one that is loaded is not waited for
            assert {model.model_id: model.state for model in client.models()} == {
                "first": "loaded",
                "slow": "loading",
            }
            with pytest.raises(trocar.errors.ModelNotLoadedError, match="wait_ready"):
                client.extract("slow", noise(1, 3), "/out")
            for models in (None, "slow", ["first", "slow"]):
                with pytest.raises(trocar.errors.DeadlineExceededError):
                    client.wait_ready(0.3, models=models)
            threading.Timer(0.2, go_on).start()
            client.wait_ready(60)
            assert np.array_equal(
                client.extract("slow", np.ones((1, 3), "float32"), "/out")["/out"], [[2, 2, 2]]
            )


async def test_the_asyncio_client_waits_too(tmp_path: Path) -> None:
    with capture_logs(), starting(tmp_path, slow=custom(Slow)) as (address, go_on):
        async with trocar.aio.connect(address) as client:
            waiting = asyncio.create_task(client.wait_ready(60, models=["slow"]))
            await client.server_info()
            assert not waiting.done()
            go_on()
            await waiting
            assert (await client.model("slow")).is_loaded


def test_a_server_drained_while_it_loads_reports_not_serving_until_the_drain_ends(tmp_path: Path) -> None:
    with capture_logs(), starting(tmp_path, slow=custom(Slow)) as (address, go_on):  # noqa: SIM117
        with trocar.connect(address) as client:
            assert client.drain().is_draining
            go_on()
            client.trainers()  # answered when the start is over
            assert client.server_info().is_draining
            assert not client.is_serving()
            client.drain(undo=True)
            client.wait_ready(60)


def test_a_drain_that_ends_while_models_load_does_not_make_the_server_ready(tmp_path: Path) -> None:
    with capture_logs(), starting(tmp_path, slow=custom(Slow)) as (address, go_on):  # noqa: SIM117
        with trocar.connect(address) as client:
            client.drain()
            client.drain(undo=True)
            assert not client.is_serving()
            go_on()
            client.wait_ready(60)


def test_a_fit_that_a_drained_server_restores_waits_for_the_end_of_the_drain(tmp_path: Path) -> None:
    images, labels = np.zeros((8, 3, 8, 8), np.float32), np.arange(8) % 5
    with running_server(models={"plain": PLAIN}, data_dir=tmp_path / "data") as first:  # noqa: SIM117
        with trocar.connect(first.address) as client:
            trainer = client.train("plain", trainable=["fc"])
            trainer.start_fit((images, labels), epochs=100_000, batch_size=4)
    with capture_logs(), starting(tmp_path, plain=PLAIN, slow=custom(Slow)) as (address, go_on):  # noqa: SIM117
        with trocar.connect(address) as client:
            client.drain()
            go_on()
            restored = client.trainer(trainer.trainer_id)
            step = restored.info().update_count
            assert client.drain().waiting_fit_count == 1
            assert restored.info().update_count == step
            client.drain(undo=True)
            next(event for event in restored.watch() if event.kind == "step" and event["step"] > step)
            restored.cancel()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_model_that_fails_leaves_the_others_served(
    serve: Serve, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_logs() as lines:
        server = serve(models={"broken": BROKEN[kind], "plain": PLAIN})
        with trocar.connect(server.address) as client:
            client.wait_ready()
            assert client.is_serving()
            assert client.extract("plain", noise(1, 3, 8, 8), "fc")["fc"].shape == (1, 5)
            failed = client.model("broken")
            assert (failed.state, {model.model_id: model.state for model in client.models()}) == (
                "failed",
                {"broken": "failed", "plain": "loaded"},
            )
            assert failed.error_message
            with pytest.raises(trocar.errors.ModelNotLoadedError) as caught:
                client.extract("broken", noise(1, 3), "fc")
            assert failed.error_message in str(caught.value)
            assert caught.value.details["cause"]
            with pytest.raises(trocar.errors.ModelNotLoadedError):
                client.wait_ready(models=["plain", "broken"])
            (feature,) = (one for one in client.server_info().features if one.name == "models")
            assert (feature.is_on, failed.error_message in feature.reason) == (False, True)
        with pytest.raises(SystemExit):
            main(["models", "--server", server.address])
        assert failed.error_message.split()[0] in capsys.readouterr().out
        found = {finding.subject: finding for finding in check_server(Target(server.address))}
    assert found["server's models"].level == "WARN"
    assert [line["why"] for line in lines if line["event"] == "model failed"] == [failed.error_message]


def started(**settings: Any) -> None:
    with running_server(device="cpu", **settings):
        pass


@pytest.mark.parametrize("kind", BROKEN)
def test_with_strict_a_model_that_fails_ends_the_start(kind: str) -> None:
    with capture_logs(), pytest.raises(ServiceError):
        started(models={"plain": PLAIN, "broken": BROKEN[kind]}, strict=True)


def test_where_no_model_works_the_server_does_not_start() -> None:
    with capture_logs(), pytest.raises(ServiceError, match="none of the 2 models"):
        started(models={"one": MISSING, "two": BROKEN["no-such-architecture"]})
    with capture_logs(), pytest.raises(ServiceError, match="resnet19"):
        started(models={"two": BROKEN["no-such-architecture"]})


def test_serve_exits_with_one_where_it_is_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROCAR_DATA_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        main(
            ["serve", "resnet18=random:0", "resnet19=random:0", "--strict", "--port", "0", "--device", "cpu"]
        )
    assert stopped.value.code == 1


def test_what_failed_is_loaded_when_it_is_mended(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    with capture_logs():
        server = serve(models={"plain": PLAIN, "late": custom(Plain, (3, 8, 8), weights=str(file))})
        with trocar.connect(server.address) as client:
            assert client.model("late").state == "failed"
            client.train("plain").export(file)
            assert client.load("late").is_loaded
            assert client.model("late").error_message == ""


def test_a_reload_loads_what_failed_before(tmp_path: Path) -> None:
    file, config = tmp_path / "weights.safetensors", tmp_path / "trocar.toml"
    factory = f"factory = '{Plain.__module__}:Plain'\ninput_shape = [3, 8, 8]\n"
    config.write_text(
        f"[server]\ndevice = 'cpu'\nport = 0\ndata_dir = '{tmp_path / 'data'}'\n"
        f"[models.plain]\n{factory}weights = 'random:0'\n[models.late]\n{factory}weights = '{file}'\n"
    )

    async def run() -> list[str]:
        running = await app.start(read_config(config), reread=lambda: read_config(config))
        try:
            address = f"127.0.0.1:{running.rpc.port}"
            async with trocar.aio.connect(address) as client:
                first = await client.reload_config()
                trainer = await client.train("plain")
                await trainer.export(file)
                return [*first, *await client.reload_config(), (await client.model("late")).state]
        finally:
            await running.stop()

    with capture_logs():
        first, second, state = asyncio.run(run())
    assert first.startswith("model late: still failed")
    assert (second, state) == ("model late: loaded", "loaded")


def test_a_load_that_fails_is_listed_as_failed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("trocar_server.models.weights.downloads.download_url_to_file", refuse, raising=False)
    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with trocar.connect(serve(models={"plain": PLAIN}).address) as client:
        with pytest.raises(trocar.TrocarError):
            client.load("squeezenet1_1")
        listed = {model.model_id: model for model in client.models()}
        assert listed["squeezenet1_1"].state == "failed"
        assert listed["squeezenet1_1"].error_message
        with pytest.raises(trocar.errors.ModelNotLoadedError):
            client.extract("squeezenet1_1", noise(1, 3, 64, 64), "/out")
        with pytest.raises(trocar.errors.UnknownArchitectureError):
            client.load("resnet19")
        assert "resnet19" not in {model.model_id for model in client.models()}


@pytest.mark.parametrize("names", [["a"], [f"class {index}" for index in range(6)]])
def test_class_names_that_are_not_one_for_each_output_are_refused(serve: Serve, names: list[str]) -> None:
    with trocar.connect(serve(models={"plain": PLAIN}).address) as client:
        trainer = client.train("plain", head=3)
        with pytest.raises(trocar.errors.InvalidArgumentError, match=f"{len(names)} names .* 3 outputs"):
            trainer.publish("tuned", categories=names)
        assert [model.model_id for model in client.models()] == ["plain"]
        trainer.publish("tuned", categories=["a", "b", "c"])
        assert client.model("tuned").categories == ("a", "b", "c")


def test_the_server_says_what_is_off_and_why(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(models={"plain": PLAIN}, limits={"feature_cache_bytes": 1 << 20})
    with trocar.connect(server.address) as client:
        found = {feature.name: feature for feature in client.server_info().features}
    expected = {"fast", "bf16", "openvino", "cuda", "reply_cache", "shared_memory", "training", "models"}
    assert expected | {"tls", "tokens", "metrics", "traces", "server_id"} <= set(found)
    assert found["reply_cache"].is_on
    assert all(feature.is_on or feature.reason for feature in found.values())
    assert "tls_cert" in found["tls"].reason
    with pytest.raises(SystemExit) as stopped:
        main(["status", "--server", server.address])
    assert stopped.value.code in (0, None)
    assert "reply_cache: on" in capsys.readouterr().out


def test_without_openvino_the_reason_says_what_to_install(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trocar_server.engine.compiled.backends.availability.is_installed", lambda: False)
    with trocar.connect(serve(models={"plain": PLAIN}).address) as client:
        found = {feature.name: feature for feature in client.server_info().features}
    assert (found["openvino"].is_on, "trocar[openvino]" in found["openvino"].reason) == (False, True)
    assert "trocar[openvino]" in found["fast"].reason
