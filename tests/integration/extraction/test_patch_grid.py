"""Patch tokens as pictures, without class and register tokens: as transformers and timm say."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as T
from torch import nn

import trocar
from tests.support.servers.running_server import running_server

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {**SIZES, "intermediate_size": 16, "image_size": (8, 12), "patch_size": 4}
SQUARE = {**IMAGE, "image_size": 8}
TEXT = {**SIZES, "intermediate_size": 16, "vocab_size": 30}
IDS = np.array([[3, 1, 4, 1], [9, 2, 6, 5]])
# Four patches and five tokens before them make nine tokens, a square that is none.
FAMILIES: dict[str, tuple[Any, Any, str, int, tuple[int, int]]] = {
    "vit": (T.ViTModel, T.ViTConfig(**IMAGE), "layer[0]", 1, (2, 3)),
    "dinov2": (T.Dinov2Model, T.Dinov2Config(**SIZES, image_size=8, patch_size=4), "layer[0]", 1, (2, 2)),
    "registers": (
        T.Dinov2WithRegistersModel,
        T.Dinov2WithRegistersConfig(**SIZES, image_size=8, patch_size=4, num_register_tokens=4),
        "layer[0]",
        5,
        (2, 2),
    ),
    "clip": (T.CLIPModel, T.CLIPConfig(text_config=TEXT, vision_config=SQUARE), "vision.layer[0]", 1, (2, 2)),
    "siglip": (
        T.SiglipModel,
        T.SiglipConfig(text_config=TEXT, vision_config=SQUARE),
        "vision.layer[0]",
        0,
        (2, 2),
    ),
}


def timm_vit(reg_tokens: int = 0, class_token: bool = True) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"global_pool": "token" if class_token else "avg", "num_classes": 3}
    model: nn.Module = timm.models.VisionTransformer(
        img_size=(8, 12),
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=4,
        reg_tokens=reg_tokens,
        class_token=class_token,
        **options,
    )
    return model.eval()


def dynamic_vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, dynamic_img_size=True
    )
    return model.eval()


class Folded(nn.Module):
    """Patches by views alone, and the class token behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 16)
        self.last = nn.Parameter(torch.ones(1, 1, 16))
        self.tokens = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        cut = x.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
        patches = self.embed(cut.reshape(batch, height // 4 * (width // 4), 48))
        found: torch.Tensor = self.tokens(torch.cat([patches, self.last.expand(batch, -1, -1)], 1))
        return found.mean(1)


def folded_vit() -> nn.Module:
    torch.manual_seed(0)
    return Folded().eval()


VIDEO = T.VideoMAEConfig(**SIZES, intermediate_size=16, image_size=8, patch_size=4, num_frames=4)
TIMM = {"plain": (0, True), "registers": (4, True), "patches": (0, False)}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    root = tmp_path_factory.mktemp("folders")
    tables: dict[str, Any] = {}
    for name, (kind, config, *_) in FAMILIES.items():
        torch.manual_seed(0)
        kind(config).eval().save_pretrained(root / name)
        tables[name] = {"source": f"hf:{root / name}"}
    for name, arguments in TIMM.items():
        tables[f"timm-{name}"] = {
            "factory": f"{__name__}:timm_vit",
            "arguments": arguments,
            "input_shape": (3, 8, 12),
        }
    torch.manual_seed(0)
    T.VideoMAEModel(VIDEO).eval().save_pretrained(root / "video")
    tables["video"] = {"source": f"hf:{root / 'video'}"}
    for name in ("dynamic_vit", "folded_vit"):
        tables[name] = {"factory": f"{__name__}:{name}", "input_shape": (3, 8, 8)}
    with (
        running_server(models=tables, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def pictures(size: tuple[int, int]) -> Any:
    shape = (2, 3, size[0] * 4, size[1] * 4)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_of_transformers_fold_without_prefix_tokens(client: trocar.Client, family: str) -> None:
    _, _, stage, prefix, (rows, columns) = FAMILIES[family]
    inputs: dict[str, Any] = {"pixel_values": pictures((rows, columns))}
    if family in ("clip", "siglip"):
        inputs["input_ids"] = IDS
    folded = client.extract(family, inputs, [trocar.tap(stage, reduce=trocar.grid())])[stage]
    tokens = client.extract(family, inputs, [stage])[stage]
    assert tokens.shape[1] == prefix + rows * columns
    assert folded.shape == (2, 16, rows, columns)
    for row in range(rows):
        for column in range(columns):
            np.testing.assert_array_equal(
                folded[:, :, row, column], tokens[:, prefix + row * columns + column]
            )


@pytest.mark.parametrize("name", TIMM)
def test_patches_of_timm_fold_as_its_own_intermediates(client: trocar.Client, name: str) -> None:
    images = pictures((2, 3))
    model: Any = timm_vit(*TIMM[name])
    with torch.inference_mode():
        own = model.forward_intermediates(torch.from_numpy(images), intermediates_only=True)
    taps = [trocar.tap(f"blocks.{index}", reduce=trocar.grid()) for index in range(2)]
    maps = client.extract(f"timm-{name}", images, taps)
    for found, expected in zip(maps.values(), own, strict=True):
        np.testing.assert_array_equal(found, expected.numpy())


def test_statistics_and_pools_see_a_picture(client: trocar.Client) -> None:
    tap = trocar.tap(
        "layer[0]", reduce=[trocar.grid(), trocar.pool("max", (1, 3))], stats="mean", over="channel"
    )
    maps = client.extract("vit", {"pixel_values": pictures((2, 3))}, [tap])
    assert maps["layer[0]"].shape == (2, 16, 1, 3)
    assert np.shape(next(iter(maps.stats.values())).mean) == (16,)
    plan = client.plan("vit", {"pixel_values": pictures((2, 3))}, [tap])
    assert next(iter(plan.feature_maps.values())).shape == (2, 16, 1, 3)


@pytest.mark.parametrize(
    ("family", "selector", "reduction", "words"),
    [
        ("clip", "text.layer[0]", trocar.grid(), "the model's patches are not known"),
        ("vit", "layer[0]", trocar.grid(3, 3), "it has 7 tokens, not 3 x 3"),
    ],
)
def test_tokens_that_are_no_patches_are_refused(
    client: trocar.Client, family: str, selector: str, reduction: Any, words: str
) -> None:
    rows = FAMILIES[family][4]
    inputs: dict[str, Any] = {
        "pixel_values": pictures(rows),
        **({"input_ids": IDS} if family == "clip" else {}),
    }
    with pytest.raises(trocar.errors.ReductionRejectedError, match=words):
        client.extract(family, inputs, [trocar.tap(selector, reduce=reduction)])


@pytest.mark.parametrize("size", [(2, 2), (3, 5), (5, 3), (4, 1)])
def test_patches_follow_the_size_of_the_request(client: trocar.Client, size: tuple[int, int]) -> None:
    """Another size than the model was made for, and than the one before."""
    images = pictures(size)
    model: Any = dynamic_vit()
    with torch.inference_mode():
        (own,) = model.forward_intermediates(torch.from_numpy(images), indices=[0], intermediates_only=True)
    maps = client.extract("dynamic_vit", images, [trocar.tap("blocks.0", reduce=trocar.grid())])
    np.testing.assert_allclose(maps["blocks.0"], own.numpy(), atol=1e-5)
    (grid,) = client.extract("dynamic_vit", images, ["blocks.0"]).info["blocks.0"].token_grids
    assert (grid.dimension, grid.sizes, grid.first) == (1, size, 1)


def test_interpolated_positions_have_patches_of_the_request(client: trocar.Client) -> None:
    inputs = {"pixel_values": pictures((4, 3))}  # DINOv2 interpolates the positions of 2 x 2 patches
    folded = client.extract("registers", inputs, [trocar.tap("layer[0]", reduce=trocar.grid())])["layer[0]"]
    tokens = client.extract("registers", inputs, ["layer[0]"])["layer[0]"]
    np.testing.assert_array_equal(folded, tokens[:, 5:].transpose(0, 2, 1).reshape(2, 16, 4, 3))


def test_patches_of_a_video_are_refused_with_reductions_that_choose_a_frame(client: trocar.Client) -> None:
    videos = np.random.default_rng(0).standard_normal((2, 4, 3, 8, 8)).astype(np.float32)
    with pytest.raises(
        trocar.errors.ReductionRejectedError, match=r"2 x 2 x 2 \(frames x rows x columns\)"
    ) as refused:
        client.extract("video", videos, [trocar.tap("layer[0]", reduce=trocar.grid())])
    assert "reduce=[trocar.index(np.s_[:, 0:4]), trocar.grid(2, 2)]" in str(refused.value)
    chosen = [trocar.index(np.s_[:, 4:8]), trocar.grid(2, 2)]
    maps = client.extract(
        "video", videos, [trocar.tap("layer[0]", reduce=chosen), trocar.tap("layer[0]", alias="all")]
    )
    expected = maps["all"][:, 4:8].transpose(0, 2, 1).reshape(2, 16, 2, 2)
    np.testing.assert_array_equal(maps["encoder.layer.0"], expected)
    assert maps.info["all"].token_grids[0].sizes == (2, 2, 2)


def test_tokens_behind_the_patches_are_refused_with_what_leaves_them_out(client: trocar.Client) -> None:
    images = pictures((2, 3))
    with pytest.raises(
        trocar.errors.ReductionRejectedError, match="1 tokens that are no patches come behind"
    ):
        client.extract("folded_vit", images, [trocar.tap("tokens", reduce=trocar.grid())])
    chosen = [trocar.index(np.s_[:, :-1]), trocar.grid(2, 3)]
    maps = client.extract("folded_vit", images, [trocar.tap("tokens", reduce=chosen), trocar.tap("embed")])
    np.testing.assert_array_equal(maps["tokens"], maps["embed"].transpose(0, 2, 1).reshape(2, 16, 2, 3))


@pytest.mark.parametrize("size", [(3, 5), (2, 8), (1, 4)])
def test_class_activation_maps_have_the_patches_of_the_images(
    client: trocar.Client, size: tuple[int, int]
) -> None:
    """Selvaraju et al. 2017 by hand; 2 x 8 and 1 x 4 patches are as many as a square has."""
    images, kept = pictures(size), dict[str, Any]()
    model: Any = dynamic_vit()

    def keep(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept["value"] = output

    model.blocks[1].norm1.register_forward_hook(keep)
    model(torch.from_numpy(images).requires_grad_())[:, 1].sum().backward()
    value, gradient = (kept["value"][:, 1:].detach(), kept["value"].grad[:, 1:])
    expected = (value * gradient.mean(1, keepdim=True)).sum(2).relu().reshape(2, *size)
    found = client.grad_cam("dynamic_vit", images, "blocks.1.norm1", trocar.logit(1))
    np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-6)
    assert found.heatmap.shape == (2, size[0] * 4, size[1] * 4)


@pytest.mark.parametrize("port", ["pattern", "logits"])
def test_patterns_of_attention_have_the_patches_of_queries_and_keys(client: trocar.Client, port: str) -> None:
    maps = client.extract("registers", {"pixel_values": pictures((3, 2))}, [f"**/{port}"])
    assert maps.info
    for info in maps.info.values():
        assert info.axes == ("batch", "heads", "tokens", "tokens")
        assert [(grid.dimension, grid.sizes, grid.first) for grid in info.token_grids] == [
            (2, (3, 2), 5),
            (3, (3, 2), 5),
        ]


def test_values_of_functions_have_the_dimensions_of_the_modules_that_call_them(client: trocar.Client) -> None:
    """Each linear layer calls one function, in the same order."""
    images = pictures((2, 3))
    functions = client.extract("dynamic_vit", images, ["fn:linear@*"]).info.values()
    modules = client.extract("dynamic_vit", images, ["**:Linear"]).info.values()
    assert [info.shape for info in functions] == [info.shape for info in modules]
    assert [info.axes for info in functions] == [info.axes for info in modules]
    (convolution,) = client.extract("dynamic_vit", images, ["fn:conv2d"]).info.values()
    assert convolution.axes == ("batch", "channels", "height", "width")


def test_statistics_of_functions_are_of_the_channels_that_they_have(client: trocar.Client) -> None:
    tap = trocar.tap("fn:permute@0", stats="mean", over="channel")  # (batch, rows, columns, channels)
    maps = client.extract("dynamic_vit", pictures((2, 3)), [tap])
    value, found = maps["fn:permute@0"], maps.stats["fn:permute@0"]
    np.testing.assert_allclose(found.mean, value.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
