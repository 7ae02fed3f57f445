"""A small net to train: batch norm and dropout in it, so that a step moves more than weights."""

from typing import Any

import torch
from torch import nn

SHAPE = (3, 6, 6)
CLASSES = 4


class TinyNet(nn.Module):
    """A convolution, batch norm, dropout and a linear head: a step takes about a millisecond."""

    def __init__(self, classes: int = CLASSES, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(width * 36, classes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


class SteadyNet(nn.Module):
    """Convolution and batch norm, without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.stem(x).mean((2, 3)))


class TwoVectors(nn.Module):
    """Returns two vectors, and none of them is the main one: as CLIP, and sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        vector = self.fc(x)
        return {"hidden": vector, "normalized": nn.functional.normalize(vector, dim=1)}


class RootNet(nn.Module):
    """For an input of zeros the output is finite, and so is the gradient of `fc`, but not that of `stem`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4, bias=False)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(torch.sqrt(self.stem(x).square()))
