"""Networks whose compiled forms the tests look at."""

import torch
from torch import nn

from trocar_server.engines.recipe import ArgumentForm, Recipe
from trocar_server.surgery import Target

ROW = (3, 8, 8)


class Folding(nn.Module):
    """Two convolutions with batch norms, one of which is shared with a second reader."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.read_twice = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(x)))
        y = self.read_twice(x)
        x = self.relu(self.norm2(y) + y)
        found: torch.Tensor = self.fc(x.mean((2, 3)))
        return found


def folding() -> Folding:
    """Return the network with statistics that matter."""
    torch.manual_seed(0)
    model = Folding()
    for norm in (model.norm, model.norm2):
        nn.init.uniform_(norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    return model.eval().requires_grad_(False)


def recipe(*targets: Target, row: tuple[int, ...] = ROW) -> Recipe:
    """Return a recipe for one float32 argument."""
    return Recipe((ArgumentForm(torch.float32, row),), targets)


def out(path: str, call: int = 0) -> Target:
    """Return the output of a call as a target."""
    return Target(f"{path}@{call}", path, call)


def into(path: str) -> Target:
    """Return the first input of a call as a target."""
    return Target(f"{path}/in", path, 0, "in", (0,))


def batch(rows: int = 2, row: tuple[int, ...] = ROW) -> torch.Tensor:
    """Return seeded rows."""
    return torch.randn((rows, *row), generator=torch.Generator().manual_seed(rows))
