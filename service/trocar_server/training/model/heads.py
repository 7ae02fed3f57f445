"""Head replacement: rebuilding a hosted model with the heads that it was trained with."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from trocar_server.training.spec.trainer_spec import HeadSpec

ReplaceHead = Callable[[nn.Module, HeadSpec, int], str]
"""`head.replace_head`: takes a module, a head and a seed; returns the path."""


@dataclass(frozen=True)
class HeadReplacement:
    """Replaces heads of a module, in order; their initial values do not matter, weights are loaded later.

    Two replacements with equal heads are equal, so that a catalogue recognises a model that it has.
    """

    replace_head: ReplaceHead
    """The function that replaces a head."""
    heads: tuple[HeadSpec, ...]
    """The new heads, in order."""

    def __call__(self, module: nn.Module) -> None:
        """Replace the heads."""
        for head in self.heads:
            self.replace_head(module, head, 0)
