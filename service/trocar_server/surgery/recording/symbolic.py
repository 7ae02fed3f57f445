"""Symbolic recording: a recorded pass as a function of the sizes of its inputs.

    symbolic = record_symbolic(meta_model, (torch.empty(8, 3, 224, 224, device="meta"),))
    symbolic.recording([(3, 3, 160, 192)])    # as `record_calls` returns it; None where it is not known

# Note: [Symbolic recording]
A meta pass on fake tensors computes each shape as an expression of the input sizes, and collects the
conditions under which the model's Python code takes this path: `tokens <= 512` of a table of positions,
`height % 7 == 0` of a window. Where they hold, the expressions are exact, floors of convolutions and pools
included, and cost microseconds, where a meta pass of BERT-base takes hundreds of milliseconds. Where they
don't, nothing is predicted. Sizes of 0 and 1 are part of the path, as they broadcast. Torch's
engine for that (`ShapeEnv`, of `torch.export`) is not public: the caller compares a few predictions with
meta passes before it relies on them.

# Note: [Masks without data]
Most models of transformers read their mask: one that masks nothing becomes None, and attention computes
without. On fake tensors they cannot look and keep the mask, as with padding. So the pass on fake tensors
differs from a recorded one in these inputs, which are taken as recorded, and in its peak, which is that of a
padded batch. A model that needs an answer from its data has no symbolic recording.
"""

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
from torch import nn

from trocar_server.late_imports import import_compiler, late_imports
from trocar_server.surgery.recording.liveness import LiveBytes
from trocar_server.surgery.recording.recording import Leaf, ModuleCall, ModuleRecord, Recording, record_calls
from trocar_server.surgery.structure import leaves

_one_at_a_time = Lock()
_PARTS = ("torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.validator", "torch.export._trace")
has_symbolic_parts = Event()
"""Set once `import_symbolic_parts` has returned."""

Shapes = Sequence[Sequence[int]]
"""Shapes of all input tensors: positional arguments, then keyword arguments, lists flattened."""


RecordFunctions = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Mapping[str, ModuleRecord]]
"""Records functions that a pass calls, from the model and its arguments."""


class NotSymbolicError(Exception):
    """A recording cannot be expressed by the sizes of the inputs."""


class SizeTape(LiveBytes):
    """Allocations and work of a pass in order, for sizes that are not numbers yet.

    Attributes:
        changes: Sign and bytes of each change of the live bytes.
        peak: A position on the tape, instead of bytes.
        works: Multiply-adds of each operator that has some.
        work: A position among them, instead of their sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        self.works: list[int] = []

    def _take(self, byte_count: int) -> None:
        self._note(1, byte_count)

    def _give_back(self, byte_count: int) -> None:
        self._note(-1, byte_count)

    def _borrow(self, byte_counts: Sequence[int]) -> None:
        for byte_count in byte_counts:
            self._note(1, byte_count)
            self._note(-1, byte_count)

    def _do(self, work: int) -> None:
        self.works.append(work)
        self.work = len(self.works)

    def _note(self, sign: int, byte_count: int) -> None:
        self.changes.append((sign, byte_count))
        self.peak = len(self.changes)


@dataclass(frozen=True)
class SymbolicRecording:
    """A recorded pass for all input sizes that take the same path through the model.

    Attributes:
        dynamic: Position of each size that may vary, as argument and dimension.
        fixed: Shapes with 0 for the sizes that may vary.
        template: The recording. Its shapes and strides are positions in the list of numbers, its peaks
        and work positions on the tape.
    """

    dynamic: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, ...], ...]
    template: Recording
    _conditions: Callable[..., bool]
    _numbers: Callable[..., tuple[int, ...]]
    _signs: Any
    _changes: Any
    _works: Any

    def recording(self, shapes: Shapes) -> Recording | None:
        """Return the recording for inputs of these shapes; None where the pass may take another path."""
        sizes = self._sizes(shapes)
        if sizes is None or not self._conditions(*sizes):
            return None
        values = _Values(self._numbers(*sizes), self._signs, self._changes, self._works)
        template = self.template
        return replace(
            template,
            modules=PredictedRecords(template.modules, values),
            attention=None if template.attention is None else PredictedRecords(template.attention, values),
            peak_bytes=values.peaks[template.peak_bytes],
            work=values.works[template.work],
            is_predicted=True,
        )

    def holds(self, shapes: Shapes) -> bool:
        """Whether inputs of these shapes take the same path."""
        sizes = self._sizes(shapes)
        return sizes is not None and self._conditions(*sizes)

    def _sizes(self, shapes: Shapes) -> list[int] | None:
        """Return the sizes that may vary; None where others differ."""
        if len(shapes) != len(self.fixed):
            return None
        for shape, fixed in zip(shapes, self.fixed, strict=True):
            if len(shape) != len(fixed) or any(b and a != b for a, b in zip(shape, fixed, strict=True)):
                return None
        sizes = [shapes[argument][dim] for argument, dim in self.dynamic]
        return None if any(size < 2 for size in sizes) else sizes


class _Values:
    """The numbers of one prediction."""

    def __init__(self, numbers: tuple[int, ...], signs: Any, changes: Any, works: Any) -> None:
        self.numbers = numbers
        self._signs, self._changes, self._works = signs, changes, works

    @cached_property
    def peaks(self) -> list[int]:
        """Peak bytes by position on the tape."""
        live = np.cumsum(self._signs * np.array(self.numbers, np.int64)[self._changes])
        return [0, *np.maximum.accumulate(np.maximum(live, 0)).tolist()]

    @cached_property
    def works(self) -> list[int]:
        """Multiply-adds by position on the tape."""
        return list(accumulate((self.numbers[position] for position in self._works), initial=0))


class PredictedRecords(Mapping[str, ModuleRecord]):
    """Records of a prediction, each made when it is looked up.

    Attributes:
        structure: Records with the same paths, calls and order, but no sizes.
    """

    def __init__(self, structure: Mapping[str, ModuleRecord], values: _Values) -> None:
        self.structure = structure
        self._values = values
        self._made: dict[str, ModuleRecord] = {}

    def __getitem__(self, path: str) -> ModuleRecord:
        """Return the record of a path."""
        result = self._made.get(path)
        if result is None:
            record = self.structure[path]
            result = replace(record, calls=[self._call(call) for call in record.calls])
            self._made[path] = result
        return result

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths."""
        return iter(self.structure)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.structure)

    def _call(self, call: ModuleCall) -> ModuleCall:
        return replace(
            call,
            inputs=[self._leaf(leaf) for leaf in call.inputs],
            outputs=[self._leaf(leaf) for leaf in call.outputs],
            peak_bytes_before=self._values.peaks[call.peak_bytes_before],
            peak_bytes=self._values.peaks[call.peak_bytes],
            work_before=self._values.works[call.work_before],
            work=self._values.works[call.work],
        )

    def _leaf(self, leaf: Leaf) -> Leaf:
        if leaf.shape is None:
            return leaf
        number = self._values.numbers.__getitem__
        return replace(leaf, shape=tuple(map(number, leaf.shape)), strides=tuple(map(number, leaf.strides)))


