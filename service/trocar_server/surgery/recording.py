"""What a pass calls, in order, with what each call takes and returns.

    recording = record_calls(model, (torch.empty(8, 3, 224, 224, device="meta"),))

On a meta replica this costs no arithmetic; the plan of every extraction is checked against it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from trocar_server.surgery.liveness import LiveBytes, PeakMeter, fused_attention
from trocar_server.surgery.structure import Picks, leaves
from trocar_server.surgery.writes import WriteWatch


@dataclass(frozen=True)
class Leaf:
    """One element of what a module took or returned.

    Attributes:
        port: `out`, `in`, `in(name)`, `param(name)` or `scores`.
        picks: The way to it within the port's value.
        type_name: Python class, `Tensor` for tensors.
        shape: Shape of a tensor, otherwise None.
        dtype: Dtype of a tensor, otherwise None.
        is_overwritten: Whether the model may write to it later in the pass, so that whoever wants
            its value must copy it at once. See Note: [Clone before in-place].
        strides: Steps in elements of a dense tensor from one position to the next, by dimension; empty
            where not known.
    """

    port: str
    picks: Picks
    type_name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    is_overwritten: bool = True
    strides: tuple[int, ...] = ()

    @property
    def byte_count(self) -> int:
        """Bytes of the values; 0 for what is no tensor."""
        if self.shape is None or self.dtype is None:
            return 0
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass
class Call:
    """One call of a module: its inputs and outputs, and when it started and ended in the pass.

    Attributes:
        started: When it started, in steps of the pass.
        ended: When it ended.
        inputs: What it took.
        outputs: What it returned.
        peak_bytes_before: The most bytes that the pass held at a time until the call started, see
            `Recording.peak_bytes`.
        peak_bytes: The same until the call ended.
    """

    started: int
    ended: int = -1
    inputs: list[Leaf] = field(default_factory=list)
    outputs: list[Leaf] = field(default_factory=list)
    peak_bytes_before: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class ModuleRecord:
    """A module and its calls in one pass, by call index.

    Attributes:
        path: Qualified name; empty for the model itself.
        type_name: Class name.
        calls: What each call took and returned.
        parameter_count: Parameter elements of the module and all below it.
        description: The module's own settings, in the words of `extra_repr`.
        parameters: Its own parameters and buffers by name, not those of modules inside. Their
            `is_overwritten` says whether a pass may write to them.
        buffers: Which of these are buffers.
    """

    path: str
    type_name: str
    calls: list[Call]
    parameter_count: int = 0
    description: str = ""
    parameters: Mapping[str, Leaf] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recording:
    """One pass.

    Attributes:
        modules: Every module by path: called ones in the order in which their first call started,
            then those that were never called, in order of registration.
        is_symbolic: Whether it ran without data, so that it holds for any data of these shapes.
        stages: Selectors by stage name, for example `layer1` for `stage1`.
        nodes: The nodes of the traced graph by name, in execution order; None when not recorded.
        functions: The functions of torch that the pass called, by name; None when not recorded.
        peak_bytes: The most bytes that the whole pass holds at a time, beyond inputs, parameters, buffers
            and what is collected; 0 where it is not symbolic. See Note: [Workspaces of a pass].
    """

    modules: Mapping[str, ModuleRecord]
    is_symbolic: bool
    stages: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, ModuleRecord] | None = None
    functions: Mapping[str, ModuleRecord] | None = None
    peak_bytes: int = 0

    def of_kind(self, kind: str) -> Mapping[str, ModuleRecord]:
        """Return what was recorded of a kind of target: `module`, `fx` or `fn`."""
        return {"module": self.modules, "fx": self.nodes, "fn": self.functions}[kind] or {}


# Note: [Clone before in-place]
# A hook holds a reference, and an in-place module further on (65 of torchvision's models have some)
# changes what it refers to. A recorded pass on the meta device sees every operator, so it tells which
# storages are written to after a hook saw them, through whatever view. A second pass tells which are
# kept by the model and written to by the next call. Only these are cloned in a real pass. Where no
# meta pass is possible, all are.
class Recorder:
    """Notes the calls of one pass, by path, as they start and end.

    Args:
        watch: Sees every write of the pass, or None where values must not be kept to find out.

    Attributes:
        calls: Calls by path, in the order in which they started.
    """

    def __init__(self, watch: WriteWatch | None) -> None:
        self.clock = 0
        self.calls: dict[str, list[Call]] = {}
        self._watch = watch
        self._seen: list[tuple[list[Leaf], int, torch.Tensor, int]] = []
        self._open: dict[str, list[Call]] = {}

    def enter(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Note that a call starts, with what it takes."""
        call = Call(started=self._tick())
        self.calls.setdefault(path, []).append(call)
        self._open.setdefault(path, []).append(call)
        self._note(call.inputs, "in", args)
        for name, value in kwargs.items():
            self._note(call.inputs, f"in({name})", value)
        return call

    def leave(self, path: str, output: Any) -> Call:
        """Note that the last call of this path ends, with what it returned; None while an error rises."""
        call = self._open[path].pop()
        if not has_raised(output):
            self._note(call.outputs, "out", output)
        call.ended = self._tick()
        return call

    def settle_overwrites(self, watch: WriteWatch) -> None:
        """Say of each tensor whether it was written to after its hook saw it."""
        for target, index, tensor, seen_at in self._seen:
            target[index] = replace(target[index], is_overwritten=watch.last_write(tensor) > seen_at)
        self._seen.clear()

    def settle_peaks(self, meter: PeakMeter) -> None:
        """Give each call what the second pass held when the same call of it started and ended."""
        for path, peaks in meter.peaks.items():
            for call, (before, after) in zip(self.calls.get(path, []), peaks, strict=False):
                call.peak_bytes_before, call.peak_bytes = before, after

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _note(self, target: list[Leaf], port: str, value: Any) -> None:
        for picks, leaf in leaves(value):
            if not isinstance(leaf, torch.Tensor):
                target.append(Leaf(port, picks, type(leaf).__name__))
                continue
            if self._watch is not None:
                self._seen.append((target, len(target), leaf, self._watch.clock))
            strides = leaf.stride() if leaf.layout is torch.strided else ()
            target.append(Leaf(port, picks, "Tensor", tuple(leaf.shape), leaf.dtype, strides=strides))


