"""The same schedule in plain torch, as a user would write it: what a trainer is compared with, bit by bit."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Gets the model, its inputs and the targets, and runs the forward pass."""


def new_head(model: nn.Module, path: str, classes: int, seed: int) -> nn.Module:
    """Put a new Linear in the place of an old one."""
    parent, _, name = path.rpartition(".")
    old = model.get_submodule(path)
    assert isinstance(old, nn.Linear)
    torch.manual_seed(seed)
    setattr(model.get_submodule(parent), name, nn.Linear(old.in_features, classes))
    return model


def freeze_all_but(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze parameters; frozen parts are in eval mode, parts that hold something trained in train mode."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name == p or name.startswith(f"{p}.") for p in prefixes))
    model.eval()
    model.training = True
    for module in model.modules():
        for child in module.children():
            weights = list(child.parameters())
            child.training = any(w.requires_grad for w in weights) if weights else module.training


def cross_entropy(**options: Any) -> Loss:
    """Return the usual loss."""
    criterion = nn.CrossEntropyLoss(**options)
    return lambda model, x, y: criterion(model(x), y)


@dataclass
class PlainTraining:
    """A training loop.

    Attributes:
        model: Trained in place; what has requires_grad.
        optimizer: Makes the optimizer.
        loss: Runs the forward pass.
        scheduler: Makes the scheduler, which steps after each update.
        accumulation: Batches for an update.
        clip_norm: For clip_grad_norm_.
        ema_decay: Of a copy of the weights.
        precision: `bf16` for autocast.
        seed: Seeded once, before the first step.
    """

    model: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, lr=0.01
    )
    loss: Loss = field(default_factory=cross_entropy)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    accumulation: int = 1
    clip_norm: float | None = None
    ema_decay: float | None = None
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optim = self.optimizer(self.trained)
        self.schedule = self.scheduler(self.optim) if self.scheduler else None
        self.average = copy.deepcopy(self.model)
        self.losses: list[float] = []

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
        """Train, and return the model."""
        torch.manual_seed(self.seed)
        for index, (x, y) in enumerate(batches):
            if isinstance(self.optim, torch.optim.LBFGS):
                self._step_lbfgs(x, y)
                continue
            loss = self._forward(x, y)
            self.losses.append(loss.item())
            (loss / self.accumulation).backward()
            if (index + 1) % self.accumulation == 0:
                self._update()
        return self.model

    def _forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext():
            return self.loss(self.model, x, y)

    def _update(self) -> None:
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip_norm)
        self.optim.step()
        self.optim.zero_grad()
        self._after()

    def _step_lbfgs(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            self.optim.zero_grad()
            loss = self._forward(x, y)
            loss.backward()
            return loss

        loss: Any = self.optim.step(closure)  # type: ignore[arg-type]
        self.losses.append(loss.item())
        self._after()

    def _after(self) -> None:
        if self.schedule is not None:
            self.schedule.step()
        if self.ema_decay is not None:
            with torch.no_grad():
                for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    average.mul_(self.ema_decay).add_(weight, alpha=1 - self.ema_decay)
