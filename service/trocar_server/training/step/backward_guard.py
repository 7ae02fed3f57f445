"""Backward guard: aborts a backward pass from outside.

# Note: [Where the guard is checked]
A guard's own hooks are on module calls, and no module is called in a backward pass. So it is checked when a
weight's gradient is computed, and when the pass reaches the output of a frozen module. Hooks cost some
microseconds each, so only modules with a weight of two dimensions or more have one: these take the time.
After the first pass, frozen modules that got no gradient have none either.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.surgery.structure import leaves


class BackwardGuard:
    """Lets a guard abort backward passes of a module tree. See Note: [Where the guard is checked].

        watch = BackwardGuard(model)
        with watch.asking(guard):
            model(batch).sum().backward()

    Args:
        module: The trainer's module tree; its set of trained parameters must not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights: list[nn.Parameter] = []
        frozen: list[nn.Module] = []
        parts = [part for part in module.modules() if part._parameters]
        heavy = [part for part in parts if any(p.ndim > 1 for p in part.parameters(recurse=False))]
        for part in heavy or parts:
            own = list(part.parameters(recurse=False))
            trained = [parameter for parameter in own if parameter.requires_grad]
            if trained:
                self._weights.append(trained[0])
            elif own:
                frozen.append(part)
        self._frozen: Sequence[nn.Module] = frozen
        self._is_known = False

    @contextmanager
    def asking(self, guard: PassGuard) -> Iterator[None]:
        """Check the guard in the backward pass of computations made inside the context."""
        reached: list[nn.Module] = []

        def check(_: Tensor) -> None:
            guard.check()

        def leave(part: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            tensors = [output] if isinstance(output, Tensor) else [leaf for _picks, leaf in leaves(output)]
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(check)
                    reached.append(part)

        with ExitStack() as hooks:
            for weight in self._weights:
                hooks.callback(weight.register_hook(check).remove)
            for part in self._frozen:
                hooks.callback(part.register_forward_hook(leave).remove)
            yield
        if not self._is_known:
            self._frozen, self._is_known = list(dict.fromkeys(reached)), True
