"""Recording: the calls of one pass in order, with their inputs and outputs.

    recording = record_calls(model, (torch.empty(8, 3, 224, 224, device="meta"),))

On a meta replica this costs no arithmetic; the plan of every extraction is checked against it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from trocar_server.surgery.axes.layout import Layouts
from trocar_server.surgery.ports import UNNAMED, CallPorts, Parameters, parameters_of
from trocar_server.surgery.recording.liveness import LiveBytes, PeakMeter, fused_attention
from trocar_server.surgery.recording.second_names import NONE, SecondNames, second_names
from trocar_server.surgery.recording.writes import WriteWatch
from trocar_server.surgery.structure import Picks, leaves

NESTED = "NestedTensor"
"""Type name of tensors whose rows have different lengths, as `nn.TransformerEncoder` makes of padded ones."""


@dataclass(frozen=True)
class Leaf:
    """One element of a module's inputs or outputs.

    Attributes:
        port: `out`, `in`, `in(name)`, `param(name)` or `scores`.
        picks: Its path within the port's value.
        type_name: Python class, `Tensor` for tensors, `NestedTensor` for nested ones.
        shape: Shape of a tensor, otherwise None.
        dtype: Dtype of a tensor, otherwise None.
        is_overwritten: Whether the model may write to it later in the pass, so that it must be cloned
        when it is collected. See Note: [Clone before in-place].
        strides: Strides of a dense tensor, in elements; empty where unknown.
        read_at: Of a parameter or buffer: when the pass first reads it, on the clock of modules; None
        where unknown, -1 for never.
    """

    port: str
    picks: Picks
    type_name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    is_overwritten: bool = True
    strides: tuple[int, ...] = ()
    read_at: int | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of the values; 0 for anything but a tensor."""
        if self.shape is None or self.dtype is None:
            return 0
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


FunctionInput = tuple[str, int, str, Picks]
"""A function, the index of a call of it, and port and picks of one of its inputs."""


@dataclass(frozen=True)
class Sink:
    """Columns of a softmax that stand for no key. See `sinks`.

    Attributes:
        count: How many.
        is_first: Whether they are the first ones; the last ones otherwise.
        logits: The logits of the keys, before the columns were added; None where unknown.
    """

    count: int
    is_first: bool = False
    logits: FunctionInput | None = None

    @property
    def keys(self) -> tuple[int | None, int | None]:
        """Start and stop of the columns of keys."""
        return (self.count, None) if self.is_first else (None, -self.count)

    @property
    def own(self) -> tuple[int | None, int | None]:
        """Start and stop of its own columns."""
        return (None, self.count) if self.is_first else (-self.count, None)


@dataclass
class ModuleCall:
    """One call of a module: its inputs and outputs, and when it started and ended in the pass.

    Attributes:
        started: When it started, in steps of the pass.
        ended: When it ended.
        inputs: Its inputs.
        outputs: Its outputs.
        peak_bytes_before: Peak memory of the pass in bytes until the call started, see
        `Recording.peak_bytes`.
        peak_bytes: The same until the call ended.
        work_before: Multiply-adds of the pass until the call started, see `Recording.work`.
        work: The same until the call ended.
        after_module: Of a function: the last step of the modules' clock before it.
        positional: How many of its inputs were passed by position.
        sink: Of a softmax: the columns that the model drops after it; None for none.
        is_along_last: Of a softmax: whether its last dimension sums to 1.
    """

    started: int
    ended: int = -1
    inputs: list[Leaf] = field(default_factory=list)
    outputs: list[Leaf] = field(default_factory=list)
    peak_bytes_before: int = 0
    peak_bytes: int = 0
    work_before: int = 0
    work: int = 0
    after_module: int = 0
    positional: int = 0
    sink: Sink | None = None
    is_along_last: bool = True


