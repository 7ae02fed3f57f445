"""Writes of a function to its arguments, where an edit replaced one: `x.add_(y)` as a statement.

An edit makes another tensor. What the call then writes to it is copied to the model's own tensor, with which
the model goes on.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from trocar_server.surgery.recording.writes import WriteWatch
from trocar_server.surgery.sessions.hooks import Arguments
from trocar_server.surgery.structure import leaves


class CallWrites:
    """Watches one call from its making to `close`.

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

    def settle(self, result: Any) -> tuple[Any, bool]:
        """Copy what the call wrote to the model's own tensors.

        Returns:
            The result, where it is an argument as the model's own tensor; whether the call wrote to it.
        """
        is_written = False
        for own, given in self._pairs:
            if not self._watch.last_write(given):
                continue
            if own is not given:
                own.copy_(given)
            if result is given:
                result, is_written = own, True
        return result, is_written


def _tensors(arguments: Arguments) -> Iterator[torch.Tensor]:
    return (value for _, value in leaves(arguments) if isinstance(value, torch.Tensor))
