"""Partial pass: starts in the middle, from the value of one module.

    with StartSession(copy_of_the_model, target, value):
        copy_of_the_model(*inputs_on_meta)

# Note: [Partial passes]
The code between modules belongs to the forward of their parent, so the rest of a pass cannot be run without
its beginning. But the beginning can be run without arithmetic: inputs, parameters and every other tensor of
the model are on the meta device until the call in question. There the given value replaces the module's
output (or input), and the real tensors are restored. From then on the pass is a full pass, by the same code
and so bit-equal. Code that still uses a value from before the start, a skip connection for example, gets a
tensor without data. torch does not always refuse to mix the two (`x.add_(meta)` silently does nothing in
2.14), so every operator is checked: after the start none may mix, before it none may write a tensor without
data to one with data. And a buffer that was written to before the start stays without data after it.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from trocar_server.surgery.ports import Arguments, CallPorts, parameters_of
from trocar_server.surgery.recording.writes import storage_key, written_tensors
from trocar_server.surgery.sessions.taps import Target
from trocar_server.surgery.structure import put

_TABLES = ("_parameters", "_buffers", "_modules")


class StartMixedError(RuntimeError):
    """Something after the start needs a value from before it: the argument is its name."""


class _MixWatch(TorchDispatchMode):
    """Raises when an operator mixes tensors with and without data; before the start only where it writes.

    Attributes:
        has_begun: Whether the pass has reached its start.
        written: Storages without data that were written to before the start.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_begun = False
        self.written: set[int | None] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        is_mixed = len({tensor.is_meta for tensor in _tensors((args, kwargs or {}))}) > 1
        if is_mixed and self.has_begun:
            raise StartMixedError(func.overloadpacket.__name__)
        if not self.has_begun:
            for tensor in written_tensors(func, args, kwargs or {}):
                if is_mixed and not tensor.is_meta:
                    raise StartMixedError(func.overloadpacket.__name__)
                self.written.add(storage_key(tensor))
        return func(*args, **(kwargs or {}))


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors(item)
    elif isinstance(argument, dict):
        yield from _tensors(list(argument.values()))


def laid_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the value with these strides: for other strides torch uses kernels with other rounding.

    Unchanged where elements would share memory.
    """
    if tuple(value.stride()) == tuple(strides) or len(strides) != value.dim():
        return value
    reach = 0
    for stride, size in sorted(zip(strides, value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return value
        reach += stride * (size - 1)
    return torch.empty_strided(value.shape, tuple(strides), dtype=value.dtype, device=value.device).copy_(
        value
    )


class StartSession:
    """Starts one pass at one value, for as long as the context is open.

    Args:
        model: A replica to discard afterwards: tensors without data that its own code keeps stay there.
        Its inputs must be on the meta device.
        target: The place of the value: an output that is one tensor, or a parameter that is.
        value: The value to continue the pass with.

    Raises:
        AttributeError: The model has no such module yet: it creates it in its first pass.
    """

    def __init__(self, model: nn.Module, target: Target, value: torch.Tensor) -> None:
        self._model = model
        self._target = target
        self._value = value
        self._module = model.get_submodule(target.path)
        self._parameters = parameters_of(self._module)
        self._hidden: list[_Hidden] = []
        self._count = 0
        self._open_calls: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._watch = _MixWatch()
        self._contexts = ExitStack()

    @property
    def has_begun(self) -> bool:
        """Whether the pass has reached its start."""
        return self._watch.has_begun

    def __enter__(self) -> Self:
        self._handles = [
            # When the pass begins, not here: a tap of parameters needs those with data.
            self._model.register_forward_pre_hook(self._hide),
            self._module.register_forward_pre_hook(self._enter_call, with_kwargs=True),
            self._module.register_forward_hook(self._leave_call, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.close()
        for handle in self._handles:
            handle.remove()

    def _hide(self, *_: object) -> None:
        if self._hidden or self.has_begun:  # the model calls itself
            return
        self._hidden = _without_data(self._model)
        self._contexts.enter_context(self._watch)

    def _enter_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        index, self._count = self._count, self._count + 1
        self._open_calls.append(index)
        port = self._target.port
        if port == "out" or index != self._target.call:
            return None
        self._begin()
        ports = CallPorts(self._parameters, args, kwargs)
        ports[port] = put(ports[port], self._target.picks, self._value)
        return ports.arguments()

    def _leave_call(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        index = self._open_calls.pop()
        if self._target.port != "out" or index != self._target.call or output is None:
            return None
        self._begin()
        return self._value

    def _begin(self) -> None:
        self._watch.has_begun = True
        for hidden in self._hidden:
            hidden.reveal(self._watch.written)
        self._hidden = []


class _Hidden:
    """One entry of a module whose tensors are without data for now."""

    def __init__(self, table: dict[str, Any], key: str, twins: dict[int, torch.Tensor]) -> None:
        self._table, self._key = table, key
        self._real = table[key]
        self._given = table[key] = _twin_of(self._real, twins)
        self._parts = list(_tensors(self._given))

    def reveal(self, written: set[int | None]) -> None:
        """Restore the original tensors, unless the model has changed the entry meanwhile."""
        parts = list(_tensors(self._table.get(self._key)))
        is_same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        if is_same and not any(storage_key(part) in written for part in parts):
            self._table[self._key] = self._real


def _without_data(model: nn.Module) -> list[_Hidden]:
    """Replace every tensor of a tree by one without data: parameters, buffers, and plain attributes."""
    twins: dict[int, torch.Tensor] = {}
    tables = [
        table for module in model.modules() for table in (module._parameters, module._buffers, vars(module))
    ]
    return [
        _Hidden(table, key, twins)
        for table in tables
        for key in list(table)
        if key not in _TABLES and any(True for _ in _tensors(table[key]))
    ]


def _twin_of(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    """Return a tensor, or a structure of them, without data; the same tensor gives the same twin."""
    if isinstance(value, torch.Tensor):
        if id(value) not in twins:
            twins[id(value)] = _empty(value)
        return twins[id(value)]
    if isinstance(value, dict):
        return {key: _twin_of(item, twins) for key, item in value.items()}
    if isinstance(value, list):
        return [_twin_of(item, twins) for item in value]
    if isinstance(value, tuple):
        items = [_twin_of(item, twins) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
