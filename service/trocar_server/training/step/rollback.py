"""Rollback of failed steps: restores what a step changes before it succeeds.

Weights and the optimizer's state are changed only after everything that can fail, so they are not copied.
Earlier changes are to buffers (a forward pass in train mode updates batch norm's statistics), random state
and gradients. The caller gets a domain error.
"""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trocar_api.reasons import ErrorReason
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.spool import SavedTensorChangedError, SpoolError, SpoolFullError
from trocar_server.training.optim.foreach import add_all, copy_all
from trocar_server.training.step.in_backward import NonFiniteError


class BufferBackup:
    """A copy, during a step, of the buffers that the step may change.

    These are all but those of torch's batch norms in eval mode.

    The memory of a buffer never changes, because it is shared: if a module replaces a buffer by another
    tensor, that tensor's values are copied into the original.

    Args:
        module: The module tree, with its modes set.

    Attributes:
        places: See `buffer_places`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = buffer_places(module)
        self._tensors = list({id(tensor): tensor for _, _, tensor in self.places}.values())
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]

    def save(self) -> None:
        """Copy the current buffers."""
        if self._tensors:
            copy_all(self._copies, self._tensors)

    def restore(self) -> None:
        """Restore the saved buffers."""
        for owner, name, tensor in self.places:
            if tensor.requires_grad:
                tensor.detach_()
            owner[name] = tensor
        copy_all(self._tensors, self._copies)

    def settle(self) -> None:
        """Copy replaced buffers back into the original memory.

        Raises:
            ServiceError: `INPUT_REJECTED`, the replacement has another shape.
        """
        for owner, name, tensor in self.places:
            result = owner[name]
            if tensor.requires_grad:  # written to by a pass with gradients
                tensor.detach_()
            if result is tensor:
                continue
            tensor.copy_(check_replacement(name, tensor, result).detach())
            owner[name] = tensor


def buffer_places(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return the buffers that a pass may change, each with its name and the dictionary that holds it."""
    return [
        (part._buffers, name, tensor)
        for part in module.modules()
        if part.training or not isinstance(part, _NormBase)
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]


def check_replacement(name: str, tensor: Tensor, outcome: Tensor | None) -> Tensor:
    """Return what a pass has put in the place of a buffer.

    Raises:
        ServiceError: `INPUT_REJECTED`, it has another shape.
    """
    if outcome is None or outcome.shape != tensor.shape:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the model replaces its buffer '{name}' by one of another shape; a trainer needs buffers of "
            "constant shape",
        )
    return outcome


_CPU_GENERATOR = threading.RLock()
"""Held while a stream of the CPU is in place: torch has one such generator for all threads of a process,
which may have several servers, each with a thread of its own."""


class RandomStream:
    """A trainer's own state of torch's generators, advanced by its steps.

        stream = RandomStream(seed, device)
        with stream.in_place():
            step()

    It starts like `torch.manual_seed(seed)`. Inside the context torch's own generators, of the CPU and of the
    device, use this state; afterwards they are restored. After an error the stream has not advanced.

    Args:
        seed: The seed.
        device: The model's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._gpu: Tensor | None = None
        if self._device is not None:
            self._gpu = torch.Generator(self._device).manual_seed(seed).get_state()

    @contextmanager
    def in_place(self, *, is_kept: bool = True) -> Iterator[None]:
        """Let torch draw from the stream; it advances unless the context fails or `is_kept` is False."""
        with _CPU_GENERATOR if self._device is None else nullcontext():
            before = self._states()
            self._put(self._cpu, self._gpu)
            try:
                yield
                if is_kept:
                    self._cpu, self._gpu = self._states()
            finally:
                self._put(*before)

    def state(self) -> dict[str, Tensor]:
        """Return the state as bytes, by kind of generator: `cpu` and `cuda`."""
        states = {"cpu": self._cpu.clone()}
        if self._gpu is not None:
            states["cuda"] = self._gpu.clone()
        return states

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Restore a state; the part of a missing device is left unchanged."""
        self._cpu = states["cpu"].clone()
        if self._gpu is not None and "cuda" in states:
            self._gpu = states["cuda"].clone()

    def _states(self) -> tuple[Tensor, Tensor | None]:
        gpu = None if self._device is None else torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state(), gpu

    def _put(self, cpu: Tensor, gpu: Tensor | None) -> None:
        torch.set_rng_state(cpu)
        if self._device is not None and gpu is not None:
            torch.cuda.set_rng_state(gpu, self._device)


