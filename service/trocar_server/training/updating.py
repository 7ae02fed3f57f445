"""Changing the weights: optimizer, schedule and moving averages, in torch's order."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trocar_server.training.ema import MovingAverages
from trocar_server.training.optimizers import make_optimizer
from trocar_server.training.schedules import Schedule
from trocar_server.training.spec import TrainerSpec


class Updater:
    """Applies gradients.

    Args:
        spec: The trainer's.
        trained: Its parameters by name.
        module: Its tree.

    Attributes:
        optimizer: torch's.
        schedule: Changes its learning rates.
        averages: Of the weights; None where the spec wants none.
    """

    def __init__(self, spec: TrainerSpec, trained: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        self.optimizer = make_optimizer(spec.optimizer, trained, module)
        self.schedule = Schedule(spec.schedule, self.optimizer)
        self.averages = MovingAverages(trained, spec.ema_decay) if spec.ema_decay is not None else None
        self._clip_norm = spec.clip_norm
        self._parameters: Sequence[nn.Parameter] = list(trained.values())

    @property
    def learning_rates(self) -> list[float]:
        """Of each parameter group, as the next update uses them."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def clip(self, norm: Tensor) -> None:
        """Scale all gradients together to `clip_norm` at most; `norm` is what they have."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)

    def update(self, closure: Callable[[], float] | None = None) -> None:
        """Change the weights by the gradients there are, or by what the closure makes; then `finish`."""
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)
        self.finish()

    def finish(self) -> None:
        """Do what follows an update of the weights."""
        self.schedule.after_step()
        if self.averages is not None:
            self.averages.update()
