"""Every way in which loading fails, and what the error says."""

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import ResNet18_Weights

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom, rebuilt
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig


def broken_factory() -> None:
    """Return no module."""


def failing_factory() -> None:
    """Fail as an operator's code may."""
    raise FileNotFoundError("/home/operator/secret.txt")


@pytest.mark.parametrize("name", ["nonsense", "", "../../etc/passwd", "os:system", "resnet18;", "x" * 5000])
def test_a_name_that_nobody_knows_cannot_be_loaded(models_client: trocar.Client, name: str) -> None:
    with pytest.raises(trocar.NotFoundError) as caught:
        models_client.load(name)
    assert len(str(caught.value)) < 500


def test_loading_an_unknown_name_raises_what_the_client_documents(models_client: trocar.Client) -> None:
    """`Client.load` promises `UnknownModelError` where neither catalogue nor torchvision has the name."""
    with pytest.raises(trocar.errors.UnknownModelError):
        models_client.load("nonsense")


@pytest.mark.parametrize(
    "weights",
    [
        "IMAGENET1K_V9",
        "/etc/passwd",
        "model.safetensors",
        "../m.safetensors",
        "random:x",
        "random:-1",
        "default",
        " ",
    ],
)
def test_weights_that_do_not_exist_are_refused_with_those_that_do(
    models_client: trocar.Client, weights: str
) -> None:
    with pytest.raises(trocar.errors.UnknownWeightsError) as caught:
        models_client.load("resnet34", weights)
    assert "random" in str(caught.value)
    assert "/etc" not in str(caught.value).partition("available")[2]


def test_a_model_that_could_not_be_loaded_is_not_in_the_catalogue(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownWeightsError):
        models_client.load("resnet34", "nope")
    with pytest.raises(trocar.errors.UnknownModelError):
        models_client.model("resnet34")


def test_other_weights_for_a_model_of_the_catalogue_are_a_conflict(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.ModelConflictError, match="random:0"):
        models_client.load("resnet18", "random:1")


def test_a_download_that_is_impossible_says_how_to_give_a_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    running = serve(data_dir=tmp_path)
    with trocar.connect(running.address) as client:
        with pytest.raises(trocar.errors.WeightsUnavailableError, match="trocar admin convert") as caught:
            client.load("resnet18")
        assert str(tmp_path) not in str(caught.value)
        failed = client.model("resnet18")
    assert failed.state == "failed"
    assert "no network" in failed.error_message
    assert ResNet18_Weights.DEFAULT.url in failed.error_message


def test_a_failed_load_does_not_keep_its_id(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    with trocar.connect(serve(data_dir=tmp_path).address) as client:
        for name in ("resnet18", "resnet34"):
            with pytest.raises(trocar.errors.WeightsUnavailableError):
                client.load(name)
        assert client.load("resnet18", "random:3").is_loaded
        assert client.unload("resnet34").state == "unloaded"
        assert [model.model_id for model in client.models()] == ["resnet18"]
        with pytest.raises(trocar.errors.ModelConflictError, match="random:3"):
            client.load("resnet18", "random:4")


def test_an_unload_forgets_why_a_configured_model_failed(serve: Serve, tmp_path: Path) -> None:
    running = serve()
    _add(running, "m", str(tmp_path / "plain.safetensors"))
    with trocar.connect(running.address) as client:
        with pytest.raises(trocar.errors.WeightsUnavailableError):
            client.load("m")
        assert client.model("m").state == "failed"
        client.unload("m")
        assert (client.model("m").state, client.model("m").error_message) == ("unloaded", "")


def test_a_failed_load_can_be_tried_again(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    running = serve()
    _add(running, "m", str(path))
    with trocar.connect(running.address) as client:
        with pytest.raises(trocar.errors.WeightsUnavailableError):
            client.load("m")
        save_file(rebuilt(Plain).state_dict(), path)
        assert client.load("m").is_loaded


def _add(running: RunningServer, model_id: str, weights: str) -> None:
    spec = model_spec(model_id, ModelConfig(**custom(Plain, (3, 8, 8), weights=weights)))

    async def add() -> None:
        running.engine.catalogue.add(spec)

    running.run(add)


def test_keys_that_do_not_fit_are_all_listed(serve: Serve, tmp_path: Path) -> None:
    state = rebuilt(Plain).state_dict()
    state["conv.weight"] = torch.zeros(1)
    state["extra"] = torch.zeros(1)
    del state["fc.bias"]
    path = tmp_path / "plain.safetensors"
    save_file(state, path)
    running = serve()
    _add(running, "m", str(path))
    with (
        trocar.connect(running.address) as client,
        pytest.raises(trocar.errors.WeightsMismatchError) as caught,
    ):
        client.load("m")
    assert all(key in str(caught.value) for key in ("conv.weight", "extra", "fc.bias"))
    assert str(tmp_path) not in str(caught.value)


def test_a_damaged_file_is_refused(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}garbage")
    running = serve()
    _add(running, "m", str(path))
    with trocar.connect(running.address) as client, pytest.raises(trocar.errors.WeightsCorruptError):
        client.load("m")


class Lazy(torch.nn.Module):
    """Has parameters without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    "factory",
    [
        "tests.integration.serving.test_model_errors:broken_factory",
        "tests.integration.serving.test_model_errors:failing_factory",
        "tests.integration.serving.test_model_errors:nothing_there",
        "no.such.module:factory",
        "tests.integration.serving.test_model_errors:Lazy",
        "threading:Lock",
    ],
)
def test_a_factory_that_does_not_work_is_the_operators_to_mend(serve: Serve, factory: str) -> None:
    with pytest.raises(Exception, match=f"model 'm'|factory '{factory}'") as caught:
        serve(models={"m": {"factory": factory, "weights": "random:0", "input_shape": (3,)}})
    assert getattr(caught.value, "reason", None) == "MODEL_INVALID"
    assert "/home/operator" not in str(caught.value)
