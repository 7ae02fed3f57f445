"""Parameter swaps: other parameters and buffers for the length of one pass.

A replica's modules share their tensors with every other replica, so a tensor is never changed: its entry in
the module's own table is. Where one tensor has several entries (tied weights), all of them change, as with
`torch.func.functional_call`. Only the replacement takes memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import nn


class ParameterSwaps:
    """Replaces parameters and buffers of one model until its exit stack is closed.

        with ExitStack() as undo:
            swaps = ParameterSwaps(model, undo)
            swaps.replace("fc", "weight", swaps.current("fc", "weight") * 2)

    Args:
        model: A replica.
        undo: Restores the original tensors when it is closed.
    """

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self._model = model
        self._undo = undo

    def current(self, path: str, name: str) -> torch.Tensor:
        """Return the module's present parameter or buffer of this name.

        Raises:
            KeyError: It has no such parameter or buffer.
        """
        return _table(self._model.get_submodule(path), name)[name]

    def replace(self, path: str, name: str, new: torch.Tensor) -> None:
        """Replace this tensor in every module that has it."""
        old = self.current(path, name)
        for table, key in list(_entries(self._model, old)):
            table[key] = new
            self._undo.callback(table.__setitem__, key, old)


def _table(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    for table in (module._parameters, module._buffers):
        if table.get(name) is not None:
            return table  # type: ignore[return-value]  # entries that are None are never looked up
    raise KeyError(name)


def _entries(model: nn.Module, tensor: torch.Tensor) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is tensor:
                    yield table, key  # type: ignore[misc]
