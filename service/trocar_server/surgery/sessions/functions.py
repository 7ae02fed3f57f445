"""Function values: outputs of torch functions that a model calls, recorded or collected.

    records = record_functions(meta_replica, [torch.empty(8, 3, 224, 224, device="meta")])
    target = Target("mine", "scaled_dot_product_attention", call=3, port="scores", kind="fn")
    with FunctionSession([target]) as session:
        model(batch)
    session.values["mine"]  # (batch, heads, queries, keys)

Functions are named by `function_calls.function_name`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from trocar_server.surgery.guard import PassGuard
from trocar_server.surgery.ports import UNNAMED, Arguments, CallPorts
from trocar_server.surgery.recording.function_layouts import ATTENTION
from trocar_server.surgery.recording.recording import Leaf, ModuleRecord, Recorder, StepCount, hooked
from trocar_server.surgery.recording.writes import WriteWatch
from trocar_server.surgery.selectors.selectors import LOGITS
from trocar_server.surgery.sessions.attention import (
    SOFTMAX,
    attention_logits,
    attention_output,
    attention_scores,
    softmax_of,
)
from trocar_server.surgery.sessions.call_writes import CallWrites, copied
from trocar_server.surgery.sessions.editing import (
    EditsByCall,
    EditTarget,
    edited_port,
    edits_by_call,
    edits_by_path,
    in_place_calls,
)
from trocar_server.surgery.sessions.function_calls import FunctionWatch
from trocar_server.surgery.sessions.hooks import Session
from trocar_server.surgery.sessions.sinks import SinkWatch
from trocar_server.surgery.sessions.taps import CallsDifferError, Collector, StopForward, Target, by_call
from trocar_server.surgery.structure import pick

SCORES = "scores"
"""The port of an attention function's scores."""

ATTENTION_FUNCTIONS = frozenset({ATTENTION, SOFTMAX})
"""Functions that compute attention."""

_ATTENTION_PORTS = {SCORES: attention_scores, LOGITS: attention_logits}

RESULT_PORTS = (LOGITS, SCORES, "out")
"""The ports of a result, in execution order. Of attention each is computed from the one before it."""


