"""Tap session: values of a pass, collected with forward hooks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from trocar_server.surgery.axes.layout import Layout
from trocar_server.surgery.ports import CallPorts, parameters_of
from trocar_server.surgery.recording.recording import own_tensors
from trocar_server.surgery.selectors.naming import split_port
from trocar_server.surgery.sessions.hooks import Session, hook_calls
from trocar_server.surgery.structure import Picks, pick


@dataclass(frozen=True)
class Target:
    """One value to collect: exactly one tensor of one call of one module, graph node or function.

    Attributes:
        name: Its canonical selector.
        path: Module path, empty for the model itself; the name of a node or function.
        call: Call index, from 0; 0 for a parameter.
        port: `out`, `in`, `in(name)`, `param(name)` or `scores`.
        picks: Path into the port's value. See Note: [Names of inputs] for that of `in`.
        clone: Whether to copy the value when it is collected. See Note: [Clone before in-place].
        kind: Kind of the path: `module`, `fx` or `fn`.
        is_gradient: Whether the target is the gradient with respect to that value.
        shape: The recorded shape, if a pass may have another one, which is an error; -1 for any size of a
            dimension, None to take any.
        view: The shape that the collected value gets; its own when empty. See Note: [Packed heads].
        columns: Start and stop of its part of the value's last dimension; None for all of it. See `sinks`.
        layout: What its dimensions mean; None where that is not known.
    """

    name: str
    path: str
    call: int
    port: str = "out"
    picks: Picks = ()
    clone: bool = True
    kind: str = "module"
    is_gradient: bool = False
    shape: tuple[int, ...] | None = None
    view: tuple[int, ...] = ()
    columns: tuple[int | None, int | None] | None = None
    layout: Layout | None = field(default=None, repr=False, compare=False)

    @property
    def parameter(self) -> str | None:
        """The name of the module's own parameter or buffer; None for a value of a call."""
        word, name = split_port(self.port)
        return name if word == "param" else None


TargetsByCall = dict[tuple[int, bool], list[Target]]
"""Targets of one module, node or function by call index and whether they are collected before the call."""


class ValueMissingError(KeyError):
    """A called module has no input or output element that a target names; the argument is that name."""


class CallsDifferError(Exception):
    """A pass has not the recorded calls of a module or function, or one of them other sizes: its selector."""


class StopForward(BaseException):
    """All targets are collected. Not an `Exception`: a model's own `except` must not catch it."""


@dataclass
class Collector:
    """The collected values of all sessions of one pass; ends the pass after the last one.

        collector = Collector()
        with TapSession(model, taps, collector), FunctionSession(functions, collector):
            model(batch)
        collector.values

    Attributes:
        values: Collected values by the name of their target.
        stopped_at: Path of the module, node or function at which the pass ended, or None.
        ends_pass: Whether the pass ends with the last value.
        edited: The names of the values that were edited, gradients among them.
        opened: For each edit with a gate, by its position in the request: where the gate is open, (samples,
            tokens).
        edited_shapes: The shapes of the values that were edited in the forward pass, by name.
        is_busy: Whether a value is being copied or edited: function calls for that are not the model's.
        pending: Number of collections that must happen before the pass may end.
        beside: Another collector of the same pass, marked busy in place of this one; None for none.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    stopped_at: str | None = None
    ends_pass: bool = True
    edited: set[str] = field(default_factory=set)
    opened: dict[int, torch.Tensor] = field(default_factory=dict)
    edited_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_busy: bool = False
    pending: int = 0
    beside: "Collector | None" = None

    def collect(self, path: str, targets: Sequence[Target], ports: Mapping[str, Any]) -> None:
        """Collect the values of one call, before or after it.

        Raises:
            ValueMissingError: A port lacks the element that its target names.
            StopForward: This was the last one.
        """
        for target in targets:
            try:
                value = ports[target.port]
                value = pick(value, target.picks) if target.picks else value
            except KeyError:
                raise ValueMissingError(target.name) from None
            if not isinstance(value, torch.Tensor):
                return  # data-dependent control flow; the value is reported as missing
            if target.columns is not None:
                value = value[..., slice(*target.columns)]
            value = self._copy(value) if target.clone else value
            self.values[target.name] = value.reshape(target.view) if target.view else value
        self.pending -= 1
        if not self.pending and self.ends_pass:
            self.stopped_at = path
            raise StopForward

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        with self.busy():
            return value.clone()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark function calls inside the context as not the model's."""
        marked = self.beside or self
        before, marked.is_busy = marked.is_busy, True
        try:
            yield
        finally:
            marked.is_busy = before


