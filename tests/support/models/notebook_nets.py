"""The small nets of the hooks notebook: the same layers, drawn from the same seeds, written anew."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models.other_models import hold_statistics


class Affine(nn.Module):
    """y = x @ w + b, with all three as loose tensors in the notebook."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))
        self.b = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.w + self.b


class ConvNet(nn.Module):
    """(1, 3, 8, 8) to 5 numbers, without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(10 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.relu(self.conv(x)).view(-1))


class PoolNet(nn.Module):
    """A ReLU that is no module, and a pooling layer whose output is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, kernel_size=2)
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.fc = nn.Linear(8 * 4 * 4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.pool(F.relu(self.conv(x))).flatten(1))


class TwoLayers(nn.Module):
    """Linear, ReLU, linear: 100 to 200 to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(100, 200)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(200, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(self.relu(self.fc1(x)))


def affine() -> tuple[nn.Module, torch.Tensor]:
    """Return y = x @ w + b with seed 2, and its x."""
    torch.manual_seed(2)
    return Affine(), torch.ones(3, 5)


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    """Return the net and its input; the input is drawn first."""
    torch.manual_seed(2)
    x = torch.randn(1, 3, 8, 8)
    return ConvNet(), x


def linear() -> tuple[nn.Module, torch.Tensor]:
    """Return a layer that was drawn where the cell before, `conv_net`, had left the generator; its input."""
    conv_net()
    layer = nn.Linear(3, 3)
    torch.manual_seed(1)
    return layer, torch.randn(2, 3)


def two_layers() -> tuple[nn.Module, torch.Tensor]:
    """Return the net, whose weights no printed number depends on, and its input."""
    torch.manual_seed(0)
    net = TwoLayers()
    torch.manual_seed(20)
    return net, torch.randn(1, 100)


def resnet18_in_train_mode() -> tuple[nn.Module, torch.Tensor]:
    """Return a resnet18 drawn after `two_layers`, and ones.

    Its batch norms hold the statistics of this very batch: in eval mode it computes what the notebook's does,
    which was left in train mode.
    """
    from torchvision.models import resnet18

    two_layers()
    net, x = resnet18(), torch.ones(10, 3, 28, 28)
    hold_statistics(net.eval(), x)
    return net, x
