"""Liveness: peak memory of a pass in bytes, from a pass on the meta device.

On the meta device tensors have sizes and lifetimes like real ones: the result of an operator lives until the
model drops it. So the live bytes, and their maximum, are those of a real pass. Two things differ:

# Note: [Workspaces of a pass]
A convolution on the CPU (oneDNN, torch 2.14) holds its input and weight in another layout, then its output.
The peak counts the larger of the two on top; where cuDNN takes less, it is too high.
Attention runs as one kernel on real data, and as plain products with all of its scores on the meta device.
The peak counts `scaled_dot_product_attention` as that kernel, but in full inside
`nn.MultiheadAttention`, whose fast path makes the scores, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.work import multiply_adds

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)
_SOFTMAX = {torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default}
_BLOCK_CHANNELS = 16


class LiveBytes:
    """Counts the bytes of live storages that operators have allocated.

        live = LiveBytes()
        live.see(func, func(*args))               # after every operator
        live.peak

    Existing tensors (inputs, parameters, buffers) are not counted. Views share the storage of their base, and
    count once.

    Args:
        limit: The most live bytes at a time; the operator that exceeds it raises.

    Attributes:
        current: Live bytes now.
        work: Multiply-adds of the operators so far; see `multiply_adds`.
        peak: The most live bytes at a time, see Note: [Workspaces of a pass].
        limit: As given.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.current = 0
        self.work = 0
        self.peak = 0
        self._is_paused = False
        self._alive: dict[int, tuple[int, ref[torch.UntypedStorage]]] = {}

    def see(self, func: torch._ops.OpOverload, args: Sequence[Any], result: Any) -> None:
        """Count the storages that an operator has allocated, and its work.

        Args:
            func: The operator; its schema distinguishes new tensors, views and written arguments.
            args: Its positional arguments.
            result: Its return value.
        """
        if work := multiply_adds(func, args, result):
            self._do(work)
        if self._is_paused:
            return
        if func in _CONVOLUTIONS:
            self._add(result)
            self._borrow(_convolution_workspaces(args, result))
            return
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
        """Count the growth of a storage: `out=` and `resize_` do that."""
        if key in self._alive:
            self._forget(key)
            self._add(tensor)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause counting inside the context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was created while counting was paused."""
        if not self._is_paused:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
            return
        key, size = int(storage._cdata), storage.nbytes()
        if key in self._alive:  # some views are not declared as such, `_unsafe_view` for example
            return
        self._alive[key] = size, ref(storage, lambda _: self._forget(key))
        self._take(size)
        if self.limit is not None and self.current > self.limit:
            raise ServiceError(
                ErrorReason.PASS_TOO_LARGE,
                f"the pass needs more than {self.limit:,} bytes of memory, the limit; it was stopped. Send a "
                "smaller batch",
                limit=str(self.limit),
            )

    def _forget(self, key: int) -> None:
        self._give_back(self._alive.pop(key)[0])

    def _take(self, byte_count: int) -> None:
        self.current += byte_count
        self.peak = max(self.peak, self.current)

    def _give_back(self, byte_count: int) -> None:
        self.current -= byte_count

    def _do(self, work: int) -> None:
        self.work += work

    def _borrow(self, byte_counts: Sequence[int]) -> None:
        """Count bytes that one operator needs one after the other, on top of its result."""
        self.peak = max(self.peak, *(self.current + byte_count for byte_count in byte_counts))


def fused_attention(live: LiveBytes, operators: set[torch._ops.OpOverload]) -> AbstractContextManager[object]:
    """Count attention inside the context as the single fused kernel that real data runs.

    Args:
        live: The counter.
        operators: Those of the pass. A pass without a softmax is left alone, because intercepting every
        torch function takes a tenth of its time.
    """
    return _FusedAttention(live) if operators & _SOFTMAX else nullcontext()


class _FusedAttention(TorchFunctionMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with self._live.paused():
            result = func(*args, **(kwargs or {}))
        self._live.add(result)
        return result


class PeakMeter:
    """Records for every module call the pass's peak memory and work when it starts and when it ends.

    Attributes:
        peaks: By module path and call index, the peak before the call and the one at its end.
        works: The same for the work.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.peaks: dict[str, list[tuple[int, int]]] = {}
        self.works: dict[str, list[tuple[int, int]]] = {}
        self._live = live
        self._open: dict[str, list[int]] = {}

    def enter(self, path: str, ports: object = None) -> None:
        """Note the start of a call."""
        calls = self.peaks.setdefault(path, [])
        self._open.setdefault(path, []).append(len(calls))
        calls.append((self._live.peak, self._live.peak))
        self.works.setdefault(path, []).append((self._live.work, self._live.work))

    def leave(self, path: str, output: object = None) -> None:
        """Note the end of the innermost open call of a module."""
        index = self._open[path].pop()
        self.peaks[path][index] = self.peaks[path][index][0], self._live.peak
        self.works[path][index] = self.works[path][index][0], self._live.work


@lru_cache(maxsize=4096)
def _makes(func: torch._ops.OpOverload) -> tuple[bool, ...]:
    """Return for each result of an operator whether it is new, that is no view of an argument."""
    return tuple(value.alias_info is None for value in func._schema.returns) or (False,)


def _convolution_workspaces(args: Sequence[Any], result: torch.Tensor) -> tuple[int, int]:
    inputs: torch.Tensor = args[0]
    weight: torch.Tensor = args[1]
    return _blocked(inputs) + weight.numel() * weight.itemsize, _blocked(result)


def _blocked(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in oneDNN's layout, which pads to blocks of 16 channels."""
    channels = tensor.shape[1] if tensor.dim() > 2 else 0
    filled = -(-channels // _BLOCK_CHANNELS) * _BLOCK_CHANNELS
    byte_count = tensor.numel() * tensor.itemsize  # `nbytes` has no symbolic sizes
    return byte_count * filled // channels if channels > _BLOCK_CHANNELS else byte_count
