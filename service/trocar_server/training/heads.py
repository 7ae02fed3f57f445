"""What a hosted model needs to get the heads back that it was trained with."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from trocar_server.training.spec import HeadSpec

ReplaceHead = Callable[[nn.Module, HeadSpec, int], str]
"""`head.replace_head`: the module, which head, and a seed; returns the path."""


@dataclass(frozen=True)
class HeadReplacement:
    """Puts heads into a module, one after another; what values they have does not matter, weights follow.

    Two with equal heads are equal, so that a catalogue recognises a model that it has.
    """

    replace_head: ReplaceHead
    """What puts one in."""
    heads: tuple[HeadSpec, ...]
    """Which."""

    def __call__(self, module: nn.Module) -> None:
        """Put them in."""
        for head in self.heads:
            self.replace_head(module, head, 0)
