"""Families of torchvision and timm."""

# timm is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false

from functools import partial
from typing import Any

import timm.models as timm
import torchvision.models as vision
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock

from tests.relations.family import Family


def _convnext() -> Any:
    return vision.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=5)


def _swin() -> Any:
    return vision.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [2, 2], num_classes=5)


def _of(name: str, make: Any, side: int = 16) -> Family:
    """A classifier of pictures; those of 32 pixels may be of any height."""
    return Family(
        name,
        make,
        {"x": "b3hw"},
        {"h": side, "w": side},
        input_shape=(3, side, side),
        classes=5,
        grows=side > 16 and name != "timm-swin",
    )


_PATCHES = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_classes": 5}
VISION = [
    _of("resnet", partial(vision.ResNet, BasicBlock, [1, 1, 1, 1], num_classes=5), 32),
    _of("squeezenet", partial(vision.SqueezeNet, "1_1", num_classes=5), 32),
    _of("mobilenet", partial(vision.mobilenet_v2, num_classes=5, width_mult=0.1), 32),
    _of("vit", partial(vision.VisionTransformer, 16, 8, 2, 2, 16, 20, num_classes=5)),
    _of("swin", _swin, 32),
    _of("convnext", _convnext, 32),
    _of("timm-vit", partial(timm.VisionTransformer, depth=2, num_heads=2, **_PATCHES)),
    _of("timm-mixer", partial(timm.MlpMixer, num_blocks=2, **_PATCHES)),
    _of("timm-convnext", partial(timm.ConvNeXt, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5), 32),
    _of(
        "timm-swin",
        partial(
            timm.SwinTransformer,
            img_size=32,
            patch_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(1, 2),
            window_size=4,
            num_classes=5,
        ),
        32,
    ),
]
"""The families of this file."""
