"""Small models that write to their own parameters, buffers or attributes in a forward in eval mode."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Writing(nn.Module):
    """A layer and a buffer; the models below write to one of them. Its output depends on what was written."""

    seen: torch.Tensor
    late: torch.Tensor
    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)
        self.after = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        self.write(y)
        return self.after(y) + self.seen

    def write(self, y: torch.Tensor) -> None:
        """Write what the next pass finds."""


class Adds(Writing):
    """Adds to a buffer in place."""

    def write(self, y: torch.Tensor) -> None:
        self.seen.add_(y.detach().mean(0))


class AddsMuch(Adds):
    """The same, to a mebibyte beside an attribute of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1 << 16, 4))
        self.kept = torch.zeros(1 << 16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        self.write(y)
        return self.after(y) + self.seen[0] + self.kept[0]


class ReadsMuch(AddsMuch):
    """The same, without writing."""

    def write(self, y: torch.Tensor) -> None:
        """Write nothing."""


class AddsToData(Writing):
    """Adds to a buffer behind autograd's back."""

    def write(self, y: torch.Tensor) -> None:
        self.seen.data += y.detach().mean(0)


class Replaces(Writing):
    """Puts another tensor in the place of a buffer."""

    def write(self, y: torch.Tensor) -> None:
        self.seen = self.seen + y.detach().mean(0)


class Registers(Writing):
    """Registers a buffer in its first pass, and reads it in later ones."""

    def write(self, y: torch.Tensor) -> None:
        if hasattr(self, "late"):
            self.seen = self.late
        self.register_buffer("late", y.detach().mean(0))


class AddsRarely(Writing):
    """Adds to a buffer for some data only."""

    def write(self, y: torch.Tensor) -> None:
        if bool((y.detach().abs().sum() > 60).item()):
            self.seen.add_(y.detach().mean(0))


class AddsLater(Writing):
    """Adds to a buffer from its third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write(self, y: torch.Tensor) -> None:
        self.count += 1
        if self.count > 2:
            self.seen.add_(1)


class Halves(Writing):
    """Divides its weight in its first pass, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_halved = False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_halved:
            with torch.no_grad():
                self.layer.weight.div_(2)
            self.is_halved = True
        return self.after(self.layer(x)) + self.seen


class HalvesAlways(Writing):
    """Divides its weight in each pass."""

    def write(self, y: torch.Tensor) -> None:
        with torch.no_grad():
            self.after.weight.div_(2)


class HalvesData(Writing):
    """Divides its weight in each pass, behind autograd's back."""

    def write(self, y: torch.Tensor) -> None:
        self.after.weight.data.mul_(0.5)


class NewData(Writing):
    """Puts other memory under its weight."""

    def write(self, y: torch.Tensor) -> None:
        self.after.weight.data = self.after.weight.data / 2


class NewParameter(Writing):
    """Puts another parameter in the place of its weight."""

    def write(self, y: torch.Tensor) -> None:
        self.after.weight = nn.Parameter(self.after.weight.detach() / 2, requires_grad=False)


class HalvesRarely(Writing):
    """Divides its weight for some data only."""

    def write(self, y: torch.Tensor) -> None:
        if bool((y.detach().abs().sum() > 60).item()):
            with torch.no_grad():
                self.after.weight.div_(2)


class Counts(Writing):
    """Counts its passes in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.after(self.layer(x)) * self.count


class Remembers(Writing):
    """Keeps its last value in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        self.last.append(y.detach().mean(0))
        return self.after(y) + self.last[0] + len(self.last)


def _wide(y: torch.Tensor) -> torch.Tensor:
    """Return more than one value for each channel, also of a batch of one."""
    return torch.stack([y, y + 1], 2)


class NormsOfTheBatch(Writing):
    """Its batch norm stays in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> "NormsOfTheBatch":
        super().train(mode)
        self.norm.train()
        return self

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(_wide(self.layer(x))).mean(2)
        return self.after(y) + self.norm.running_mean


class NormsByFunction(Writing):
    """Calls the function of a batch norm in train mode, which writes without a version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = functional.batch_norm(_wide(self.layer(x)), self.seen, self.spread, training=True).mean(2)
        return self.after(y) + self.seen


WRITING: tuple[type[Writing], ...] = (
    Adds,
    AddsToData,
    Replaces,
    Registers,
    AddsRarely,
    AddsLater,
    Halves,
    HalvesAlways,
    HalvesData,
    NewData,
    NewParameter,
    HalvesRarely,
    NormsOfTheBatch,
    NormsByFunction,
)
"""Those that write to tensors."""

STATEFUL: tuple[type[Writing], ...] = (Counts, Remembers)
"""Those that keep state in attributes alone."""


def tensor_bits(module: nn.Module) -> dict[str, bytes]:
    """Return all parameters and buffers of a module as bytes, by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