def record_calls(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    is_symbolic: bool = True,
    check: Callable[[Recording], None] | None = None,
) -> Recording:
    """Run one pass, symbolic ones twice, and return what it called.

    Args:
        module: The model, on the meta device when symbolic; it is left without our hooks.
        args: Positional inputs.
        kwargs: Keyword inputs.
        is_symbolic: Whether module and inputs are on the meta device. When not, every value counts
            as overwritten, because keeping them all to find out would take the memory of a
            training pass.
        check: Called after the first of two passes with what is known by then: all but what is
            overwritten and how many bytes live. Raises to spare the second.
    """
    watch = WriteWatch() if is_symbolic else None
    recorder, live = Recorder(watch), LiveBytes()
    meter = PeakMeter(live)
    with ExitStack() as contexts, torch.no_grad():
        if watch is not None:
            contexts.enter_context(watch)
        known = dict(module.named_modules())
        with _hooked(known, recorder):
            module(*args, **(kwargs or {}))
        if dict(module.named_modules()).keys() - known.keys():  # made by the first pass, without our hooks
            return record_calls(module, args, kwargs, is_symbolic=is_symbolic, check=check)
        if check is not None:
            check(Recording(_in_execution_order(module, recorder.calls, watch), is_symbolic))
        if watch is not None:
            watch.live = live
            with fused_attention(live, watch.operators), _hooked(known, meter):
                module(*args, **(kwargs or {}))
            recorder.settle_overwrites(watch)
            recorder.settle_peaks(meter)
    records = _in_execution_order(module, recorder.calls, watch)
    return Recording(records, is_symbolic, peak_bytes=live.peak)


def has_raised(output: Any) -> bool:
    """Whether a forward hook with `always_call` is called because the forward raised."""
    return output is None and sys.exc_info()[0] is not None


@contextmanager
def _hooked(modules: Mapping[str, nn.Module], recorder: Recorder | PeakMeter) -> Iterator[None]:
    with ExitStack() as hooks:
        for path, module in modules.items():
            for handle in _hook(module, path, recorder):
                hooks.callback(handle.remove)
        yield


def _hook(module: nn.Module, path: str, recorder: Recorder | PeakMeter) -> list[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(path, args, kwargs)

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.leave(path, output)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),  # closes calls that raised, too
    ]


def _in_execution_order(
    module: nn.Module, calls: dict[str, list[Call]], watch: WriteWatch | None
) -> dict[str, ModuleRecord]:
    modules = dict(module.named_modules())
    order = [*(path for path in calls if path in modules), *(path for path in modules if path not in calls)]
    return {path: _module_record(path, modules[path], calls.get(path, []), watch) for path in order}


def _module_record(path: str, module: nn.Module, calls: list[Call], watch: WriteWatch | None) -> ModuleRecord:
    count = sum(parameter.numel() for parameter in module.parameters())
    parameters = {
        name: Leaf(
            port=f"param({name})",
            picks=(),
            type_name="Tensor",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            # Batch norm changes its buffers without saying so in its operator's schema (torch 2.14).
            is_overwritten=watch is None or name in module._buffers or watch.last_write(tensor) > 0,
        )
        for name, tensor in own_tensors(module).items()
    }
    buffers = frozenset(module._buffers)
    return ModuleRecord(path, type(module).__name__, calls, count, module.extra_repr(), parameters, buffers)


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers by name, without those of modules inside."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }
