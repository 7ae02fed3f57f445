"""What an operator's package might hold: factories that work, and some that do not."""

import torch
from torch import nn


class Net(nn.Module):
    """A classifier of three classes on 8 x 8 images."""

    def __init__(self, width: int = 4, *, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, classes)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(batch).mean((2, 3)))
        return logits

    @classmethod
    def wide(cls, width: int = 8) -> "Net":
        return cls(width)


def fails() -> nn.Module:
    raise FileNotFoundError(2, "No such file or directory", "/home/operator/secret/weights.pth")


def no_module() -> object:
    return [1, 2, 3]
