"""Storage writes of a pass, by call: through views, `detach()`, `.data` and `out=` alike."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trocar_server.surgery.recording.liveness import LiveBytes


class WriteWatch(TorchDispatchMode):
    """Records every in-place write of the operators that run inside its context.

    Attributes:
        clock: Writes so far.
        operators: Operators that have run.
        live: Counter of the operators' allocations, or None.
        step: Position of the pass on the clock of its modules; set by the module hooks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self.operators: set[torch._ops.OpOverload] = set()
        self.live: LiveBytes | None = None
        self.step = 0
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def last_write(self, tensor: torch.Tensor) -> int:
        """Return when the tensor's storage was last written to, by the clock; 0 for never.

        A tensor without a storage of its own, a sparse one for example, counts as written to at the end.
        """
        key = storage_key(tensor)
        return self.clock + 1 if key is None else self._written.get(key, 0)

    def first_read(self, tensor: torch.Tensor) -> int | None:
        """Return the step in which an operator first read the tensor's storage; -1 for never.

        None for a tensor without a storage of its own, a sparse one for example.
        """
        key = storage_key(tensor)
        return None if key is None else self._read.get(key, -1)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and record its allocations, reads and writes."""
        self._note_reads(args)
        if kwargs:
            self._note_reads(kwargs.values())
        result = func(*args, **(kwargs or {}))
        self.operators.add(func)
        if self.live is not None:
            self.live.see(func, args, result)
        for tensor in written_tensors(func, args, kwargs or {}):
            self.clock += 1
            key = storage_key(tensor)
            if key is not None:
                self._written[key] = self.clock
                if self.live is not None:
                    self.live.see_write(tensor, key)
        return result

    def _note_reads(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            for tensor in _tensors(argument):
                key = storage_key(tensor)
                if key is not None:
                    self._read.setdefault(key, self.step)


class WriteJournal(TorchDispatchMode):
    """Copies the given tensors before the first operator of its context that writes to them.

        with WriteJournal(dict(model.named_parameters())) as journal:
            model(batch)
        names = journal.put_back()

    Args:
        tensors: The tensors to watch, by name, through whatever view they are written to.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int | None, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            self._watched.setdefault(storage_key(tensor), []).append((name, tensor.detach()))
        self._watched.pop(None, None)
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, after copying what it writes to."""
        for tensor in written_tensors(func, args, kwargs or {}):
            for name, owner in self._watched.pop(storage_key(tensor), ()):
                self._copies[name] = owner, owner.clone()
        return func(*args, **(kwargs or {}))

    def put_back(self) -> frozenset[str]:
        """Restore the tensors that were written to, and return their names."""
        with torch.no_grad():
            for tensor, copy in self._copies.values():
                tensor.copy_(copy)
        return frozenset(self._copies)


_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
_STATISTICS: dict[str, tuple[int, ...]] = dict.fromkeys(_BATCH_NORMS, (3, 4))
"""Positions of running statistics of operators that write to them in training, which no schema says."""


def written_tensors(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes to, by its schema and as batch norms do without it."""
    positions, names = _written_arguments(func)
    if len(args) > 5 and args[5] is True:
        positions += _STATISTICS.get(func._schema.name.removeprefix("aten::"), ())
    for argument in (*(args[i] for i in positions if i < len(args)), *(kwargs.get(n) for n in names)):
        yield from _tensors(argument)


@lru_cache(maxsize=4096)
def _written_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and the keywords of the arguments that an operator writes to."""
    written = [
        (position, argument)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(i for i, a in written if not a.kwarg_only), tuple(a.name for _, a in written)


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        yield from (item for item in argument if isinstance(item, torch.Tensor))


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a key that tensors with the same storage share; None for those without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
