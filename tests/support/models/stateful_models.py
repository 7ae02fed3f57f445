"""Small models that keep something from pass to pass, or from before a module to after it."""

from typing import Any

import torch
from torch import nn


class TwoSteps(nn.Module):
    """Two linear layers; the models below do something between or around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class WritesBuffer(TwoSteps):
    """Writes a buffer before its second layer and reads it after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        assert isinstance(self.scale, torch.Tensor)
        y = self.first(x)
        self.scale.copy_(y[0])
        return self.second(y) * self.scale


class WritesBufferData(WritesBuffer):
    """The same, behind torch's back."""

    def forward(self, x: torch.Tensor) -> Any:
        assert isinstance(self.scale, torch.Tensor)
        y = self.first(x)
        self.scale.data[:] = y.detach()[0]
        return self.second(y) * self.scale


class ReplacesBuffer(WritesBuffer):
    """Puts another tensor in a buffer's place before its second layer."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        self.scale = y[0].detach().clone()
        return self.second(y) * self.scale


class KeepsLast(TwoSteps):
    """Keeps the value between its layers as a plain attribute, and mixes in that of the pass before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        before, self.last = self.last, y.detach()
        y = self.second(y)
        return y if before is None or before.shape != y.shape else y + 0 * before


class KeepsAll(TwoSteps):
    """Keeps the last two values in a list, and mixes in the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        self.kept.append(y.detach())
        before = self.kept.pop(0) if len(self.kept) > 1 else y
        y = self.second(y)
        return y + 0 * before if before.shape == y.shape and len(self.kept) > 1 else y


class PlainTensor(TwoSteps):
    """Has a tensor that is neither parameter nor buffer, and a list and a dict of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0])
        self.more = {"a": [torch.tensor([0.5]), torch.tensor(2.0)]}

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x) * self.scale + self.more["a"][0]
        return self.second(y) * self.scale * self.more["a"][1]


class MakesTensors(TwoSteps):
    """Makes tensors of its own in the pass, some of which are written to."""

    def forward(self, x: torch.Tensor) -> Any:
        total = x.new_zeros(x.shape)
        total += self.first(x)
        ones = torch.ones(3, device=x.device)
        return self.second(total) + ones


class WritesAcross(TwoSteps):
    """Writes a value from before its second layer into a tensor that is used after it."""

    def forward(self, x: torch.Tensor) -> Any:
        total = torch.zeros(x.shape)
        total.add_(self.first(x))
        return self.second(total.to(x.device)) + total


class LooksLater(TwoSteps):
    """Looks at its data, but not in its first passes."""

    FIRST = 20

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        y = self.first(x)
        if self.count > self.FIRST:
            y.sum().item()
        return self.second(y)


class Transposes(TwoSteps):
    """Its first layer's value reaches the rest as a transposed view, whose sum has other last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.swap = Transposed()
        self.slice = EverySecond()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.swap(self.first(x.repeat(1, 40).reshape(-1, 3)))
        return self.slice(y).sum(1), y.mean(0)


class Transposed(nn.Module):
    """Returns a transposed view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


class EverySecond(nn.Module):
    """Returns a view with gaps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, ::2]


class Expands(TwoSteps):
    """Its first layer's value is expanded: its elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Expanded()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.wide(self.first(x)))


class Expanded(nn.Module):
    """Returns a view whose rows are one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(x.shape[0], -1)
