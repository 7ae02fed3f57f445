"""Parameters and buffers that are others for one pass.

A replica's modules share their tensors with every other replica, so a tensor is never changed: its entry in
the module's own table is. Where one tensor has several entries (tied weights), all of them change, as with
`torch.func.functional_call`. Nothing is copied but what replaces it.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import nn


class ParameterSwaps:
    """Replaces entries of the tables of one model until it is closed.

        with ExitStack() as undo:
            swaps = ParameterSwaps(model, undo)
            swaps.replace("fc", "weight", swaps.current("fc", "weight") * 2)

    Args:
        model: A replica.
        undo: Puts everything back when it is closed.
    """

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self._model = model
        self._undo = undo

    def current(self, path: str, name: str) -> torch.Tensor:
        """Return what a module has under this name now.

        Raises:
            KeyError: It has no such parameter or buffer.
        """
        return _table(self._model.get_submodule(path), name)[name]

    def replace(self, path: str, name: str, new: torch.Tensor) -> None:
        """Let every module that has this tensor have another one instead."""
        old = self.current(path, name)
        for table, key in list(_entries(self._model, old)):
            table[key] = new
            self._undo.callback(table.__setitem__, key, old)


def _table(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    for table in (module._parameters, module._buffers):
        if table.get(name) is not None:
            return table  # type: ignore[return-value]  # an entry that is None is not asked for
    raise KeyError(name)


def _entries(model: nn.Module, tensor: torch.Tensor) -> Iterator[tuple[dict[str, torch.Tensor], str]]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is tensor:
                    yield table, key  # type: ignore[misc]
