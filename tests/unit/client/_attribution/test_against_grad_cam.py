"""Class activation maps equal pytorch-grad-cam's, and captum's where it has them."""

import copy
from collections.abc import Callable
from typing import Any

import captum.attr as captum
import numpy as np
import pytest
import torch
import torchvision
from pytorch_grad_cam import GradCAM, GradCAMPlusPlus
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from pytorch_grad_cam.utils.reshape_transforms import vit_reshape_transform
from torch import nn
from torchvision.models import VGG, SwinTransformer, VisionTransformer
from torchvision.models.vgg import make_layers

import trocar
from tests.support.oracles.torch_client import TorchClient
from tests.unit.client._attribution.conftest import Ask, images, predicted, same
from trocar import TokenGrid
from trocar._base.tensors import Array

Reshape = Callable[[torch.Tensor], torch.Tensor]


def oracle(
    kind: Any, model: nn.Module, at: str, x: Array, classes: Any = None, reshape: Reshape | None = None
) -> Array:
    """Its maps of a copy that works not in place: it keeps feature maps without copying them."""
    targets = None if classes is None else [ClassifierOutputTarget(k) for k in classes]
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    with kind(model=model, target_layers=[model.get_submodule(at)], reshape_transform=reshape) as made:
        found: Array = made(input_tensor=torch.from_numpy(x.copy()).requires_grad_(), targets=targets)
    return found


def close(found: Array, expected: Array) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert expected.max() > 0.9  # not a map of zeros


@pytest.mark.parametrize("plus_plus", [False, True])
@pytest.mark.parametrize("at", ["conv", "conv2"])
def test_maps_of_a_convolutional_net(ask: Ask, model: nn.Module, at: str, plus_plus: bool) -> None:
    x, kind = images(), GradCAMPlusPlus if plus_plus else GradCAM
    found = ask(model, "grad_cam", x, at, plus_plus=plus_plus)
    close(found.heatmap, oracle(kind, model, at, x))
    chosen = ask(model, "grad_cam", x, at, trocar.logit([4, 0, 2]), plus_plus=plus_plus)
    close(chosen.heatmap, oracle(kind, model, at, x, [4, 0, 2]))
    assert chosen.classes == (4, 0, 2)


def test_the_values_are_captums_before_any_scaling(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "grad_cam", x, "conv2")
    layer: Any = captum.LayerGradCam(model, model.get_submodule("conv2"))
    expected = layer.attribute(torch.from_numpy(x), target=predicted(model, x), relu_attributions=True)
    same(found.values, expected[:, 0])


