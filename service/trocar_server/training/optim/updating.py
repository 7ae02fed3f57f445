"""Weight updates: optimizer, schedule and moving averages, in torch's order."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from trocar_server.training.optim.foreach import add_all, scale_all
from trocar_server.training.optim.optimizers import make_optimizer
from trocar_server.training.optim.schedules import Schedule
from trocar_server.training.spec.trainer_spec import TrainerSpec


class MovingAverages:
    """One average for each trained parameter: `average.mul_(decay).add_(weight, alpha=1 - decay)`.

        averages = MovingAverages(trained, decay=0.999)
        averages.update()   # after each update of the weights

    They start as copies of the weights. Their memory never changes.

    Args:
        parameters: Trained parameters by name.
        decay: Between 0 and 1.

    Attributes:
        tensors: The averages by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._averages = list(self.tensors.values())
        self._weights: list[Tensor] = [parameter.detach() for parameter in parameters.values()]
        self._decay = decay

    def update(self) -> None:
        """Move each average towards its weight."""
        scale_all(self._averages, self._decay)
        add_all(self._averages, self._weights, 1 - self._decay)


class Updater:
    """Applies gradients.

    Args:
        spec: The trainer's spec.
        trained: Trained parameters by name.
        module: The trainer's module tree.

    Attributes:
        optimizer: torch's optimizer.
        schedule: Its learning rate schedule.
        averages: Moving averages of the weights; None without `ema_decay`.
        clip_norm: The largest norm of all gradients; None without one.
    """

    def __init__(self, spec: TrainerSpec, trained: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        self.optimizer = make_optimizer(spec.optimizer, trained, module)
        self.schedule = Schedule(spec.schedule, self.optimizer)
        self.averages = MovingAverages(trained, spec.ema_decay) if spec.ema_decay is not None else None
        self.clip_norm = spec.clip_norm
        self._parameters: Sequence[nn.Parameter] = list(trained.values())

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the parameter groups, as the next update uses them."""
        return list(map(float, map(itemgetter("lr"), self.optimizer.param_groups)))

    def clip(self, norm: Tensor) -> None:
        """Scale all gradients together to at most `clip_norm`; `norm` is their current norm."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip_norm, norm)

    def update(self, closure: Callable[[], float] | None = None) -> None:
        """Update the weights by the present gradients, or by those of the closure; then `finish`."""
        if closure is None:
            self.optimizer.step()
        else:
            self.optimizer.step(closure)
        self.finish()

    def finish(self) -> None:
        """Advance the schedule and the averages after a weight update."""
        self.schedule.advance("step")
        if self.averages is not None:
            self.averages.update()
