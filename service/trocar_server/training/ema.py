"""Moving averages of what is trained."""

from collections.abc import Mapping

from torch import Tensor, nn

from trocar_server.training.many import add_all, scale_all


class MovingAverages:
    """One average for each trained parameter: `average.mul_(decay).add_(weight, alpha=1 - decay)`.

        averages = MovingAverages(trained, decay=0.999)
        averages.update()   # after each update of the weights

    They begin as the weights. Their memory stays the same for good.

    Args:
        parameters: What is trained, by name.
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
