"""Models without computation, so that a benchmark measures what is around it."""

import time

import torch
from torch import nn
from torchvision.models import VisionTransformer


class Corner(nn.Module):
    """Returns one element of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1)[:1]


class Blob(nn.Module):
    """Returns a constant of `mebibytes` MiB for any input; `corner` sees the input."""

    def __init__(self, mebibytes: int = 1) -> None:
        super().__init__()
        self.register_buffer("blob", torch.arange(mebibytes << 18, dtype=torch.float32).reshape(1, -1))
        self.corner = Corner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.corner(x)
        return self.get_buffer("blob")


class Waiting(nn.Module):
    """Returns the first value of each image, after `seconds` for each; no core is busy meanwhile."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds * len(x))
        return x[:, 0, 0, :1].clone()


def small_vit() -> nn.Module:
    """Return a vision transformer of 5.7 million parameters: 12 blocks, 192 channels, 224 x 224 pixels."""
    model: nn.Module = VisionTransformer(224, 16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768)
    return model