@dataclass(frozen=True)
class TapGroups:
    """Targets of a pass as a session registers them; equal passes share them.

    Attributes:
        parameters: Those that are collected when the session opens.
        by_path: The others, by module.
        count: Number of their collections.
        entered: The modules of which inputs are collected.
    """

    parameters: tuple[Target, ...]
    by_path: Mapping[str, TargetsByCall]
    count: int
    entered: frozenset[str]

    @classmethod
    def of(cls, targets: Sequence[Target]) -> "TapGroups":
        """Group targets."""
        parameters = tuple(target for target in targets if target.parameter is not None)
        by_path = by_call([target for target in targets if target.parameter is None])
        entered = {path for path, of_calls in by_path.items() if any(is_before for _, is_before in of_calls)}
        return cls(parameters, by_path, sum(map(len, by_path.values())), frozenset(entered))


class TapSession(Session):
    """Collects values from a model for as long as the context is open.

        with TapSession(model, targets) as session:
            model(batch)
        session.values[target.name]

    Either every tap is registered or none is: a bad path leaves the model as it was. The pass ends,
    without an error, after the last executed call that is needed; `stopped_at` then names it.
    A value that the model later overwrites is cloned in the hook when its target says so.

    Parameters and buffers are collected when the context opens, as they are before the pass. They need
    no hook and do not prolong the pass. If all targets are parameters, `needs_pass` is False.

    Not thread-safe: hooks are state of the module, so the caller holds the replica's lease for as
    long as the session is open.

    Args:
        model: The model.
        targets: The values to collect, grouped where several passes have the same ones.
        collector: Shared with the other sessions of the pass, or None for one of its own.
    """

    _ends_with = (StopForward,)

    def __init__(
        self, model: nn.Module, targets: Sequence[Target] | TapGroups, collector: Collector | None = None
    ) -> None:
        self._groups = targets if isinstance(targets, TapGroups) else TapGroups.of(targets)
        self._model = model
        self._collector = collector or Collector()
        self._collector.pending += self._groups.count

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Collected values by the name of their target."""
        return self._collector.values

    @property
    def stopped_at(self) -> str | None:
        """Where the pass ended because everything was collected, or None."""
        return self._collector.stopped_at

    @property
    def needs_pass(self) -> bool:
        """Whether anything is still to be collected from a pass."""
        return self._collector.pending > 0

    def _open(self) -> None:
        if self._groups.parameters:
            self._collector.values.update(parameter_values(self._model, self._groups.parameters))
        for path, of_calls in self._groups.by_path.items():
            module = self._model.get_submodule(path)
            enter = partial(self._enter, module, path, of_calls) if path in self._groups.entered else None
            leave = partial(self._leave, path, of_calls)
            hook_calls(module, self._handles, enter, leave)

    def _enter(
        self,
        module: nn.Module,
        path: str,
        of_calls: TargetsByCall,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        wanted = of_calls.get((index, True))
        if wanted:
            self._collector.collect(path, wanted, CallPorts(parameters_of(module), args, kwargs))

    def _leave(self, path: str, of_calls: TargetsByCall, index: int, output: Any) -> None:
        wanted = of_calls.get((index, False))
        if wanted:
            self._collector.collect(path, wanted, {"out": output})


def by_call(targets: Sequence[Target]) -> dict[str, TargetsByCall]:
    """Group targets by path, then by when they are collected."""
    wanted: dict[str, TargetsByCall] = {}
    for target in targets:
        of_calls = wanted.setdefault(target.path, {})
        of_calls.setdefault((target.call, target.port.startswith("in")), []).append(target)
    return wanted


def parameter_values(model: nn.Module, targets: Sequence[Target]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that targets name, by target name, as they are now.

    Those that a pass writes to are cloned, by their targets' `clone`; the others share the model's storage.

    Raises:
        ValueMissingError: A module has no such parameter: its replica differs from the recording.
    """
    values = {}
    for target in targets:
        value = own_tensors(model.get_submodule(target.path)).get(target.parameter or "")
        if value is None:
            raise ValueMissingError(target.name)
        values[target.name] = value.detach().clone() if target.clone else value.detach()
    return values