def is_tried(torch_version: str) -> bool:
    """Whether symbolic recordings were tried with a version of torch.

    The parts of torch that they use are not public: torch 2.10 crashed where another thread exported a model.
    """
    return torch_version.split(".")[:2] == ["2", "14"]


def import_symbolic_parts() -> None:
    """Import the parts of torch that a symbolic recording uses.

    With sympy and torch's compiler that takes 2.7 s: not for the thread that owns the device.
    """
    if is_tried(torch.__version__):
        with late_imports:
            import_compiler()
            for name in _PARTS:
                importlib.import_module(name)
    has_symbolic_parts.set()


def record_symbolic(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    on_data: Recording | None = None,
    record_attention: RecordFunctions | None = None,
) -> SymbolicRecording:
    """Run a pass without data on symbolic sizes.

    Args:
        module: The model on the meta device, with `on_data` on its own; its parameters and buffers are
            replaced.
        args: Positional inputs on the same device: their shapes choose the path.
        kwargs: Keyword inputs.
        on_data: A recorded pass on data of these shapes, for a model that reads its data.
            See Note: [Masks without data].
        record_attention: Records the functions of another pass that compute attention, if wanted.

    Raises:
        NotSymbolicError: Sizes depend on more than those of the inputs; or this torch was not tried.
        Exception: An error of the model or of torch.
    """
    if not is_tried(torch.__version__):
        raise NotSymbolicError(f"symbolic recordings were not tried with torch {torch.__version__}")
    # Imported here, see `import_symbolic_parts`.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    _make_fake(module, mode)
    made = [_symbolic(value, mode) for value in (*args, *(kwargs or {}).values())]
    called = made[: len(args)], dict(zip(kwargs or {}, made[len(args) :], strict=True))
    tape = SizeTape()
    with ExitStack() as contexts:
        contexts.enter_context(_one_at_a_time)  # of several servers in a process
        contexts.enter_context(_quiet())
        contexts.enter_context(mode)
        recording = record_calls(module, *called, is_symbolic=on_data is None, live=tape)
        if record_attention is not None:
            recording = replace(recording, attention=record_attention(module, *called))
    if on_data is not None:
        recording = _with_inputs_of(recording, on_data)
    tensors = [leaf for value in made for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return _Expressions(env, tensors).recording(recording, tape)


def _with_inputs_of(outcome: Recording, recorded: Recording) -> Recording:
    """Return a recording with the inputs that are no tensors in a recorded pass as they are there.

    Raises:
        NotSymbolicError: The passes have other modules, calls or inputs.
    """

    def call_of(call: ModuleCall, known: ModuleCall) -> ModuleCall:
        pairs = zip(call.inputs, known.inputs, strict=True)
        return replace(call, inputs=[other if other.shape is None else leaf for leaf, other in pairs])

    def record_of(record: ModuleRecord, known: ModuleRecord) -> ModuleRecord:
        calls = zip(record.calls, known.calls, strict=True)
        return replace(record, calls=[call_of(*pair) for pair in calls])

    def records_of(
        some: Mapping[str, ModuleRecord], known: Mapping[str, ModuleRecord]
    ) -> dict[str, ModuleRecord]:
        return {path: record_of(record, known[path]) for path, record in some.items()}

    try:
        modules = records_of(outcome.modules, recorded.modules)
        attention = outcome.attention and records_of(outcome.attention, recorded.attention or {})
        return replace(outcome, modules=modules, attention=attention)
    except (KeyError, ValueError):
        raise NotSymbolicError("a pass on data calls other modules, or with other inputs") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the operators that have no symbolic sizes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class _Expressions:
    """The distinct expressions of a pass, by position in the list of numbers."""

    def __init__(self, env: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._env = env
        self._shapes: list[tuple[Any, ...]] = [tuple(tensor.shape) for tensor in tensors]
        self._positions: dict[Any, int] = {}
        self._symbols = {
            size.node._expr: (argument, dim)
            for argument, shape in enumerate(self._shapes)
            for dim, size in enumerate(shape)
            if isinstance(size, torch.SymInt)
        }

    def recording(self, recording: Recording, tape: SizeTape) -> SymbolicRecording:
        attention = None if recording.attention is None else self._records(recording.attention)
        template = replace(recording, modules=self._records(recording.modules), attention=attention)
        changes = np.array([self._position(size) for _, size in tape.changes], np.int64)
        works = [self._position(work) for work in tape.works]
        return SymbolicRecording(
            tuple(self._symbols.values()),
            tuple(tuple(0 if isinstance(s, torch.SymInt) else s for s in shape) for shape in self._shapes),
            template,
            self._compiled(f"bool({' and '.join(self._conditions()) or 'True'})"),
            self._compiled("(" + "".join(f"{self._text(e)}, " for e in self._positions) + ")"),
            np.array([sign for sign, _ in tape.changes], np.int64),
            changes,
            works,
        )

    def _conditions(self) -> list[str]:
        """Return the conditions of the path, as Python expressions of the symbols."""
        import sympy  # type: ignore[import-untyped]  # ships none

        equal = [sympy.Eq(symbol, value, evaluate=False) for symbol, value in self._env.replacements.items()]
        texts = [self._text(expression) for expression in (*(g.expr for g in self._env.guards), *equal)]
        for symbol in self._symbols:
            bounds = self._env.var_to_range.get(symbol)
            if bounds is not None:
                texts += [f"{bounds.lower} <= {symbol}"] if bounds.lower.is_Integer else []
                texts += [f"{symbol} <= {bounds.upper}"] if bounds.upper.is_Integer else []
        return [f"({text})" for text in dict.fromkeys(texts)]

    def _compiled(self, text: str) -> Callable[..., Any]:
        names = ", ".join(str(symbol) for symbol in self._symbols)
        # The text is torch's, of expressions that it printed.
        function: Callable[..., Any] = eval(f"lambda {names}: {text}", {"math": math})
        return function

    def _text(self, expression: Any) -> str:
        from torch.utils._sympy.printers import PythonPrinter

        unknown: set[Any] = getattr(expression, "free_symbols", set()) - self._symbols.keys()
        if unknown:
            raise NotSymbolicError(f"{unknown} depend on no input")
        return str(PythonPrinter().doprint(expression))

    def _position(self, size: Any) -> int:
        """Return the position of a size in the list of numbers."""
        expression = size.node._expr if isinstance(size, torch.SymInt) else int(size)
        return self._positions.setdefault(expression, len(self._positions))

    def _records(self, records: Mapping[str, ModuleRecord]) -> dict[str, ModuleRecord]:
        return {
            path: replace(record, calls=[self._call(call) for call in record.calls])
            for path, record in records.items()
        }

    def _call(self, call: ModuleCall) -> ModuleCall:
        inputs, outputs = ([self._leaf(leaf) for leaf in result] for result in (call.inputs, call.outputs))
        return replace(call, inputs=inputs, outputs=outputs)

    def _leaf(self, leaf: Leaf) -> Leaf:
        if leaf.shape is None:
            return replace(leaf, type_name="int") if leaf.type_name == "SymInt" else leaf
        shape, strides = (tuple(map(self._position, sizes)) for sizes in (leaf.shape, leaf.strides))
        return replace(leaf, shape=shape, strides=strides)


def _symbolic(value: Any, mode: Any) -> Any:
    """Return a fake tensor whose sizes are symbols, other than 0 and 1."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if isinstance(value, (list, tuple)):
        return [_symbolic(item, mode) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in value.shape]
    return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _make_fake(module: nn.Module, mode: Any) -> None:
    """Replace parameters and buffers by fake ones; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        own: tuple[Any, ...] = (part._parameters, part._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = mode.from_tensor(tensor, static_shapes=True)
                    tensors[name] = made[id(tensor)]
