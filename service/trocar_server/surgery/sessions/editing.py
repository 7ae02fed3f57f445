"""Edit session: declared edits of values, applied with forward hooks.

    with EditSession(model, [EditTarget(target, Edit(Scale(0.5)))]):
        model(batch)

An edit never writes to its input: it makes a new tensor, which replaces the module's input or output, or a
parameter for as long as the session is open.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import nn

from trocar_server.surgery.parameter_swaps import ParameterSwaps
from trocar_server.surgery.ports import Arguments, CallPorts, Parameters, parameters_of
from trocar_server.surgery.sessions.hooks import Session, hook_calls
from trocar_server.surgery.sessions.reruns import call_again
from trocar_server.surgery.sessions.taps import CallsDifferError, Collector, Target, ValueMissingError
from trocar_server.surgery.structure import Picks, pick, put
from trocar_server.tensors.edits import Edit, Skip, edit_value


@dataclass(frozen=True)
class CallInput:
    """An input of the same call, which an edit of its output needs.

    Attributes:
        port: `in` or `in(name)`.
        picks: Path into its value.
        clone: Whether the module writes to it, so that it has to be copied before the call.
    """

    port: str
    picks: Picks
    clone: bool = True


@dataclass(frozen=True)
class GateValue:
    """The value that the gate of an edit reads, and the dimensions of both values.

    Attributes:
        key: Its key in the session's mapping; empty for the edited value itself.
        samples: The dimension of its samples.
        tokens: The dimension of its tokens.
        edited_samples: The dimension of the samples of the edited value.
        edited_tokens: The dimension of its tokens.
    """

    key: str
    samples: int
    tokens: int
    edited_samples: int
    edited_tokens: int

    def broadcast(self, is_open: torch.Tensor, rank: int) -> torch.Tensor:
        """Return (samples, tokens) as it is broadcast to the edited value."""
        sizes = [1] * rank
        sizes[self.edited_samples], sizes[self.edited_tokens] = is_open.shape
        in_order = is_open if self.edited_samples < self.edited_tokens else is_open.T
        return in_order.reshape(sizes)


@dataclass(frozen=True)
class EditTarget:
    """An edit of one value, with its operands.

    Attributes:
        target: Which value, parameter or gradient.
        edit: The edit.
        operands: Its tensors from the request.
        call_input: The input that `add_input` adds and `skip` returns.
        found: Key of the replacement of `swap`, in the session's mapping.
        position: Its place in the request's list of edits.
        is_in_place: Whether its call may write to an input. See `call_writes`.
        gate: The value that its gate reads; None without a gate.
    """

    target: Target
    edit: Edit
    operands: tuple[torch.Tensor, ...] = field(default=(), compare=False)
    call_input: CallInput | None = None
    found: str = ""
    position: int = 0
    is_in_place: bool = False
    gate: GateValue | None = None


EditsByCall = dict[tuple[int, bool], list[EditTarget]]


class EditSession(Session):
    """Changes values of a model while the context is open: with hooks, and parameters in the modules' tables.

    Edits of one value run in the order of the list. Hooks run in the order in which they are registered: a
    session that is entered before a `TapSession` makes its taps see the changed values.

    Args:
        model: A replica, leased by the caller.
        edits: The edits.
        found: Values for swaps by key; filled from outside while the pass runs.
        collector: Of the taps of the same pass: marked busy during function calls that edits make.
    """

    def __init__(
        self,
        model: nn.Module,
        edits: Sequence[EditTarget],
        found: Mapping[str, torch.Tensor] | None = None,
        collector: Collector | None = None,
    ) -> None:
        self._model = model
        self._of_parameters = [entry for entry in edits if entry.target.parameter is not None]
        self._of_calls = edits_by_path([entry for entry in edits if entry.target.parameter is None])
        self._found = {} if found is None else found
        self._collector = collector or Collector()

    def _open(self) -> None:
        swaps = ParameterSwaps(self._model, self._handles)
        for entry in self._of_parameters:
            self._edit_parameter(swaps, entry)
        for path, entries in self._of_calls.items():
            self._register(path, entries)

    def _edit_parameter(self, swaps: ParameterSwaps, entry: EditTarget) -> None:
        path, name = entry.target.path, entry.target.parameter or ""
        try:
            value = swaps.current(path, name)
        except KeyError:
            raise ValueMissingError(entry.target.name) from None
        swaps.replace(path, name, edit_value(entry.edit, value, entry.operands))

    def _register(self, path: str, entries: Sequence[EditTarget]) -> None:
        """Register the edits at the selected calls of a module."""
        module = self._model.get_submodule(path)
        skips = {entry.target.call: entry for entry in entries if isinstance(entry.edit.operation, Skip)}
        of_calls = edits_by_call([entry for entry in entries if not isinstance(entry.edit.operation, Skip)])
        kept: dict[int, Inputs] = {}
        parameters = parameters_of(module)
        forward = _Skippable(module, parameters, self._kept, self._handles) if skips else None

        def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            ports = CallPorts(parameters, args, kwargs)
            wanted = of_calls.get((index, True), [])
            for entry in wanted:
                ports[entry.target.port] = self._edited(entry, ports, {})
            later = of_calls.get((index, False), ())
            kept[index] = {
                entry.call_input: self._kept(entry.call_input, ports) for entry in later if entry.call_input
            }
            if forward is not None and index in skips:
                forward.instead = skips[index].call_input
                self._collector.edited.add(skips[index].target.name)
            return ports.arguments() if wanted else None

        def leave(index: int, output: Any) -> Any:
            inputs, wanted = kept.pop(index, {}), of_calls.get((index, False), [])
            for entry in wanted:
                output = self._edited(entry, {"out": output}, inputs)
            return output if wanted else None

        hook_calls(module, self._handles, enter, leave, partial(call_again, path))

    def _edited(self, entry: EditTarget, ports: Mapping[str, Any], inputs: "Inputs") -> Any:
        """Return a port's value with one edit applied."""
        self._collector.edited.add(entry.target.name)
        other = inputs[entry.call_input] if entry.call_input else None
        if entry.found:
            if entry.found not in self._found:
                raise ValueMissingError(entry.found)
            other = self._found[entry.found]
        with self._collector.busy():
            return edited_port(entry, ports, self._collector, other, partial(self._is_open, entry))

    def _is_open(self, entry: EditTarget, value: torch.Tensor) -> torch.Tensor | None:
        """Return where the gate of an edit is open, broadcast to its value; None without a gate."""
        gate, condition = entry.gate, entry.edit.gate
        if gate is None or condition is None:
            return None
        if gate.key and gate.key not in self._found:
            raise ValueMissingError(gate.key)
        read = self._found[gate.key] if gate.key else value
        is_open = condition.is_open(read.movedim((gate.samples, gate.tokens), (0, 1)), entry.operands[-2:])
        self._collector.opened[entry.position] = is_open
        return gate.broadcast(is_open, value.ndim)

    def _kept(self, call_input: CallInput, ports: Mapping[str, Any]) -> torch.Tensor:
        try:
            value: torch.Tensor = pick(ports[call_input.port], call_input.picks)
        except KeyError:
            raise ValueMissingError(call_input.port) from None
        with self._collector.busy():
            return value.clone() if call_input.clone else value