@dataclass(frozen=True)
class ModuleRecord:
    """A module and its calls in one pass, by call index.

    Attributes:
        path: Qualified name; empty for the model itself.
        type_name: Class name.
        calls: Inputs and outputs of each call.
        parameter_count: Parameter elements of the module and all its submodules.
        description: The module's own settings, as `extra_repr` prints them.
        parameters: Its own parameters and buffers by name, not those of submodules. Their
        `is_overwritten` says whether a pass may write to them.
        buffers: Which of these are buffers.
        arguments: The parameters of its `forward`.
    """

    path: str
    type_name: str
    calls: list[ModuleCall]
    parameter_count: int = 0
    description: str = ""
    parameters: Mapping[str, Leaf] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    arguments: Parameters = UNNAMED


@dataclass(frozen=True)
class Recording:
    """The record of one pass.

    Attributes:
        modules: Every module by path: called ones in the order in which their first call started,
        then those that were never called, in order of registration.
        is_symbolic: Whether it ran without data, so that it is valid for any data of these shapes.
        stages: Selectors by stage name, for example `layer1` for `stage1`.
        nodes: The nodes of the traced graph by name, in execution order; None when not recorded.
        functions: The functions of torch that the pass called, by name; None when not recorded.
        attention: Those of `functions` that compute attention; None when not recorded.
        peak_bytes: Peak memory of the pass in bytes, beyond inputs, parameters, buffers and collected
        values; 0 where it was not counted. See Note: [Workspaces of a pass].
        work: Multiply-adds of the pass, at least; 0 where they were not counted. See `multiply_adds`.
        is_predicted: Whether no such pass ran. See Note: [Symbolic recording].
        written: Names of the parameters and buffers that the pass wrote to; empty where it was not symbolic.
        layouts: What the dimensions of its values mean; None where that was not looked at.
        second_names: Further names of modules and parameters.
    """

    modules: Mapping[str, ModuleRecord]
    is_symbolic: bool
    stages: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, ModuleRecord] | None = None
    functions: Mapping[str, ModuleRecord] | None = None
    attention: Mapping[str, ModuleRecord] | None = None
    peak_bytes: int = 0
    work: int = 0
    is_predicted: bool = False
    written: frozenset[str] = frozenset()
    layouts: Layouts | None = field(default=None, repr=False, compare=False)
    second_names: SecondNames = field(default=NONE, repr=False)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """What was recorded beside modules: `fx`, `fn`, `attention`."""
        kinds = {"fx": self.nodes, "fn": self.functions, "attention": self.attention}
        return frozenset(kind for kind, records in kinds.items() if records is not None)

    @cached_property
    def overwrites_inputs(self) -> bool:
        """Whether the pass may write to its own inputs, so that a second pass needs copies."""
        inputs = self.modules[""].calls[0].inputs
        return any(leaf.is_overwritten for leaf in inputs if leaf.shape is not None)

    def of_kind(self, kind: str) -> Mapping[str, ModuleRecord]:
        """Return the records of one kind of target: `module`, `fx` or `fn`."""
        functions = self.attention if self.functions is None else self.functions
        return {"module": self.modules, "fx": self.nodes, "fn": functions}[kind] or {}


