"""Models whose passes take long inside one operator, and one that takes as long as a test wants."""

import time
from typing import Any

import torch
from torch import nn

WIDTH, REACH = 256, 33
TOKEN_WORK = WIDTH * WIDTH * REACH
"""Multiply-adds for each token of `LongConvolution`."""


class LongConvolution(nn.Module):
    """Some bytes of token ids become one large convolution; the class scores are a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, REACH, padding=REACH // 2)
        self.fc = nn.Linear(WIDTH, 4)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.fc(self.conv(self.embedding(input_ids).transpose(1, 2)).mean(2))


class LongFilter(nn.Module):
    """The same convolution, of values instead of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ReLU()
        self.conv = nn.Conv1d(WIDTH, WIDTH, REACH, padding=REACH // 2)
        self.fc = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.conv(self.stem(x)).mean(2))


class Sleeps(nn.Module):
    """Sleeps inside one call for as many seconds as its input says, whatever its guard wants."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if x.device.type != "meta":
            time.sleep(float(x.sum()))
        return self.fc(x)