class FunctionSession(Session):
    """Collects and changes values of function calls for as long as the context is open.

    Ports are those of modules, and `scores` and `logits` of `scaled_dot_product_attention`: see
    `attention_scores`. Edits of one attention run in execution order: logits, scores, output. A tap sees all
    edits of the ports before its own. The pass ends, without an error, after the last call that is needed.

    Inside the context `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` do not use their
    fused kernels, so other values of the pass may differ in the last digits. Without targets the
    context does nothing.

    Args:
        targets: The values to collect; `path` is a function's name.
        collector: Shared with the other sessions of the pass, or None for one of its own. A
            `TapSession` beside it must share it, or its copies would count as calls of `clone`.
        guard: Checked at each call; a guard that watches the model is checked at its modules
        only.
    """

    _ends_with = (StopForward,)

    def __init__(
        self,
        targets: Sequence[Target],
        collector: Collector | None = None,
        guard: PassGuard | None = None,
        before: Sequence[EditTarget] = (),
        after: Sequence[EditTarget] = (),
    ) -> None:
        self._wanted = by_call(targets)
        self._before = _by_name(before)
        self._after = _by_name(after)
        self._collector = collector or Collector()
        self._collector.pending += sum(map(len, self._wanted.values()))
        self._guard = guard or PassGuard()
        self._in_place = in_place_calls((*before, *after))
        self._writes: dict[tuple[str, int], CallWrites] = {}
        self._watch = FunctionWatch(self, lambda: self._collector.is_busy)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Collected values by the name of their target."""
        return self._collector.values

    @property
    def stopped_at(self) -> str | None:
        """Where the pass ended because everything was collected, or None."""
        return self._collector.stopped_at

    @property
    def call_counts(self) -> Counter[str] | None:
        """How often each function was called; None if no value of functions is wanted."""
        return self._watch.counts if self._is_watching else None

    @property
    def _is_watching(self) -> bool:
        return bool(self._wanted or self._before or self._after)

    def _open(self) -> None:
        if self._is_watching:
            self._handles.enter_context(self._watch)

    def enter(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | None:
        """Edit and collect the arguments of a call."""
        self._guard.check()
        wanted, before, after = self._at(name, (index, True))
        is_written = index in self._in_place.get(name, ())
        if not (wanted or before or after or is_written):
            return None
        own = args, dict(kwargs)
        ports = CallPorts(UNNAMED, *self._given(own, is_written))
        _check_shapes(ports, wanted, before, after)
        self._edit(before, ports)
        if wanted:
            self._collector.collect(name, wanted, ports)
        self._edit(after, ports)
        given = self._given(ports.arguments(), is_written)
        if is_written:
            self._writes[name, index] = CallWrites(own, given)
        return given

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Edit and collect the result of a call; returns its replacement, or None."""
        own = self._settled(name, index, result)
        changed = self._left(name, index, (args, dict(kwargs)), result, is_own=own is result)
        if own is None:
            return changed
        final = result if changed is None else changed
        with self._collector.busy():
            return own if final is own else own.copy_(final)

    def _left(self, name: str, index: int, arguments: Arguments, result: Any, *, is_own: bool) -> Any:
        """Edit and collect a result; returns its replacement, or None."""
        wanted, before, after = self._at(name, (index, False))
        if not (wanted or before or after):
            return None
        ports = {"out": result}
        with self._collector.busy():
            if is_own and after:  # what is collected is not what the later edit is written to
                ports["out"] = result.clone()
            if name == ATTENTION:
                needed = {target.port for target in (*wanted, *_targets(before, after))} - {"out"}
                ports |= {port: _ATTENTION_PORTS[port](*arguments[0], **arguments[1]) for port in needed}
        _check_shapes(ports, wanted, before, after)
        return self._changed(name, wanted, before, after, ports, arguments)

    def _given(self, arguments: Arguments, is_written: bool) -> Arguments:
        """Return arguments for a call: copies in a pass with gradients, if it is edited and may write."""
        if not (is_written and torch.is_grad_enabled()):
            return arguments
        with self._collector.busy():
            return copied(arguments)

    def _at(
        self, name: str, key: tuple[int, bool]
    ) -> tuple[Sequence[Target], Sequence[EditTarget], Sequence[EditTarget]]:
        """Return the targets at one side of a call, and the edits before and after them."""
        wanted = self._wanted.get(name, {}).get(key, ())
        before, after = (edits.get(name, {}).get(key, ()) for edits in (self._before, self._after))
        return wanted, before, after

    def _settled(self, name: str, index: int, result: Any) -> torch.Tensor | None:
        """Return the model's own tensor that stands for a result; see `CallWrites.settle`."""
        writes = self._writes.pop((name, index), None)
        if writes is None:
            return None
        writes.close()
        with self._collector.busy():
            return writes.settle(result)

    def _changed(
        self,
        name: str,
        wanted: Sequence[Target],
        before: Sequence[EditTarget],
        after: Sequence[EditTarget],
        ports: dict[str, Any],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> Any:
        """Edit and collect a result, port by port; returns its replacement, or None."""
        is_changed = False
        seen: dict[str, Any] = {}
        for port in RESULT_PORTS:
            if is_changed:
                with self._collector.busy():
                    ports[port] = _recomputed(port, ports, *arguments)
            early, late = _at_port(port, before), _at_port(port, after)
            self._edit(early, ports)
            if port in ports:
                seen[port] = ports[port]
            if port == "out" and wanted:
                self._collector.collect(name, wanted, seen)
            self._edit(late, ports)
            is_changed = is_changed or bool(early or late)
        return ports["out"] if is_changed else None

    def _edit(self, edits: Sequence[EditTarget], ports: dict[str, Any]) -> None:
        """Apply edits in order, each to the value at its port."""
        for entry in edits:
            self._collector.edited.add(entry.target.name)
            with self._collector.busy():
                ports[entry.target.port] = edited_port(entry, ports, self._collector)

    def fail(self, name: str, index: int) -> None:
        """Discard a call that raised."""
        writes = self._writes.pop((name, index), None)
        if writes is not None:
            writes.close()


def _by_name(edits: Sequence[EditTarget]) -> dict[str, EditsByCall]:
    return {name: edits_by_call(entries) for name, entries in edits_by_path(edits).items()}


def _check_shapes(ports: Mapping[str, Any], wanted: Sequence[Target], *edits: Sequence[EditTarget]) -> None:
    """Check that values have their recorded shapes, where a target has one. See Note: [Packed heads].

    Raises:
        CallsDifferError: One has another shape.
    """
    for target in (*wanted, *_targets(*edits)):
        value = None if target.shape is None else pick(ports.get(target.port), target.picks)
        if isinstance(value, torch.Tensor) and not _has_shape(value, target.shape or ()):
            raise CallsDifferError(target.name)


def _has_shape(value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a value has a shape, in which -1 stands for any size."""
    pairs = zip(value.shape, shape, strict=False)
    return value.ndim == len(shape) and all(size in (own, -1) for own, size in pairs)


def _at_port(port: str, edits: Sequence[EditTarget]) -> list[EditTarget]:
    return [entry for entry in edits if entry.target.port == port]


def _recomputed(
    port: str, ports: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the scores or the output of attention, computed from the port before, which was edited."""
    if port == SCORES:
        return softmax_of(ports[LOGITS], ports["out"].dtype)
    return attention_output(ports[SCORES], *args, **kwargs)


def _targets(*edits: Sequence[EditTarget]) -> Iterator[Target]:
    yield from (entry.target for some in edits for entry in some)


def record_functions(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    is_symbolic: bool = True,
) -> dict[str, ModuleRecord]:
    """Run one pass, symbolic ones twice, and return the called functions that returned tensors.

    There is one record per name: its path is the name, its type "function". Records are in the order
    of their first calls. See `record_calls` for the arguments and overwritten values. Calls of
    `scaled_dot_product_attention` have two more outputs, `scores` and `logits`, that are not computed yet.
    """
    watch = WriteWatch() if is_symbolic else None
    known, steps = dict(module.named_modules()), StepCount()
    listener = _RecordingListener(Recorder(watch), steps)
    with ExitStack() as contexts, torch.no_grad():
        if watch is not None:
            contexts.enter_context(watch)
        with FunctionWatch(listener), hooked(known, steps):
            module(*args, **(kwargs or {}))
        if (
            dict(module.named_modules()).keys() - known.keys()
        ):  # created by the first pass, with calls of their own
            return record_functions(module, args, kwargs, is_symbolic=is_symbolic)
        if watch is not None:
            module(*args, **(kwargs or {}))
            listener.recorder.settle_overwrites(watch)
    return {
        name: ModuleRecord(name, "function", calls)
        for name, calls in listener.recorder.calls.items()
        if any(leaf.shape is not None for call in calls for leaf in call.outputs)
    }


def attention_in(functions: Mapping[str, ModuleRecord]) -> dict[str, ModuleRecord]:
    """Return the records of functions that compute attention, and of those that add a sink to it."""
    names = attention_names(functions)
    return {name: record for name, record in functions.items() if name in names}


def attention_names(functions: Mapping[str, ModuleRecord]) -> frozenset[str]:
    """Return the names of functions at which values of attention are."""
    calls = functions[SOFTMAX].calls if SOFTMAX in functions else ()
    joins = {call.sink.logits[0] for call in calls if call.sink is not None and call.sink.logits is not None}
    return ATTENTION_FUNCTIONS | joins


class _RecordingListener:
    def __init__(self, recorder: Recorder, steps: StepCount) -> None:
        self.recorder = recorder
        self._steps = steps
        self._sinks = SinkWatch()

    def enter(self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.recorder.enter(name, CallPorts(UNNAMED, args, kwargs)).after_module = self._steps.step

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        call = self.recorder.leave(name, result)
        self._sinks.see(name, call, CallPorts(UNNAMED, args, kwargs), result, index)
        if name == ATTENTION:
            call.outputs += _attention_leaves(args, kwargs)

    def fail(self, name: str, index: int) -> None:
        self.recorder.leave(name, None)


def _attention_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Leaf]:
    on_meta = [*map(_to_meta, args)], {key: _to_meta(value) for key, value in kwargs.items()}
    for port, compute in _ATTENTION_PORTS.items():
        symbolic = compute(*on_meta[0], **on_meta[1])
        yield Leaf(port, (), "Tensor", tuple(symbolic.shape), symbolic.dtype, is_overwritten=False)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