# Note: [Clone before in-place]
# A hook holds a reference, and a later in-place module (65 of torchvision's models have some) changes
# the tensor it refers to. A recorded pass on the meta device sees every operator, so it shows which
# storages are written to after a hook saw them, through any view. A second pass shows which are kept
# by the model and written to by the next call. Only these are cloned in a real pass. Where no meta
# pass is possible, all are.
class Recorder:
    """Records the calls of one pass, by path, as they start and end.

    Args:
        watch: Observes every write of the pass, or None where values must not be kept for that.

    Attributes:
        calls: Calls by path, in the order in which they started.
    """

    def __init__(self, watch: WriteWatch | None) -> None:
        self.clock = 0
        self.calls: dict[str, list[ModuleCall]] = {}
        self._watch = watch
        self._seen: list[tuple[list[Leaf], int, torch.Tensor, int]] = []
        self._open: dict[str, list[ModuleCall]] = {}

    def enter(self, path: str, ports: CallPorts) -> ModuleCall:
        """Record the start of a call, with its inputs."""
        call = ModuleCall(started=self._tick(), positional=ports.positional)
        self.calls.setdefault(path, []).append(call)
        self._open.setdefault(path, []).append(call)
        for port, value in ports.items():
            self._note(call.inputs, port, value)
        return call

    def leave(self, path: str, output: Any) -> ModuleCall:
        """Record the end of the last call of this path, with its output; None while an error propagates."""
        call = self._open[path].pop()
        if not has_raised(output):
            self._note(call.outputs, "out", output)
        call.ended = self._tick()
        return call

    def settle_overwrites(self, watch: WriteWatch) -> None:
        """Mark each tensor that was written to after its hook saw it."""
        for target, index, tensor, seen_at in self._seen:
            target[index] = replace(target[index], is_overwritten=watch.last_write(tensor) > seen_at)
        self._seen.clear()

    def settle_peaks(self, meter: PeakMeter) -> None:
        """Set each call's peaks and work from the same call of the second pass."""
        for path, peaks in meter.peaks.items():
            pairs = zip(self.calls.get(path, []), peaks, meter.works[path], strict=False)
            for call, (before, after), (work_before, work) in pairs:
                call.peak_bytes_before, call.peak_bytes = before, after
                call.work_before, call.work = work_before, work

    def _tick(self) -> int:
        self.clock += 1
        if self._watch is not None:
            self._watch.step = self.clock
        return self.clock

    def _note(self, target: list[Leaf], port: str, value: Any) -> None:
        for picks, leaf in leaves(value, with_empty=port == "out"):
            if not isinstance(leaf, torch.Tensor):
                target.append(Leaf(port, picks, type(leaf).__name__))
                continue
            if leaf.is_nested:  # rows of different lengths: neither a shape nor strides
                target.append(Leaf(port, picks, NESTED))
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
    live: LiveBytes | None = None,
) -> Recording:
    """Run one pass, symbolic ones twice, and return its recording.

    Args:
        module: The model, on the meta device when symbolic; the hooks are removed afterwards.
        args: Positional inputs.
        kwargs: Keyword inputs.
        is_symbolic: Whether module and inputs are on the meta device. When not, every value counts
        as overwritten, because keeping them all to compare would take the memory of a
        training pass.
        check: Called after the first of two passes with the recording so far: everything but
        overwrites and live bytes. Raises to skip the second.
        live: Counts the bytes; those of a pass that is not symbolic are not counted when None.
    """
    if live is not None and not is_symbolic:
        return _record_counted(module, args, kwargs or {}, live)
    watch = WriteWatch() if is_symbolic else None
    recorder, live = Recorder(watch), live or LiveBytes()
    meter = PeakMeter(live)
    with ExitStack() as contexts, torch.no_grad():
        if watch is not None:
            contexts.enter_context(watch)
        known, state = dict(module.named_modules()), all_tensors(module)
        with hooked(known, recorder):
            module(*args, **(kwargs or {}))
        if dict(module.named_modules()).keys() - known.keys():  # created by the first pass, without hooks
            return record_calls(module, args, kwargs, is_symbolic=is_symbolic, check=check, live=live)
        if check is not None:
            records = _in_execution_order(module, recorder.calls, watch)
            check(Recording(records, is_symbolic, second_names=second_names(module)))
        if watch is not None:
            watch.live = live
            with fused_attention(live, watch.operators), hooked(known, meter):
                module(*args, **(kwargs or {}))
            recorder.settle_overwrites(watch)
            recorder.settle_peaks(meter)
    records = _in_execution_order(module, recorder.calls, watch)
    names = (name for name, tensor in state.items() if watch is not None and watch.last_write(tensor))
    return Recording(
        records,
        is_symbolic,
        peak_bytes=live.peak,
        work=live.work,
        written=frozenset(names),
        second_names=second_names(module),
    )


