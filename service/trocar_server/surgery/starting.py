"""Starting a pass in the middle, from the value of one module.

    with StartSession(model, meta_twin, target, value):
        model(*inputs_on_meta)

# Note: [Start in the middle]
The code between modules belongs to the forward of their parent, so what follows a module cannot be run
without what comes before it. But it can be run without arithmetic: parameters and inputs are on the meta
device until the call in question, where the given value takes the place of what the module would have
returned (or taken), and the real parameters come back. From then on everything is as in a full pass, by the
same code and so bit-equal. What still reaches behind the start, a skip connection for example, meets a tensor
without data. torch does not always refuse to mix the two (`x.add_(meta)` silently does nothing in 2.14), so
every operator after the start is watched.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trocar_server.surgery.structure import Picks
from trocar_server.surgery.taps import Target

_Tables = tuple[dict[str, Any], dict[str, Any]]


class StartMixedError(RuntimeError):
    """Something after the start needs a value from before it: the argument is its name."""


class _MixWatch(TorchDispatchMode):
    """Raises when an operator mixes tensors with and without data."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        if len({tensor.is_meta for tensor in _tensors((args, kwargs or {}))}) > 1:
            raise StartMixedError(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors(item)
    elif isinstance(argument, dict):
        yield from _tensors(list(argument.values()))


class StartSession:
    """Lets a pass start at one value, for as long as the context is open.

    Args:
        model: A replica; the caller holds its lease. Its inputs are to be on the meta device.
        twin: The same module tree with parameters and buffers on the meta device.
        target: Where the value belongs: an output that is one tensor, or a positional input.
        value: What the pass goes on with.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, target: Target, value: torch.Tensor) -> None:
        self._target = target
        self._value = value
        self._module = model.get_submodule(target.path)
        self._pairs = list(zip(model.modules(), twin.modules(), strict=True))
        self._own: list[tuple[nn.Module, _Tables]] = []
        self._count = 0
        self._open_calls: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._watch = ExitStack()

    def __enter__(self) -> Self:
        self._own = [(module, (module._parameters, module._buffers)) for module, _ in self._pairs]
        for module, twin in self._pairs:
            _give(module, (twin._parameters, twin._buffers))
        self._handles = [
            self._module.register_forward_pre_hook(self._enter_call),
            self._module.register_forward_hook(self._leave_call, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.close()
        for handle in self._handles:
            handle.remove()
        self._restore()

    def _enter_call(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        index, self._count = self._count, self._count + 1
        self._open_calls.append(index)
        if self._target.port == "out" or index != self._target.call:
            return None
        self._begin()
        return _with(args, self._target.picks, self._value)

    def _leave_call(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        index = self._open_calls.pop()
        if self._target.port != "out" or index != self._target.call or output is None:
            return None
        self._begin()
        return self._value

    def _begin(self) -> None:
        self._restore()
        self._watch.enter_context(_MixWatch())  # type: ignore[no-untyped-call]

    def _restore(self) -> None:
        for module, tables in self._own:
            _give(module, tables)
        self._own = []


def _give(module: nn.Module, tables: _Tables) -> None:
    """Let a module have other parameters and buffers; the dicts themselves stay as they are."""
    module.__dict__["_parameters"], module.__dict__["_buffers"] = tables


def _with(args: tuple[Any, ...], picks: Picks, value: torch.Tensor) -> tuple[Any, ...]:
    """Replace one positional argument."""
    (position,) = picks
    return tuple(value if index == position else argument for index, argument in enumerate(args))
