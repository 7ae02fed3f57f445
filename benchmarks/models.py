"""Models without computation, so that a benchmark measures the transport alone."""

import torch
from torch import nn


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