def _record_counted(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], live: LiveBytes
) -> Recording:
    """Run one pass on data, and return its recording with the bytes it used."""
    recorder, meter, counter = Recorder(None), PeakMeter(live), WriteWatch()
    counter.live = live
    known = dict(module.named_modules())
    with torch.no_grad(), counter, hooked(known, recorder), hooked(known, meter):
        module(*args, **kwargs)
    if dict(module.named_modules()).keys() - known.keys():  # created by the first pass, without hooks
        return _record_counted(module, args, kwargs, LiveBytes(live.limit))
    recorder.settle_peaks(meter)
    records = _in_execution_order(module, recorder.calls, None)
    return Recording(
        records,
        is_symbolic=False,
        peak_bytes=live.peak,
        work=live.work,
        second_names=second_names(module),
    )


def structure_of(records: Mapping[str, ModuleRecord]) -> Mapping[str, ModuleRecord]:
    """Return records for their paths, calls and order alone: shapes and bytes may be missing.

    Cheaper than the records themselves where these are predicted.
    """
    result: Mapping[str, ModuleRecord] = getattr(records, "structure", records)
    return result


def has_raised(output: Any) -> bool:
    """Whether a forward hook with `always_call` runs because the forward raised."""
    return output is None and sys.exc_info()[0] is not None


class CallRecorder(Protocol):
    """What hears of every call of a pass."""

    def enter(self, path: str, ports: CallPorts) -> object:
        """Hear of the start of a call, with its inputs."""

    def leave(self, path: str, output: Any) -> object:
        """Hear of the end of a call, with its output; None while an error propagates."""


class StepCount:
    """The clock of modules, as `Recorder` counts it: a step when a call starts, and one when it ends."""

    def __init__(self) -> None:
        self.step = 0

    def enter(self, path: str, ports: object = None) -> None:
        """Count the start of a call."""
        self.step += 1

    def leave(self, path: str, output: object = None) -> None:
        """Count the end of a call."""
        self.step += 1


@contextmanager
def hooked(modules: Mapping[str, nn.Module], recorder: CallRecorder) -> Iterator[None]:
    """Report every call of these modules, by path, to the recorder inside the context."""
    with ExitStack() as hooks:
        for path, module in modules.items():
            for handle in _hook(module, path, recorder):
                hooks.callback(handle.remove)
        yield


def _hook(module: nn.Module, path: str, recorder: CallRecorder) -> list[Any]:
    parameters = parameters_of(module)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(path, CallPorts(parameters, args, kwargs))

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.leave(path, output)

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),  # closes calls that raised, too
    ]


def _in_execution_order(
    module: nn.Module, calls: dict[str, list[ModuleCall]], watch: WriteWatch | None
) -> dict[str, ModuleRecord]:
    modules = dict(module.named_modules())
    order = [*(path for path in calls if path in modules), *(path for path in modules if path not in calls)]
    return {path: _module_record(path, modules[path], calls.get(path, []), watch) for path in order}


def _module_record(
    path: str, module: nn.Module, calls: list[ModuleCall], watch: WriteWatch | None
) -> ModuleRecord:
    count = sum(parameter.numel() for parameter in module.parameters())
    parameters = {
        name: Leaf(
            port=f"param({name})",
            picks=(),
            type_name="Tensor",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            # Batch norm changes its buffers, though its operator's schema does not declare it (torch 2.14).
            is_overwritten=watch is None or name in module._buffers or watch.last_write(tensor) > 0,
            read_at=None if watch is None else watch.first_read(tensor),
        )
        for name, tensor in own_tensors(module).items()
    }
    buffers = frozenset(module._buffers)
    return ModuleRecord(
        path=path,
        type_name=type(module).__name__,
        calls=calls,
        parameter_count=count,
        description=module.extra_repr(),
        parameters=parameters,
        buffers=buffers,
        arguments=parameters_of(module),
    )


def all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a tree by name; tied ones under each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers by name, without its submodules'."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }
