"""Weights that a forward pass of a trainer itself writes to, as RWKV does, beside what the optimizer does."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trocar_server.models import Pristine

_TABLES = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps parameters, buffers, submodules, hooks and the mode."""


class WrittenWeights:
    """Puts frozen weights that a pass writes to back after it, with the attributes that tell of it.

    So checkpoints, exports and the trainer's model have the weights that a freshly built model has. A trained
    weight that a pass writes to (an embedding with `max_norm`) stays as it is then, as in plain torch, unless
    the pass fails. What the pass writes to weights that it shares with the base model, without having been
    foreseen, is put back there.

    Args:
        module: The trainer's module tree; it owns these weights.
        written: Names of the parameters and buffers that its passes write to.
        trained: The trained parameters by name.
        base: The base model.
    """

    def __init__(
        self,
        module: nn.Module,
        written: Collection[str],
        trained: Mapping[str, nn.Parameter],
        base: Pristine,
    ) -> None:
        self._base = base
        of_names = {name: each for name, each in module.named_parameters() if name in written}
        self._parts = list(module.modules())
        self._trained = [each for name, each in of_names.items() if name in trained]
        self._frozen = [each for name, each in of_names.items() if name not in trained]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Undo what the pass and its backward pass inside the context write."""
        trained, frozen = _copies(self._trained), _copies(self._frozen)
        self._base.refresh()
        attributes = [(part, _attributes(part)) for part in self._parts] if frozen else []
        try:
            yield
        except BaseException:
            _restore(trained)
            raise
        finally:
            self._base.put_back()
            _restore(frozen)
            for part, kept in attributes:
                for name in _attributes(part).keys() - kept.keys():
                    del vars(part)[name]
                vars(part).update(kept)


def _copies(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    return [(parameter, parameter.detach().clone()) for parameter in parameters]


def _restore(copies: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    with torch.no_grad():
        for parameter, copy in copies:
            parameter.copy_(copy)


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _TABLES}
