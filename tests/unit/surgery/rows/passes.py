"""Passes whose rows are apart, and passes whose rows are not, in ways that no trial on examples shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.row_models import MIXES

SHAPE = (4, 5)
"""Of a row."""
Compute = Callable[["Computing", Tensor], Tensor]


class Computing(nn.Module):
    """Computes a function of its rows, with layers that it may use."""

    def __init__(self, compute: Compute, *, is_training: bool = False) -> None:
        super().__init__()
        self._compute, self._is_training = compute, is_training
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(4)
        self.sequence = nn.LSTM(5, 5, batch_first=True)
        self.over_rows = nn.LSTM(5, 5)
        self.heads = nn.MultiheadAttention(5, 1, batch_first=True)
        self.table = nn.Embedding(9, 5)
        self.last = nn.Identity()

    def train(self, mode: bool = True) -> Computing:
        """Set the mode, of the norm as it was asked for."""
        super().train(mode)
        self.norm.train(self._is_training)
        return self

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self._compute(self, x))
        return made


def computing(compute: Compute, *, is_training: bool = False) -> Computing:
    """Return a model in eval mode; equal weights at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Computing(compute, is_training=is_training).eval().requires_grad_(False)


def _written(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    made = torch.zeros_like(x)
    made[:] = x
    change(made)
    return made


def _swapped(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made[:, :2], made[:, 2:] = x[:, 2:], x[:, :2]
    made[:, 0] += x[:, 3]
    made[x > 0.5] = 0.0
    return made


def _in_channels(x: Tensor) -> Tensor:
    """The batch folded into the groups of a convolution."""
    channels = x.reshape(1, -1, 5)
    return functional.conv1d(
        channels, x.new_ones(1, 1, 1).expand(channels.shape[1], 1, 1), groups=x.shape[0] * 4
    )


def _heads(x: Tensor) -> Tensor:
    """Heads folded into the batch and out again, as attention does."""
    folded = x.transpose(1, 2).reshape(x.shape[0] * 5, 4, 1)
    return torch.bmm(folded, folded.transpose(1, 2)).softmax(-1).view(x.shape[0], 5, 4, 4).sum(1)


APART: Mapping[str, Compute] = {
    "linear": lambda m, x: m.linear(x).relu(),
    "norm": lambda m, x: m.norm(x),
    "layer norm": lambda m, x: functional.layer_norm(x, SHAPE),
    "instance norm": lambda m, x: functional.instance_norm(x),
    "mean of a row": lambda m, x: x - x.mean((1, 2), keepdim=True),
    "sums": lambda m, x: x.cumsum(1) + x.sum(2, keepdim=True) + x.amax(-1, keepdim=True),
    "attention": lambda m, x: m.heads(x, x, x)[0],
    "heads in the batch": lambda m, x: _heads(x),
    "sequence": lambda m, x: m.sequence(x)[0],
    "state": lambda m, x: m.sequence(x, (x.new_zeros(1, x.shape[0], 5), x.new_zeros(1, x.shape[0], 5)))[1][0][
        0
    ],
    "convolution": lambda m, x: functional.conv1d(x, torch.ones(3, 4, 2)).transpose(1, 2),
    "token": lambda m, x: torch.cat([m.table.weight[:1].expand(x.shape[0], -1, -1), x], 1),
    "table": lambda m, x: m.table((x[..., 0] * 8).long().clamp(0, 8)),
    "writes through views": lambda m, x: _swapped(x),
    "write of all": lambda m, x: _written(x, lambda made: made[:, 1].mul_(2)),
    "own row by number": lambda m, x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)],
    "einsum": lambda m, x: torch.einsum("bij,bkj->bik", x, x),
    "gather": lambda m, x: x.gather(1, x[:, :, :1].argsort(1).expand(-1, -1, 5)),
    "masked": lambda m, x: x.masked_fill(x > x.mean((1, 2), keepdim=True), 0.0).tril(),
    "repeated": lambda m, x: torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]).repeat(x.shape[0], 1)[:, None] * x,
    "sorted": lambda m, x: x.sort(2).values + x.topk(1, 1).values,
    "padded": lambda m, x: functional.pad(x, (1, 0, 0, 2)).unfold(2, 2, 1).mean(-1),
    "split": lambda m, x: torch.stack([part.flip(2) for part in x.chunk(2, 1)], 1).flatten(1, 2),
}
"""Each row depends on its own alone."""


def _mixing(name: str) -> Compute:
    return lambda _, x: MIXES[name](x)


_CONSTANT = torch.arange(36.0).reshape(9, 4)[:, :, None]

MIXED: Mapping[str, Compute] = {
    **{name: _mixing(name) for name in MIXES if name not in ("none", "earlier")},
    "weight of the batch's size": lambda m, x: torch.ones(x.shape[0], x.shape[0]).tril() @ x.flatten(1),
    "write through a view": lambda m, x: _written(x, lambda made: made.copy_(made.cumsum(0))),
    "rows moved by writes": lambda m, x: _written(x, lambda made: made[:1].copy_(x[-1:])),
    "batch in channels": lambda m, x: _in_channels(x).softmax(1).reshape(-1, 4, 5),
    "divided by the number": lambda m, x: x / x.shape[0],
    "number in a constant": lambda m, x: x * torch.full((1,), x.shape[0]),
    "number in a power": lambda m, x: x ** x.shape[0],
    "large batches": lambda m, x: x * 2 if x.shape[0] > 7 else x,
    "one row": lambda m, x: x * 2 if x.shape[0] == 1 else x,
    "one row squeezed": lambda m, x: x.squeeze(),
    "place of a row": lambda m, x: x + torch.arange(x.shape[0])[:, None, None],
    "place in a table": lambda m, x: x + _CONSTANT[torch.arange(x.shape[0])],
    "part of a table": lambda m, x: x + _CONSTANT[x.shape[0] - 1 : x.shape[0]],
    "random": lambda m, x: x + torch.rand(x.shape),
    "dropout": lambda m, x: functional.dropout(x, 0.5, training=True),
    "softmax of rows": lambda m, x: x.softmax(0),
    "norm of all": lambda m, x: x / x.norm(),
    "attention of rows": lambda m, x: m.heads(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    "sequence of rows": lambda m, x: m.over_rows(x)[0],
    "products of rows": lambda m, x: x[:, 0] @ x[:, 0].T @ x[:, 0],
    "einsum of rows": lambda m, x: torch.einsum("bij,cij->bi", x, x),
    "any of all": lambda m, x: x * (x > 0.5).any(),
    "a number from the data": lambda m, x: x * x.sum().item(),
    "cut across rows": lambda m, x: x.transpose(0, 1).reshape(x.shape[0], 4, 5),
    "other rows by number": lambda m, x: x[torch.arange(x.shape[0]).flip(0)],
    "rows by their data": lambda m, x: x[x[:, 0, 0].argsort()],
    "rows in random order": lambda m, x: x[torch.randperm(x.shape[0])],
    "rows shifted by padding": lambda m, x: functional.pad(x, (0, 0, 0, 0, 1, 0))[:-1],
    "repeated and cut": lambda m, x: x.repeat_interleave(2, 0)[: x.shape[0]],
    "batch norm of itself": lambda m, x: functional.batch_norm(x, None, None, training=True),
    "rows beside each other": lambda m, x: torch.cat([x[:, 0], x[:, 1]], 0)[::2][:, None],
}
"""Some row depends on another one, on its place, or on how many there are."""
