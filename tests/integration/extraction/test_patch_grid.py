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
    with pytest.raises(trocar.ReductionRejectedError, match=words):
        client.extract(family, inputs, [trocar.tap(selector, reduce=reduction)])
