"""Writes of a call to its arguments, where there is an edit: `x.add_(y)` or `self.relu(x)` as a statement.

An edit makes another tensor. What the call then writes to it is copied to the model's own tensor, with which
the model goes on.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trocar_server.surgery.ports import Arguments
from trocar_server.surgery.recording.writes import WriteWatch
from trocar_server.surgery.sessions.hooks import hook_calls
from trocar_server.surgery.sessions.reruns import call_again
from trocar_server.surgery.sessions.starting import laid_out
from trocar_server.surgery.sessions.taps import Collector
from trocar_server.surgery.structure import Picks, leaves, pick, put
from trocar_server.tensors.bits import same_bits


class CallWrites:
    """Watches one call of a function from its making to `close`.

    Without copies, which modules get: functions return views of arguments, too, not to be views of a copy.

    Args:
        own: The model's arguments.
        given: The same with edits applied: those with which the function is called.
    """

    def __init__(self, own: Arguments, given: Arguments) -> None:
        self._pairs = list(zip(_tensors(own), _tensors(given), strict=True))
        self._watch = WriteWatch()
        self._open = ExitStack()
        self._open.enter_context(self._watch)

    def close(self) -> None:
        """Stop watching."""
        self._open.close()

    def settle(self, result: Any) -> torch.Tensor | None:
        """Copy what the call wrote to the model's own tensors.

        Returns:
            The model's own tensor where the result is an argument that the call wrote to: the final result is
            to be copied to it, and returned as that. None for any other result.
        """
        outcome = None
        for own, given in self._pairs:
            if not self._watch.last_write(given):
                continue
            if result is given:
                outcome = own
            elif own is not given:
                own.copy_(given)
        return outcome


def copied(arguments: Arguments) -> Arguments:
    """Return the arguments with copies of their tensors, one for each.

    Autograd may save what an edit takes and returns; a call writes to what it gets, and to the model's own.
    """
    made: dict[int, torch.Tensor] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = _copy(value)
        return made[id(value)]

    positional, keyword = arguments
    return tuple(map(of, positional)), {name: of(value) for name, value in keyword.items()}


def _tensors(arguments: Arguments) -> Iterator[torch.Tensor]:
    return (value for _, value in leaves(arguments) if isinstance(value, torch.Tensor))


@dataclass
class _Given:
    """A copy of an input, with which a module is called.

    Attributes:
        own: The model's own tensor.
        value: The same, or what an edit put in its place.
        copy: A copy of the value.
        version: The copy's version before the call.
        places: Where the module returns the copy.
    """

    own: torch.Tensor
    value: torch.Tensor
    copy: torch.Tensor
    version: int
    places: tuple[Picks, ...] = ()

    def is_written(self) -> bool:
        """Whether the call has written to the copy: through `.data`, no version tells."""
        return self.copy._version != self.version or not _are_same_bits(self.copy, self.value)

    def settled(self, output: Any) -> Any:
        """Copy the final value to the model's own tensor; returns the output with that in its place."""
        value = pick(output, self.places[0]) if self.places else self.copy
        self.own.copy_(value)
        for picks in self.places:
            output = put(output, picks, self.own)
        return output


class ModuleWrites:
    """Carries what edited calls of modules wrote to their inputs over to the model's own tensors.

        writes.open_first(handles)
        ...                          # sessions that edit and collect
        writes.open_last(handles)

    The modules are called with copies. Where one wrote to its copy and returned it, the final output is
    copied to the model's own tensor, and returned as that; otherwise the copy is. So nothing that a session
    collected, or that autograd saved of the call, is written to by an edit. Copies have versions also in
    inference mode, where other tensors have none (torch 2.14).

    Args:
        model: A replica, leased by the caller.
        calls: The edited calls that may write to their inputs, by module.
        collector: Of the same pass: marked busy during function calls that are not the model's.
    """

    def __init__(self, model: nn.Module, calls: Mapping[str, Set[int]], collector: Collector) -> None:
        self._modules = {path: model.get_submodule(path) for path in calls}
        self._calls = calls
        self._collector = collector
        self._own: dict[tuple[str, int], Arguments] = {}
        self._given: dict[tuple[str, int], list[_Given]] = {}

    def open_first(self, handles: ExitStack) -> None:
        """Register hooks that run before all sessions' hooks."""
        for path, module in self._modules.items():
            note = partial(self._note_inputs, path), partial(self._note_writes, path)
            hook_calls(module, handles, *note, partial(call_again, path))

    def open_last(self, handles: ExitStack) -> None:
        """Register hooks that run after all sessions' hooks."""
        for path, module in self._modules.items():
            carry = partial(self._copy_inputs, path), partial(self._settle, path)
            hook_calls(module, handles, *carry, partial(call_again, path))

    def _note_inputs(
        self, path: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if index not in self._calls[path]:
            return None
        self._own[path, index] = args, kwargs
        if not torch.is_grad_enabled():
            return None
        with self._collector.busy():
            return copied((args, kwargs))

    def _copy_inputs(
        self, path: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        own = self._own.pop((path, index), None)
        if own is None:
            return None
        made: dict[int, _Given] = {}
        with self._collector.busy():
            positional = tuple(_given(*pair, made) for pair in zip(own[0], args, strict=True))
            keyword = {name: _given(own[1][name], value, made) for name, value in kwargs.items()}
        self._given[path, index] = list(made.values())
        return positional, keyword

    def _note_writes(self, path: str, index: int, output: Any) -> None:
        with self._collector.busy():
            outcome = [entry for entry in self._given.pop((path, index), ()) if entry.is_written()]
        for entry in outcome:
            entry.places = tuple(picks for picks, leaf in leaves(output) if leaf is entry.copy)
        if outcome:
            self._given[path, index] = outcome

    def _settle(self, path: str, index: int, output: Any) -> Any:
        outcome = self._given.pop((path, index), ())
        with self._collector.busy():
            for entry in outcome:
                output = entry.settled(output)
        return output if outcome else None


def _given(own: Any, value: Any, made: dict[int, _Given]) -> Any:
    """Return a copy of an input tensor, one for each tensor; anything else as it is."""
    if not (isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)):
        return value
    if id(value) not in made:
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(mode=False) if is_inference else nullcontext():
            copy = _copy(value)
        made[id(value)] = _Given(own, value, copy, copy._version)
    return made[id(value)].copy


def _are_same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit; assumed without bits to compare, as on meta."""
    has_bits = value.layout is torch.strided and not value.is_meta
    return not has_bits or same_bits(value, other)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    copy = value.clone()
    return laid_out(copy, value.stride()) if value.layout is torch.strided else copy
