"""Values of the functions of torch that a model calls: recorded, or collected from a pass.

    records = record_functions(meta_replica, [torch.empty(8, 3, 224, 224, device="meta")])
    target = Target("mine", "scaled_dot_product_attention", call=3, port="scores", kind="fn")
    with FunctionSession([target]) as session:
        model(batch)
    session.values["mine"]  # (batch, heads, queries, keys)

Functions have the names that `calls.function_name` gives them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from trocar_server.surgery.attention import ATTENTION, attention_output, attention_scores
from trocar_server.surgery.calls import FunctionWatch
from trocar_server.surgery.editing import (
    EditMoments,
    EditTarget,
    edited_port,
    edits_by_moment,
    edits_by_path,
)
from trocar_server.surgery.guard import PassGuard
from trocar_server.surgery.hooks import Arguments, in_ports, with_ports
from trocar_server.surgery.recording import Leaf, ModuleRecord, Recorder
from trocar_server.surgery.taps import Collector, StopForward, Target, by_moment
from trocar_server.surgery.writes import WriteWatch

SCORES = "scores"
"""The port of an attention function at which its scores are."""


class FunctionSession:
    """Collects and changes values of the functions that are called for as long as the context is open.

    Ports are those of modules, and `scores` of `scaled_dot_product_attention`: see
    `attention_scores`. The pass ends, without an error, after the last call that is needed.

    Inside the context `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` do not take their
    fused kernels, so other values of the pass may differ in the last digits. Without targets the
    context does nothing.

    Args:
        targets: What to collect; `path` is a function's name.
        collector: Shared with the other sessions of the pass, or None for one of its own. A
            `TapSession` beside it must share it, or its copies would count as calls of `clone`.
        guard: Asked at each call whether to go on; a guard that watches the model asks at its
            modules only.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        collector: Collector | None = None,
        guard: PassGuard | None = None,
        before: Sequence[EditTarget] = (),
        after: Sequence[EditTarget] = (),
    ) -> None:
        self._wanted = by_moment(targets)
        self._before = _by_name(before)
        self._after = _by_name(after)
        self._collector = collector or Collector()
        self._collector.expect(self._wanted)
        self._guard = guard or PassGuard()
        self._context = ExitStack()

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Collected values by the name of their target."""
        return self._collector.values

    @property
    def stopped_at(self) -> str | None:
        """Where the pass ended because everything was collected, or None."""
        return self._collector.stopped_at

    def __enter__(self) -> Self:
        if self._wanted or self._before or self._after:
            self._context.enter_context(FunctionWatch(self, lambda: self._collector.is_busy))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._context.close()
        return isinstance(error, StopForward)

    def enter(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | None:
        """Edit and collect what a call takes."""
        self._guard.check()
        key = index, True
        wanted = self._wanted.get(name, {}).get(key)
        before, after = (edits.get(name, {}).get(key, []) for edits in (self._before, self._after))
        if not (wanted or before or after):
            return None
        ports = in_ports(args, kwargs)
        self._edit(before, ports)
        if wanted:
            self._collector.collect(name, wanted, ports)
        self._edit(after, ports)
        return with_ports(ports)

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Edit and collect what a call returned; returns what takes its place, or None."""
        key = index, False
        wanted = self._wanted.get(name, {}).get(key)
        before, after = (edits.get(name, {}).get(key, []) for edits in (self._before, self._after))
        if not (wanted or before or after):
            return None
        ports = {"out": result}
        if name == ATTENTION and any(t.port == SCORES for t in (*(wanted or ()), *_targets(before, after))):
            ports[SCORES] = attention_scores(*args, **kwargs)
        self._edit(before, ports, lambda scores: attention_output(scores, *args, **kwargs))
        if wanted:
            self._collector.collect(name, wanted, ports)
        self._edit(after, ports, lambda scores: attention_output(scores, *args, **kwargs))
        return ports["out"] if before or after else None

    def _edit(
        self,
        edits: Sequence[EditTarget],
        ports: dict[str, Any],
        from_scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Make edits in their order; what changes scores changes the output that they lead to."""
        for entry in edits:
            with self._collector.busy():
                ports[entry.target.port] = edited_port(entry, ports)
                if entry.target.port == SCORES and from_scores is not None:
                    ports["out"] = from_scores(ports[SCORES])

    def fail(self, name: str, index: int) -> None:
        """Nothing comes of a call that raised."""


def _by_name(edits: Sequence[EditTarget]) -> dict[str, EditMoments]:
    return {name: edits_by_moment(entries) for name, entries in edits_by_path(edits).items()}


def _targets(*edits: Sequence[EditTarget]) -> Iterator[Target]:
    yield from (entry.target for some in edits for entry in some)


def record_functions(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    is_symbolic: bool = True,
) -> dict[str, ModuleRecord]:
    """Run one pass, symbolic ones twice, and return the functions that it called and that gave tensors.

    Each record stands for one name: its path is the name, its type "function". They come in the
    order of their first calls. See `record_calls` for the arguments and what is overwritten. Calls of
    `scaled_dot_product_attention` have an output more, at port `scores`, that nobody has computed yet.
    """
    watch = WriteWatch() if is_symbolic else None
    listener = _RecordingListener(Recorder(watch))
    known = set(dict(module.named_modules()))
    with ExitStack() as contexts, torch.no_grad():
        if watch is not None:
            contexts.enter_context(watch)
        with FunctionWatch(listener):
            module(*args, **(kwargs or {}))
        if dict(module.named_modules()).keys() - known:  # made by the first pass, with calls of their own
            return record_functions(module, args, kwargs, is_symbolic=is_symbolic)
        if watch is not None:
            module(*args, **(kwargs or {}))
            listener.recorder.settle_overwrites(watch)
    return {
        name: ModuleRecord(name, "function", calls)
        for name, calls in listener.recorder.calls.items()
        if any(leaf.shape is not None for call in calls for leaf in call.outputs)
    }


class _RecordingListener:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def enter(self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.recorder.enter(name, args, kwargs)

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        call = self.recorder.leave(name, result)
        if name == ATTENTION:
            call.outputs.append(_scores_leaf(args, kwargs))

    def fail(self, name: str, index: int) -> None:
        self.recorder.leave(name, None)


def _scores_leaf(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Leaf:
    symbolic = attention_scores(*map(_to_meta, args), **{key: _to_meta(kwargs[key]) for key in kwargs})
    return Leaf(SCORES, (), "Tensor", tuple(symbolic.shape), symbolic.dtype, is_overwritten=False)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
