"""In-backward optimizer: updates each parameter as soon as its gradient is complete, and frees the gradient.

# Note: [One optimizer per parameter]
torch's tutorial makes an optimizer for each parameter. One for all is enough: an optimizer's step looks at
the parameters in its groups only, and keeps their states separate. So during an update the groups contain
one parameter. The schedule and the stored state are then those of an ordinary optimizer.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class NonFiniteError(Exception):
    """The loss or a gradient is not finite; the argument says which."""


class InBackwardOptimizer:
    """Updates parameters within a backward pass.

        updates = InBackwardOptimizer(optimizer)
        with updates.active():
            loss.backward()

    Weights are bit-equal to those of `optimizer.step()` after the backward pass, for optimizers that treat
    each parameter independently. Peak gradient memory is that of the largest gradients, not of all.

    Args:
        optimizer: See Note: [One optimizer per parameter].
        name_of: Returns the name of a parameter, for errors.

    Attributes:
        updated_count: Number of parameters updated so far in the backward pass.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name_of: Callable[[Tensor], str]) -> None:
        self._optimizer = optimizer
        self._name_of = name_of
        self.updated_count = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Update parameters in backward passes inside the context."""
        self.updated_count = 0
        with ExitStack() as hooks:
            for index, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    handle = parameter.register_post_accumulate_grad_hook(self._updater(index))
                    hooks.callback(handle.remove)
            yield

    def _updater(self, index: int) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if not bool(torch.isfinite(gradient).all()):
                raise NonFiniteError(f"the gradient of '{self._name_of(parameter)}'")
            self.updated_count += 1
            with self._only(index, parameter):
                self._optimizer.step()
            parameter.grad = None

        return update

    @contextmanager
    def _only(self, index: int, parameter: Tensor) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        for place, group in enumerate(groups):
            group["params"] = [parameter] if place == index else []
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters
