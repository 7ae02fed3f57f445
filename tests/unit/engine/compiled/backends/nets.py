"""Networks whose compiled variants the tests look at."""

from typing import Any

import torch
from torch import nn

from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
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
    return Recipe((ArgumentSpec(torch.float32, row),), targets)


def out(path: str, call: int = 0) -> Target:
    """Return the output of a call as a target."""
    return Target(f"{path}@{call}", path, call)


def into(path: str) -> Target:
    """Return the first input of a call as a target."""
    return Target(f"{path}/in", path, 0, "in", (0,))


def batch(rows: int = 2, row: tuple[int, ...] = ROW) -> torch.Tensor:
    """Return seeded rows."""
    return torch.randn((rows, *row), generator=torch.Generator().manual_seed(rows))


class Aliasing(nn.Module):
    """Modules that return what they were given, one called several times, and one that writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.identity = nn.Identity()
        self.dropout = nn.Dropout()
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.dropout(self.identity(self.first(x))))
        found: torch.Tensor = self.relu(self.fc(x))
        return found


class Returning(nn.Module):
    """Returns a whole number and a truth value for each row, a mean over the rows, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.constant = nn.Parameter(torch.ones(1, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.fc(x)
        return {"most": x.argmax(1), "is_positive": x > 0, "rest": (x.mean(0), self.constant)}


class Recurrent(nn.Module):
    """An LSTM and attention: tuples in tuples, states whose rows are in another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, x, x)
        found: torch.Tensor = self.lstm(x)[0]
        return found


class Words(nn.Module):
    """Takes whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.embedding(x).mean(1))
        return found


class Wrapped(nn.Module):
    """A convolution that ends one module and a batch norm that begins the next."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 4, 3))
        self.behind = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        nn.init.uniform_(self.behind[0].running_mean, -1, 1)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.behind(self.before(x))
        return found


def seeded(kind: type[nn.Module]) -> nn.Module:
    """Return a network of a class with seeded weights."""
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)