class GradientAccumulator:
    """Accumulated gradients of several backward passes, transactional.

    Earlier gradients are set aside before a backward pass and added to the new ones after it, so that a
    failed pass does not affect them. Addition is commutative, so the sum is bit-equal to torch's.

    Args:
        parameters: The trained parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Run a backward pass inside the context; call `add` in it after the pass."""
        self._saved = list(map(attrgetter("grad"), self._parameters))
        self.clear()
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(self._parameters, self._saved, strict=True):
                parameter.grad = gradient
            raise
        finally:
            self._saved = []

    def add(self) -> None:
        """Add the earlier gradients to the pass's."""
        ours, theirs = [], []
        for parameter, saved in zip(self._parameters, self._saved, strict=True):
            if parameter.grad is None:
                parameter.grad = saved
            elif saved is not None:
                ours.append(parameter.grad)
                theirs.append(saved)
        if ours:
            add_all(ours, theirs)

    def present(self) -> list[Tensor]:
        """Return the gradients that are present."""
        result = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                result.append(parameter.grad)
        return result

    def clear(self) -> None:
        """Free all gradients."""
        for parameter in self._parameters:
            parameter.grad = None


class WeightBackup:
    """Copies of an optimizer's parameters and state, for optimizers that run several passes in a step.

    Args:
        optimizer: The optimizer; steps change it in place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._weights = {parameter: parameter.detach().clone() for parameter in parameters}
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Roll back if the context fails."""
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, weight in self._weights.items():
                    parameter.copy_(weight)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
            raise


@contextmanager
def step_errors(hosted: HostedModel) -> Iterator[None]:
    """Convert errors of torch, the model, a guard or the spool to domain errors; see `domain_errors`.

    Raises:
        ServiceError: `STORAGE_FULL` or `SPOOL_FAILED`, and what `domain_errors` raises.
        NonFiniteError: Passed through unchanged.
    """
    what = ""
    with domain_errors(hosted):
        problem: ServiceError | None = None
        try:
            yield
            return
        except NonFiniteError as error:
            what = str(error)
        except SavedTensorChangedError:  # the model's own, as without a spool
            raise
        except SpoolError as error:
            problem = _spool_failed(error)
        if problem is not None:  # raised here, without the frames of the failed pass
            raise problem
    raise NonFiniteError(what)


def not_finite(what: str) -> ServiceError:
    """Return the error for a loss or gradient that is not finite."""
    return ServiceError(
        ErrorReason.NON_FINITE_STEP,
        f"{what} is not finite; the trainer is as before this step: use a smaller learning rate, "
        "`clip_norm` or a gradient edit, or `on_nonfinite` 'skip'",
    )


def closed() -> ServiceError:
    """Return the error for a trainer that was closed while a call used it."""
    return ServiceError(ErrorReason.UNKNOWN_TRAINER, "the trainer was closed")


def broken(why: str) -> ServiceError:
    """Return the error for a trainer whose weights are half updated."""
    return ServiceError(
        ErrorReason.TRAINER_BROKEN, f"the trainer is broken: {why}; restore it from a checkpoint"
    )


def _spool_failed(error: SpoolError) -> ServiceError:
    is_full = isinstance(error, SpoolFullError)
    return ServiceError(
        ErrorReason.STORAGE_FULL if is_full else ErrorReason.SPOOL_FAILED,
        f"saved tensors: {first_line(error)}; the trainer is as before this step, "
        + ("free space or use a larger budget" if is_full else "the step can be retried"),
    )
