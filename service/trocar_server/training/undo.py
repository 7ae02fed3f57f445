"""Steps that leave no trace when they fail: what a step changes on its way is put back.

Weights and the optimizer's state are changed only behind everything that can fail, so nothing of them is
copied. What changes earlier is buffers (a forward pass in train mode moves batch norm's statistics) and
gradients.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.many import add_all, copy_all


class BufferBackup:
    """A copy of the buffers of a tree that a step may change, for the time of the step.

    That is all but those of torch's batch norms in eval mode.

    The memory of a buffer stays the same for good, because others look at it: a module that puts another
    tensor in its place has that one's values copied into it.

    Args:
        module: The tree, in its modes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part._buffers, name, tensor)
            for part in module.modules()
            if part.training or not isinstance(part, _NormBase)
            for name, tensor in part._buffers.items()
            if tensor is not None
        ]
        self._tensors = list({id(tensor): tensor for _, _, tensor in self._places}.values())
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]

    def save(self) -> None:
        """Copy the buffers as they are now."""
        copy_all(self._copies, self._tensors)

    def restore(self) -> None:
        """Let the buffers be as they were when they were saved."""
        self._drop_graphs()
        for owner, name, tensor in self._places:
            owner[name] = tensor
        copy_all(self._tensors, self._copies)

    def settle(self) -> None:
        """Take over buffers that the modules have replaced.

        Raises:
            ServiceError: `INPUT_REJECTED`, by something of another shape.
        """
        self._drop_graphs()
        for owner, name, tensor in self._places:
            found = owner[name]
            if found is tensor:
                continue
            if found is None or found.shape != tensor.shape:
                raise ServiceError(
                    ErrorReason.INPUT_REJECTED,
                    f"the model replaces its buffer '{name}' by one of another shape; "
                    "a trainer needs buffers that keep theirs",
                )
            tensor.copy_(found.detach())
            owner[name] = tensor

    def _drop_graphs(self) -> None:
        for tensor in self._tensors:
            if tensor.requires_grad:  # written to by a pass with gradients
                tensor.detach_()


class GradientAccumulator:
    """The gradients of several backward passes, which become the parameters' when all is well.

    The gradients so far are put aside before a backward pass and added to its own behind it, so that a pass
    that fails leaves them alone. Addition is commutative, so the sum is bit-equal to torch's.

    Args:
        parameters: What is trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Run a backward pass inside the context; call `add` in it when the pass is through."""
        self._held = [parameter.grad for parameter in self._parameters]
        self.clear()
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(self._parameters, self._held, strict=True):
                parameter.grad = gradient
            raise
        finally:
            self._held = []

    def add(self) -> None:
        """Add what was there before the context to the gradients that came."""
        ours, theirs = [], []
        for parameter, held in zip(self._parameters, self._held, strict=True):
            if parameter.grad is None:
                parameter.grad = held
            elif held is not None:
                ours.append(parameter.grad)
                theirs.append(held)
        add_all(ours, theirs)

    def present(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def clear(self) -> None:
        """Free all gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of gradients taken together, as `clip_grad_norm_` computes it."""
    return torch.nn.utils.get_total_norm(gradients)


def is_finite(gradients: Sequence[Tensor], norm: Tensor) -> bool:
    """Whether every element is finite; `norm` is of all, and spares looking at them where it is."""
    if bool(torch.isfinite(norm)):
        return True
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)  # squares may overflow


class WeightBackup:
    """Copies of an optimizer's parameters and state, for optimizers that run several passes in a step.

    Args:
        optimizer: Changed in place by the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._weights = {parameter: parameter.detach().clone() for parameter in parameters}
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Put all back when the context fails."""
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, weight in self._weights.items():
                    parameter.copy_(weight)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
            raise
