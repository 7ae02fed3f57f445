"""timm models with random weights: plain hooks, stages by feature_info, preprocessing by their transform."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import trocar
from tests.support.servers.running_server import running_server
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import load_model, named_model, parse_model_argument
from trocar_server.models.stages import stages_for

SIDES = {
    "vit_tiny_patch16_224": 224,
    "test_vit": 160,
    "test_vit2": 160,
    "test_convnext": 160,
    "test_resnet": 160,
    "test_efficientnet": 160,
    "test_byobnet": 160,
    "test_mambaout": 160,
    "test_nfnet": 160,
    "resnet10t": 64,
    "mobilenetv3_small_050": 64,
    "ghostnet_050": 64,
    "lcnet_035": 64,
}
PYRAMIDS = ("test_convnext", "test_resnet", "test_efficientnet", "resnet10t", "mobilenetv3_small_050")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    models = {name: {"source": f"timm:{name}", "weights": "random:0"} for name in SIDES}
    data_dir = tmp_path_factory.mktemp("data")
    with (
        running_server(models=models, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def _own(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return timm.create_model(name, pretrained=False).eval()


def _images(side: int) -> Any:
    return np.random.default_rng(0).standard_normal((2, 3, side, side), np.float32)


@pytest.mark.parametrize("name", SIDES)
def test_a_model_is_timms_own_bit_for_bit(client: trocar.Client, name: str) -> None:
    images = _images(SIDES[name])
    stages = {stage: text for stage, text in client.model(name).stages.items() if stage.startswith("stage")}
    last = max(stages)
    own, seen = _own(name), []
    own.get_submodule(stages[last]).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        output = own(torch.from_numpy(images))
    maps = client.extract(name, images, [last, "/out"])
    np.testing.assert_array_equal(maps[last], seen[0].numpy())
    np.testing.assert_array_equal(maps["/out"], output.numpy())


@pytest.mark.parametrize("name", PYRAMIDS)
def test_stages_are_timms_intermediate_features(client: trocar.Client, name: str) -> None:
    images = _images(SIDES[name])
    with torch.inference_mode():
        own = _own(name).forward_intermediates(torch.from_numpy(images), intermediates_only=True)
    last = {value.shape[-1]: value for value in own if value.shape[-1] <= images.shape[-1] // 4}
    names = [f"stage{number}" for number in range(1, len(last) + 1)]
    maps = client.extract(name, images, names)
    for stage, value in zip(names, last.values(), strict=True):
        np.testing.assert_array_equal(maps[stage], value.numpy(), err_msg=stage)


def test_the_layers_of_a_transformer_are_timms_intermediate_tokens(client: trocar.Client) -> None:
    images = _images(224)
    with torch.inference_mode():
        own = _own("vit_tiny_patch16_224").forward_intermediates(
            torch.from_numpy(images),
            intermediates_only=True,
            output_fmt="NLC",
            return_prefix_tokens=True,
            indices=[0, 5, 11],
        )
    maps = client.extract("vit_tiny_patch16_224", images, ["layer[0]", "layer[5]", "layer[-1]"])
    for name, (patches, prefix) in zip(("layer[0]", "layer[5]", "layer[-1]"), own, strict=True):
        np.testing.assert_array_equal(maps[name], torch.cat([prefix, patches], dim=1).numpy(), err_msg=name)


@pytest.mark.parametrize(
    "name", ["test_vit", "test_convnext", "resnet10t", "efficientnet_b0", "vit_base_patch14_dinov2"]
)
def test_images_are_prepared_as_timm_prepares_them(name: str, tmp_path: Path) -> None:
    from timm.data import create_transform, resolve_data_config

    argument = f"timm:{name}=random:0"
    hosted = load_model(parse_model_argument(argument), torch.device("meta"), tmp_path)
    transform = create_transform(**resolve_data_config({}, model=hosted.module))
    pixels = np.random.default_rng(0).integers(0, 256, (300, 411, 3), np.uint8)
    image = Image.fromarray(pixels)
    assert hosted.preprocessing is not None
    assert torch.equal(hosted.preprocessing([image])[0], transform(image))


@pytest.mark.parametrize(
    ("name", "options", "side", "is_fixed"),
    [
        ("vit_tiny_patch16_224", {"img_size": 384}, 384, True),
        ("mixer_s16_224", {"img_size": 64}, 64, True),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, 224, False),
        ("swin_tiny_patch4_window7_224", {"strict_img_size": False}, 224, False),
        ("test_convnext", {}, 160, False),
        ("xcit_nano_12_p16_224", {}, 224, False),
        ("twins_pcpvt_small", {}, 224, False),
        ("levit_128s", {}, 224, True),
    ],
)
def test_the_size_of_images_is_the_modules(
    tmp_path: Path, name: str, options: dict[str, Any], side: int, is_fixed: bool
) -> None:
    from timm.data import create_transform, resolve_data_config

    spec = named_model("m", f"timm:{name}", weights="random:0", options=options)
    hosted = load_model(spec, torch.device("cpu"), tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 411, 3), np.uint8))
    assert hosted.preprocessing is not None
    settings = resolve_data_config({"input_size": (3, side, side)}, model=hosted.module)
    assert torch.equal(hosted.preprocessing([image])[0], create_transform(**settings)(image))
    assert hosted.input_shape == (3, side, side)
    other = torch.zeros(1, 3, side + 224, side)
    with torch.inference_mode():  # timm itself takes what is not refused, and nothing else
        hosted.module(*hosted.example_inputs())
        with pytest.raises((AssertionError, RuntimeError)) if is_fixed else nullcontext():
            hosted.module(other)
    with pytest.raises(ServiceError) if is_fixed else nullcontext():
        hosted.signature.check([("x", torch.float32, tuple(other.shape))])


def test_images_are_not_prepared_for_a_model_of_one_channel(tmp_path: Path) -> None:
    spec = named_model("m", "timm:resnet10t", weights="random:0", options={"in_chans": 1})
    hosted = load_model(spec, torch.device("cpu"), tmp_path)
    assert (hosted.preprocessing, hosted.input_shape) == (None, (1, 176, 176))


def _stored_weights(name: str, cache: Path) -> Path:
    """Put an architecture's weights, random ones, into the cache as if they were downloaded."""
    config = timm.get_pretrained_cfg(name)
    file = cache / "weights" / "timm" / f"{config.architecture}.{config.tag}.safetensors"
    file.parent.mkdir(parents=True)
    save_file(_own(name).state_dict(), file)
    return file


@pytest.mark.parametrize("class_count", [10, 1001])
def test_weights_of_another_number_of_classes_are_refused(tmp_path: Path, class_count: int) -> None:
    file = _stored_weights("resnet10t", tmp_path)
    options = {"num_classes": class_count}
    for settings in ({}, {"weights": str(file)}):
        with pytest.raises(ServiceError) as error:
            load_model(
                named_model("m", "timm:resnet10t", options=options, **settings), torch.device("cpu"), tmp_path
            )
        assert error.value.reason is ErrorReason.WEIGHTS_MISMATCH
    own = load_model(
        named_model("m", "timm:resnet10t", options=options, weights="random:0"), torch.device("cpu"), tmp_path
    )
    assert own.module.num_classes == class_count


@pytest.mark.parametrize("class_count", [0, 1000])
def test_a_head_may_be_left_out_of_weights(tmp_path: Path, class_count: int) -> None:
    _stored_weights("resnet10t", tmp_path)
    spec = named_model("m", "timm:resnet10t", options={"num_classes": class_count})
    hosted = load_model(spec, torch.device("cpu"), tmp_path)
    own = _own("resnet10t").state_dict()
    assert all(torch.equal(value, own[key]) for key, value in hosted.module.state_dict().items())


def test_classes_are_those_of_imagenet(client: trocar.Client) -> None:
    from timm.data import ImageNetInfo

    categories = client.model("vit_tiny_patch16_224").categories
    assert categories == tuple(ImageNetInfo("imagenet-1k").label_descriptions())
    assert (
        stages_for(
            load_model(parse_model_argument("timm:test_vit=random:0"), torch.device("meta"), Path("x"))
        )["head"]
        == "head"
    )


def test_an_unknown_architecture_has_near_names() -> None:
    with pytest.raises(trocar.errors.UnknownArchitectureError, match="vit_tiny_patch16_224"):
        trocar.connect("local", models=["timm:vit_tiny_patch16_225=random:0"])


def test_a_source_can_be_hosted_in_the_callers_process() -> None:
    images = _images(64)
    with trocar.connect("local", models={"small": "timm:resnet10t=random:0"}) as local:
        maps = local.extract("small", images, ["/out"])
    with torch.inference_mode():
        np.testing.assert_array_equal(maps["/out"], _own("resnet10t")(torch.from_numpy(images)).numpy())
