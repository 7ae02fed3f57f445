"""Second names: modules that a tree has at several places, and parameters with several entries.

    names = second_names(model)         # self.encoder = Encoder(); self.decoder = self.encoder
    names.first("decoder.fc")           # "encoder.fc", as `named_modules` calls it
    names.of("encoder")                 # ("encoder", "decoder")

A module has one record, under its first name; every name selects it. The owners of a tied parameter are all
modules that read it: `lm_head` and `transformer.wte` of a GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

Place = tuple[str, str]
"""First path of a module, and the name of a parameter or buffer of its own."""


@dataclass(frozen=True)
class SecondNames:
    """The names that `named_modules` and `named_parameters` leave out.

    Attributes:
        firsts: First path of a module, by each of its others.
        tied: All places of a parameter or buffer, by each of them, where it has several.
    """

    firsts: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[Place, tuple[Place, ...]] = field(default_factory=dict)

    def first(self, path: str) -> str:
        """Return the path under which a module is recorded; the given one if it has no other."""
        return self.firsts.get(path, path)

    def of(self, path: str) -> tuple[str, ...]:
        """Return all paths of a recorded module, the first one first."""
        return (path, *(other for other, first in self.firsts.items() if first == path))

    def places(self, place: Place) -> tuple[Place, ...]:
        """Return all places of a parameter or buffer, that one among them."""
        return self.tied.get(place, (place,))


NONE = SecondNames()


def second_names(module: nn.Module) -> SecondNames:
    """Return the second names of a tree."""
    first: dict[int, str] = {}
    firsts: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        own = first.setdefault(id(part), path)
        if own != path:
            firsts[path] = own
    tied = _tied(module)
    return SecondNames(firsts, tied) if firsts or tied else NONE


def _tied(module: nn.Module) -> dict[Place, tuple[Place, ...]]:
    places: dict[int, list[Place]] = {}
    for path, part in module.named_modules():
        for name, tensor in _own(part):
            places.setdefault(id(tensor), []).append((path, name))
    return {place: tuple(tied) for tied in places.values() if len(tied) > 1 for place in tied}


def _own(part: nn.Module) -> Iterable[tuple[str, object]]:
    for table in (part._parameters, part._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)