class Strided(nn.Module):
    """A net whose feature map is smaller than its input, and not square."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.body = nn.Conv2d(6, 8, 3, stride=3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))).mean(dim=(2, 3)))


@pytest.mark.parametrize("plus_plus", [False, True])
def test_small_maps_are_resized_to_the_input(ask: Ask, plus_plus: bool) -> None:
    torch.manual_seed(1)
    model, x = Strided().eval(), images(4, (40, 61))
    found = ask(model, "grad_cam", x, "body", plus_plus=plus_plus)
    assert found.values.shape[1:] < found.heatmap.shape[1:] == (40, 61)
    close(found.heatmap, oracle(GradCAMPlusPlus if plus_plus else GradCAM, model, "body", x))


def vit() -> nn.Module:
    torch.manual_seed(2)
    made: Any = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=16, num_classes=5)
    nn.init.normal_(made.heads.head.weight)  # zero at first
    made.meaning = meaning_of_patches
    model: nn.Module = made.eval()
    return model


def meaning_of_patches(shape: tuple[int, ...]) -> dict[str, Any]:
    """What a server says of (batch, tokens, width) of `vit`."""
    if len(shape) != 3:
        return {}
    return {"axes": ("batch", "height", "channels"), "token_grids": (TokenGrid(1, (4, 4), 1),)}


@pytest.mark.parametrize("plus_plus", [False, True])
def test_tokens_behind_a_class_token_are_rows_and_columns(ask: Ask, plus_plus: bool) -> None:
    model, x, at = vit(), images(2, (32, 32)), "encoder.layers.encoder_layer_1.ln_1"
    found = ask(model, "grad_cam", x, at, plus_plus=plus_plus)
    kind = GradCAMPlusPlus if plus_plus else GradCAM
    expected = oracle(kind, model, at, x, reshape=lambda tokens: vit_reshape_transform(tokens, 4, 4))
    close(found.heatmap, expected)


def test_tokens_may_be_arranged_by_hand(ask: Ask) -> None:
    model, x, at = vit(), images(2, (32, 32)), "encoder.layers.encoder_layer_1.ln_1"

    def arranged(tokens: Array) -> Array:
        return np.moveaxis(tokens[:, 1:].reshape(len(tokens), 2, 8, -1), -1, 1)

    expected = oracle(GradCAM, model, at, x, reshape=lambda t: vit_reshape_transform(t, 2, 8))
    close(ask(model, "grad_cam", x, at, grid=arranged).heatmap, expected)
    close(ask(model, "grad_cam", x, at, grid=(2, 8)).heatmap, expected)


def test_channels_may_be_last(ask: Ask) -> None:
    torch.manual_seed(3)
    model: nn.Module = SwinTransformer([2, 2], 8, [1, 1], [2, 2], [4, 4], num_classes=5).eval()
    x, at = images(2, (32, 32)), "features.3"
    found = ask(model, "grad_cam", x, at, channel_dim=-1)
    close(found.heatmap, oracle(GradCAM, model, at, x, reshape=lambda value: value.permute(0, 3, 1, 2)))


def test_a_map_without_a_positive_part_is_zero(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "grad_cam", x, "conv2", -1.0 * trocar.logit(0))
    other = ask(model, "grad_cam", x, "conv2", trocar.logit(0))
    for maps in (found, other):
        assert np.isfinite(maps.heatmap).all()
        assert maps.heatmap.min() >= 0
    flat = ask(model, "grad_cam", x, "conv2", 0.0 * trocar.logit(0))
    assert not flat.values.any()
    assert not flat.heatmap.any()


def small_vgg() -> nn.Module:
    layers = make_layers([4, "M", 8, "M", 8, "M", 8, "M", 8, "M"])
    model: nn.Module = VGG(layers, num_classes=5, init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(8 * 7 * 7, 5))
    return model


@pytest.mark.parametrize(
    ("build", "layer", "expected"),
    [
        (torchvision.models.resnet18, "layer4.1", "layer4"),
        (torchvision.models.mobilenet_v3_small, "features.12", "features"),
        (torchvision.models.efficientnet_b0, "features.8", "features"),
        (torchvision.models.convnext_tiny, "features.7", "features"),
        (small_vgg, "features.14", "features"),
    ],
)
def test_the_place_is_chosen_as_pytorch_grad_cam_recommends(
    build: Callable[[], nn.Module], layer: str, expected: str
) -> None:
    torch.manual_seed(7)
    model, x = build().eval(), images(2, (64, 96))
    found: Any = TorchClient({"m": model}).grad_cam("m", x)
    assert found.at == expected
    map_there = oracle(GradCAM, model, layer, x)
    np.testing.assert_allclose(found.heatmap, map_there, atol=1e-5)
    assert map_there.max() > 0.3  # some untrained nets have gradients near the epsilon of the scaling


def test_the_place_in_a_vit_is_where_patches_still_count(ask: Ask) -> None:
    model, x = vit(), images(2, (32, 32))
    found = ask(model, "grad_cam", x)
    assert found.at == "encoder.layers.encoder_layer_1.ln_1"
    reshape = lambda tokens: vit_reshape_transform(tokens, 4, 4)  # noqa: E731
    close(found.heatmap, oracle(GradCAM, model, found.at, x, reshape=reshape))


def test_the_place_in_a_swin_is_behind_its_permutation(ask: Ask) -> None:
    torch.manual_seed(3)
    model: nn.Module = SwinTransformer([2, 2], 8, [1, 1], [2, 2], [4, 4], num_classes=5).eval()
    x = images(2, (32, 32))
    found = ask(model, "grad_cam", x)
    assert found.at == "permute"
    close(found.heatmap, oracle(GradCAM, model, "permute", x))


def test_a_model_without_positions_asks_for_a_place(ask: Ask) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).eval()
    with pytest.raises(ValueError, match=r"grad_cam of m needs at=: .*no module has positions"):
        ask(flat, "grad_cam", images(1, (8, 8)))
