"""How many bytes a pass holds at a time, from a pass that holds none.

On the meta device tensors have sizes and lifetimes like real ones: what an operator returns lives until the
model drops it. So the sum of what is alive, and its maximum, are those of a real pass.
"""

from functools import lru_cache
from typing import Any
from weakref import ref

import torch


class LiveBytes:
    """Counts the bytes of the storages that operators have made and that are still alive.

        live = LiveBytes()
        live.see(func, func(*args))               # after every operator
        live.peak

    What was there before (inputs, parameters, buffers) is not counted, nor is what a kernel needs only for
    itself (workspaces). Views share the storage of what they show, and count once.

    Attributes:
        current: Bytes that are alive now.
        peak: The most that were alive at a time.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._alive: dict[int, tuple[int, ref[torch.UntypedStorage]]] = {}

    def see(self, func: torch._ops.OpOverload, result: Any) -> None:
        """Count what an operator has made.

        Args:
            func: The operator; its schema tells new tensors from views and from what it wrote to.
            result: What it returned.
        """
        if not isinstance(result, (tuple, list)):
            if _makes(func)[0] and isinstance(result, torch.Tensor):
                self._add(result)
            return
        made = _makes(func)
        for index, value in enumerate(result):
            if made[min(index, len(made) - 1)]:  # one return may be a list of any length
                for tensor in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        self._add(tensor)

    def see_write(self, tensor: torch.Tensor, key: int) -> None:
        """Count what a storage has grown by: `out=` and `resize_` do that."""
        if key in self._alive:
            self._forget(key)
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none of their own
            return
        key, size = int(storage._cdata), storage.nbytes()
        if key in self._alive:  # some views do not say so, `_unsafe_view` for example
            return
        self._alive[key] = size, ref(storage, lambda _: self._forget(key))
        self.current += size
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.current -= self._alive.pop(key)[0]


class PeakMeter:
    """Notes for every call of a module what the pass has held at most when it starts and when it ends.

    Attributes:
        peaks: By module path and call index, the peak before the call and the one at its end.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.peaks: dict[str, list[tuple[int, int]]] = {}
        self._live = live
        self._open: dict[str, list[int]] = {}

    def enter(self, path: str, args: object = None, kwargs: object = None) -> None:
        """Note the start of a call."""
        calls = self.peaks.setdefault(path, [])
        self._open.setdefault(path, []).append(len(calls))
        calls.append((self._live.peak, self._live.peak))

    def leave(self, path: str, output: object = None) -> None:
        """Note the end of the innermost open call of a module."""
        index = self._open[path].pop()
        self.peaks[path][index] = self.peaks[path][index][0], self._live.peak


@lru_cache(maxsize=4096)
def _makes(func: torch._ops.OpOverload) -> tuple[bool, ...]:
    """Tell for each value that an operator returns whether it is new, and no view of an argument."""
    return tuple(value.alias_info is None for value in func._schema.returns) or (False,)
