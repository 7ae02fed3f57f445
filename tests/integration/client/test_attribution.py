"""Attributions through a real server equal captum's and pytorch-grad-cam's on the same weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import captum.attr as captum
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from pytorch_grad_cam import GradCAM
from structlog.testing import capture_logs
from torch import nn

import trocar
from tests.support.models.tiny_models import ImagesFirst, LateImages, of_images
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer, running_server
from trocar._base.tensors import Array
from trocar._cli.app import main
from trocar_server.config import ModelConfig

AT = {"resnet18": "layer4", "mobilenet_v3_small": "features.12"}
NAMES = list(AT)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {name: ModelConfig(weights="random:7", categories="torchvision:resnet50") for name in NAMES}
    with running_server(models=models) as running:
        yield running


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """A hosted model, and the same one in this process."""
    torch.manual_seed(7)
    return request.param, torchvision.models.get_model(request.param, weights=None).eval()


X = noise(2, 3, 64, 64)


def target(model: nn.Module) -> torch.Tensor:
    classes: torch.Tensor = model(torch.from_numpy(X)).argmax(1)
    return classes


def leaf() -> torch.Tensor:
    return torch.from_numpy(X.copy()).requires_grad_()


def same(found: Array, expected: torch.Tensor) -> None:
    wanted = expected.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max()))


def test_gradients_of_the_input(client: trocar.Client, pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    for method, kind in (("saliency", captum.Saliency), ("input_x_gradient", captum.InputXGradient)):
        found = client.attribute(name, X, method)
        same(found.values, kind(model).attribute(leaf(), target=target(model)))


def test_paths(client: trocar.Client, pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    found = client.attribute(name, X, "integrated_gradients", steps=6, batch_size=5, delta=True)
    oracle: Any = captum.IntegratedGradients(model)
    values, delta = oracle.attribute(leaf(), target=target(model), n_steps=6, return_convergence_delta=True)
    same(found.values, values)
    assert found.scores is not None
    assert found.delta is not None
    np.testing.assert_allclose(
        found.delta, delta.detach().numpy(), atol=1e-6 * float(np.abs(found.scores).max())
    )
    found = client.attribute(name, X, "layer_conductance", at=AT[name], steps=5, batch_size=4)
    layer: Any = captum.LayerConductance(model, model.get_submodule(AT[name]))
    same(found.values, layer.attribute(leaf(), target=target(model), n_steps=5))


@pytest.mark.parametrize("method", ["integrated_gradients", "saliency", "smoothgrad"])
def test_scores_are_of_the_class_that_was_asked_for(
    client: trocar.Client, pair: tuple[str, nn.Module], method: str
) -> None:
    name, model = pair
    options: dict[str, Any] = {"steps": 2, "delta": True} if method == "integrated_gradients" else {}
    found = client.attribute(name, X, method, of=trocar.logit(3), **options)
    with torch.no_grad():
        expected = model(torch.from_numpy(X))[:, 3].numpy()
    np.testing.assert_allclose(np.asarray(found.scores), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU:UserWarning")
def test_guided_backprop(client: trocar.Client, pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    same(
        client.attribute(name, X, "guided_backprop").values,
        captum.GuidedBackprop(model).attribute(leaf(), target=target(model)),
    )


def test_occlusion(client: trocar.Client, pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    found = client.attribute(name, X, "occlusion", window=24, stride=(1, 20, 24), batch_size=7)
    expected = captum.Occlusion(model).attribute(
        leaf(), target=target(model), sliding_window_shapes=(3, 24, 24), strides=(1, 20, 24)
    )
    # of the score, not of its difference: a batch of another size has other rounding
    scale = float(np.abs(np.asarray(found.scores)).max())
    np.testing.assert_allclose(found.values, expected.detach().numpy(), atol=1e-5 * scale)


def test_class_activation_maps(client: trocar.Client, pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    found = client.grad_cam(name, X, AT[name])
    with GradCAM(model=model, target_layers=[model.get_submodule(AT[name])]) as made:
        expected = made(input_tensor=leaf(), targets=None)
    np.testing.assert_allclose(found.heatmap, expected, atol=1e-5)
    assert expected.max() > 0.9
    chosen = client.grad_cam(name, X)
    assert chosen.at == AT[name].partition(".")[0]
    np.testing.assert_array_equal(chosen.values, found.values)


async def turn() -> None:
    """Let the loop of the server write the lines that wait."""


def test_the_default_place_is_looked_up_once_for_a_model_and_a_shape() -> None:
    def methods() -> list[str]:
        server.run(turn)
        own = [line for line in log if line["event"] == "call" and line.get("model") == "placed"]
        found = [line["method"].rpartition("/")[2] for line in own]  # other servers of this process end calls
        log.clear()
        return found

    model = ModelConfig(architecture="resnet18", weights="random:7")
    with (
        capture_logs() as log,
        running_server(models={"placed": model}) as server,
        trocar.connect(server.address) as client,
    ):
        of = trocar.logit(3)
        first = client.grad_cam("placed", X, of=of)
        assert methods() == ["GetModel", "Plan", "Extract"]
        again = client.grad_cam("placed", X, of=of)
        assert methods() == ["GetModel", "Extract"]
        client.grad_cam("placed", noise(1, 3, 96, 96), of=of)
        assert methods() == ["GetModel", "Plan", "Extract"]
    assert again.at == first.at == "layer4"
    np.testing.assert_array_equal(again.values, first.values)


def photograph(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 280, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_images_are_preprocessed_by_the_server(client: trocar.Client, tmp_path: Path) -> None:
    image = photograph(tmp_path / "a.png")
    found = client.grad_cam("resnet18", [image, image])
    assert found.inputs.shape == (2, 3, 224, 224)
    again = client.grad_cam("resnet18", found.inputs)
    np.testing.assert_array_equal(found.values, again.values)
    assert len(found.class_names) == 2
    found.plot(tmp_path / "cam.png", image=image)
    assert (tmp_path / "cam.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "method",
    [
        *("saliency", "input_x_gradient", "integrated_gradients", "smoothgrad", "guided_backprop"),
        *("grad_cam", "layer_conductance", "occlusion"),
    ],
)
def test_images_need_not_be_the_first_parameter(
    pixel_client: trocar.Client, method: str, tmp_path: Path
) -> None:
    image = photograph(tmp_path / "a.png")
    expected = pixel_client.attribute("first", image, method)
    late = pixel_client.attribute("late", image, method)
    assert (expected.at, late.at) in {("/in", "/in(pixel_values)"), ("relu", "relu")}
    np.testing.assert_array_equal(late.values, expected.values)


@pytest.fixture(scope="module")
def pixel_client() -> Iterator[trocar.Client]:
    """A client of two models of the same weights, whose images are the first parameter and the second."""
    models = {"first": of_images(ImagesFirst), "late": of_images(LateImages)}
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as client:
        yield client


async def test_the_asyncio_client_gives_the_same(server: RunningServer, client: trocar.Client) -> None:
    async with trocar.aio.connect(server.address) as other:
        found = await other.attribute("resnet18", X, "integrated_gradients", steps=3)
        cam = await other.grad_cam("resnet18", X, plus_plus=True)
    expected = client.attribute("resnet18", X, "integrated_gradients", steps=3)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(cam.values, client.grad_cam("resnet18", X, plus_plus=True).values)


def test_what_the_server_refuses_is_raised(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModelError):
        client.attribute("no-such-model", X, "saliency")
    with pytest.raises(trocar.errors.UnknownModuleError):
        client.grad_cam("resnet18", X, "layer9")
    with pytest.raises(trocar.errors.ObjectiveOutOfRangeError):
        client.attribute("resnet18", X, "saliency", of=trocar.logit(1000))
    with pytest.raises(trocar.errors.ObjectiveOutOfRangeError):
        client.attribute("resnet18", X, "integrated_gradients", of=trocar.logit([3, 1000]), steps=2)
    with pytest.raises(trocar.errors.UnknownModuleError) as caught:
        client.attribute("resnet18", X, "guided_backprop", relus="**:GELU")
    assert "relus= names others" in caught.value.__notes__[0]


def test_the_command_writes_a_picture(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, out = photograph(tmp_path / "a.png"), tmp_path / "cam.png"
    arguments = ["cam", "mobilenet_v3_small", str(image), "--class", "tench", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(out), "--server", server.address])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["at"], found["images"][0]["class"], found["images"][0]["name"]) == ("features", 0, "tench")
    with Image.open(out) as picture:
        assert min(picture.size) > 300


def test_the_command_never_writes_on_its_images(server: RunningServer, tmp_path: Path) -> None:
    image = photograph(tmp_path / "a.png")
    before = image.read_bytes()
    words = ["cam", "mobilenet_v3_small", str(image), "--server", server.address, "--out"]
    for out, code in ((tmp_path, 0), (image, 2)):
        with pytest.raises(SystemExit) as ended:
            main([*words, str(out)])
        assert ended.value.code == code
    assert image.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-2.png", "a.png"]