IsOpen: TypeAlias = Callable[[torch.Tensor], torch.Tensor | None]
"""Where the gate of an edit of a value is open, broadcast to it; None without a gate."""


def _always_open(_: torch.Tensor) -> None:
    """Return no condition."""


def edited_port(
    entry: EditTarget,
    ports: Mapping[str, Any],
    collector: Collector,
    other: torch.Tensor | None = None,
    gate: IsOpen = _always_open,
) -> Any:
    """Return the value at an edit's port, with the edit applied, and note the value's shape.

    Raises:
        ValueMissingError: The call has no such tensor.
        CallsDifferError: It cannot be seen in the shape that the target asks for.
    """
    target = entry.target
    try:
        whole = ports[target.port]
        value = pick(whole, target.picks)
    except KeyError:
        raise ValueMissingError(target.name) from None
    if not isinstance(value, torch.Tensor):
        raise ValueMissingError(target.name)
    collector.edited_shapes[target.name] = tuple(value.shape)
    if target.columns is None:
        return put(whole, target.picks, _edited_part(entry, value, other, gate))
    edited, part = value.clone(), (..., slice(*target.columns))
    edited[part] = _edited_part(entry, value[part], other, gate)
    return put(whole, target.picks, edited)


def _edited_part(
    entry: EditTarget, value: torch.Tensor, other: torch.Tensor | None, gate: IsOpen
) -> torch.Tensor:
    """Return an edited value; the edit sees it in the shape of `Target.view`. See Note: [Packed heads]."""
    view = entry.target.view
    with _without_autocast(value.device):
        if not view:
            return edit_value(entry.edit, value, entry.operands, other, gate(value))
        if math.prod(value.shape[:-1]) != math.prod(view[:-1]):
            raise CallsDifferError(entry.target.name)
        seen = value.reshape(view)
        return edit_value(entry.edit, seen, entry.operands, other, gate(seen)).reshape(value.shape)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations choose their own precision, as in a pass without autocast."""
    is_on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


Inputs = dict[CallInput, torch.Tensor]


class _Skippable:
    """Makes the next call of a module return one of its inputs without running.

    Args:
        module: The module; its `forward` is replaced until `undo` is closed.
        parameters: Those of its `forward`.
        take: Copies an input of the call, by port, after other hooks have changed it.
        undo: Restores the module's forward.

    Attributes:
        instead: The input that the next call returns; None to run it.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Parameters,
        take: Callable[[CallInput, Mapping[str, Any]], torch.Tensor],
        undo: ExitStack,
    ) -> None:
        self.instead: CallInput | None = None
        self._parameters = parameters
        self._take = take
        self._forward = module.forward
        own, key = vars(module), "forward"
        before = [own[key]] if key in own else []
        own[key] = self._wrapped()
        undo.callback(lambda: own.update({key: before[0]}) if before else own.pop(key))

    def _wrapped(self) -> Callable[..., Any]:
        @wraps(self._forward)  # its signature names the inputs
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.instead is None:
                return self._forward(*args, **kwargs)
            chosen, self.instead = self.instead, None
            return self._take(chosen, CallPorts(self._parameters, args, kwargs))

        return forward


def edits_by_path(edits: Sequence[EditTarget]) -> dict[str, list[EditTarget]]:
    """Group edits by path, each group in request order."""
    result: dict[str, list[EditTarget]] = {}
    for entry in edits:
        result.setdefault(entry.target.path, []).append(entry)
    return result


def in_place_calls(edits: Iterable[EditTarget]) -> dict[str, set[int]]:
    """Return the edited calls that may write to their inputs, by path."""
    result: dict[str, set[int]] = {}
    for entry in edits:
        if entry.is_in_place:
            result.setdefault(entry.target.path, set()).add(entry.target.call)
    return result


def edits_by_call(edits: Sequence[EditTarget]) -> EditsByCall:
    """Group edits by call index and whether they apply before the call, each group in request order."""
    of_calls: EditsByCall = {}
    for entry in edits:
        key = entry.target.call, entry.target.port.startswith("in")
        of_calls.setdefault(key, []).append(entry)
    return of_calls
