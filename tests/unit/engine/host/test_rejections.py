"""Why a model rejects its inputs: torch's own texts, as this version of torch writes them, become words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trocar_server.engine.host.rejections import rejection


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (lambda: nn.Conv2d(3, 4, 3)(torch.zeros(8, 8)), "an array of 2 dimensions, and the layer takes 4"),
        (lambda: nn.BatchNorm2d(3)(torch.zeros(3, 8)), "an array of 2 dimensions, and the layer takes 4"),
        (lambda: nn.Conv2d(3, 4, 3)(torch.zeros(1, 5, 8, 8)), "5 channels, and the layer takes 3"),
        (lambda: nn.Linear(32, 5)(torch.zeros(2, 64)), "rows of 64 numbers, and the layer takes 32"),
        (lambda: torch.zeros(2, 3) + torch.zeros(2, 5), "sizes that do not fit together: 3 and 5"),
        (lambda: nn.LayerNorm(8)(torch.zeros(2, 7)), "rows of 7 numbers, and the layer takes 8"),
        (lambda: nn.GRU(5, 5)(torch.zeros(2, 3, 4)), "rows of 4 numbers, and the layer takes 5"),
        (lambda: nn.LSTM(5, 5)(torch.zeros(1, 2, 3, 5)), "an array of 4 dimensions, and the layer takes 3"),
        (
            lambda: nn.MultiheadAttention(8, 2)(*[torch.zeros(1, 2, 6)] * 3),
            "rows of 6 numbers, and the layer takes 8",
        ),
        (lambda: nn.BatchNorm2d(4).eval()(torch.zeros(2, 3, 4, 4)), "3 channels, and the layer takes 4"),
        (
            lambda: nn.BatchNorm1d(4)(torch.zeros(1, 4)),
            "a single value for each channel, of which batch normalisation has no variance: "
            "train on at least two samples",
        ),
        (
            lambda: nn.InstanceNorm2d(4)(torch.zeros(2, 4, 1, 1)),
            "a single position for each channel, of which the normalisation has no variance",
        ),
        (
            lambda: nn.Conv2d(3, 4, 7)(torch.zeros(1, 3, 4, 5)),
            "4 x 5 positions with padding, fewer than the 7 x 7 of the layer's kernel",
        ),
        (
            lambda: nn.MaxPool2d(4)(torch.zeros(1, 3, 2, 2)),
            "values of 3x2x2, too small for the layer's windows",
        ),
        (
            lambda: nn.ReflectionPad2d(4)(torch.zeros(1, 3, 3, 3)),
            "fewer positions than the layer adds by reflection",
        ),
        (
            lambda: nn.Linear(4, 4)(torch.zeros(2, 4).double()),
            "values of float64, and the layer takes float32",
        ),
        (lambda: nn.Linear(4, 4)(torch.zeros(2, 4).long()), "values of int64, and the layer takes float32"),
        (
            lambda: nn.Conv2d(3, 4, 3)(torch.zeros(1, 3, 8, 8).double()),
            "values of float64, and the layer takes float32",
        ),
        (
            lambda: nn.Embedding(4, 4)(torch.zeros(2, 4)),
            "values of float32, and the layer's table takes int64 or int32",
        ),
        (
            lambda: torch.cat([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], 1),
            "sizes that do not fit together beside dimension 1: 4 and 5",
        ),
        (lambda: torch.zeros(2, 3, 4) @ torch.zeros(2, 5, 4), "rows of 4 numbers, multiplied by 5"),
        (lambda: torch.zeros(2, 4).view(2, 5), "8 numbers, which the model cannot arrange as [2, 5]"),
        (
            lambda: nn.Unflatten(1, (2, 3))(torch.zeros(2, 7)),
            "a dimension of 7, which the model cannot arrange as [2, 3]",
        ),
        (
            lambda: nn.Embedding(4, 2)(torch.tensor([9])),
            "a number that is outside of the model's table",
        ),
    ],
)
def test_texts_of_torch_become_words(fail: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)) as caught:
        fail()
    assert rejection(str(caught.value).splitlines()[0]) == words


def test_an_unknown_text_stays() -> None:
    assert rejection("the model says no") == "the model says no"
