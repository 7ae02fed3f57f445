"""What the dimensions of values are: those that move when a size of the inputs moves. No code of Trocar."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.relations.families import FAMILIES
from tests.relations.family import SAMPLES, Family
from tests.support.oracles.oracle import Key, flat

_MOVING = ("t", "u", "s", "l")
_STEP = {"s": 20}


@dataclass(frozen=True)
class Place:
    """One value of a pass."""

    selector: str
    path: str
    kind: str
    """The class of its module."""
    shape: tuple[int, ...]
    """With the family's sizes and `BATCH` samples."""
    samples: int | None
    """The dimension of the samples; None if it has none, or they are folded into another."""
    is_folded: bool
    """Whether samples are folded with others into one dimension."""
    lengths: Mapping[str, int]
    """The dimensions that move with a length, by its letter, and are as long."""
    is_float: bool
    is_alone: bool
    """Whether it is the same whatever the texts and sequences of the call are."""
    spatial: tuple[int, ...] = ()
    """Dimensions that move with the height of images."""
    stretched: frozenset[str] = frozenset()
    """Letters of lengths that it moves with in another measure, such as frames of sound."""

    @property
    def rank(self) -> int:
        return len(self.shape)


BATCH = 3


@cache
def places(name: str) -> tuple[Place, ...]:
    """Return the values of a family's pass, with every module's output, by execution order."""
    family = FAMILIES[name]
    module = family.build()
    kinds = {path: type(child).__name__ for path, child in module.named_modules()}
    usual = _values(family, module, BATCH, {})
    called = Counter((path, pick) for path, _, pick in usual)
    more = {SAMPLES: _values(family, module, BATCH + 2, {})}
    for letter in _MOVING:
        if letter in family.sizes:
            longer = family.sizes[letter] + _STEP.get(letter, 1)
            more[letter] = _values(family, module, BATCH, {letter: longer})
    if family.grows:
        more["h"] = _values(family, module, BATCH, {"h": 2 * family.sizes["h"]})
    return tuple(
        _place(
            family,
            key,
            kinds[key[0]],
            value,
            {letter: other[key] for letter, other in more.items()},
            called[key[0], key[2]] == 1,
        )
        for key, value in usual.items()
        if all(key in other for other in more.values())
    )


def _place(
    family: Family, key: Key, kind: str, value: Any, others: Mapping[str, Any], is_once: bool
) -> Place:
    moved = {
        letter: [
            d for d, size in enumerate(value.shape) if other.ndim == value.ndim and other.shape[d] != size
        ]
        for letter, other in others.items()
    }
    rows, spatial = moved.pop(SAMPLES), moved.pop("h", [])
    is_plain = len(rows) == 1 and value.shape[rows[0]] == BATCH
    lengths, stretched = {}, set()
    for letter, dims in moved.items():
        if len(dims) == 1 and value.shape[dims[0]] == family.sizes[letter]:
            lengths[letter] = dims[0]
        elif dims:
            stretched.add(letter)
    path, call, pick = key
    return Place(
        f"{path}{'' if is_once else f'@{call}'}{pick}" if path else f"/out{pick}",
        path,
        kind,
        tuple(value.shape),
        rows[0] if is_plain else None,
        bool(rows) and not is_plain,
        lengths,
        value.is_floating_point(),
        all(
            other.shape == value.shape and torch.allclose(other.float(), value.float(), atol=1e-5)
            for letter, other in others.items()
            if letter != SAMPLES
        ),
        tuple(spatial),
        frozenset(stretched),
    )


def _values(family: Family, module: Any, batch: int, sizes: Mapping[str, int]) -> dict[Key, Any]:
    inputs = family.inputs(np.random.default_rng(0), batch, sizes=sizes)
    values: dict[Key, Any] = {}
    calls: dict[str, int] = {}

    def hook(path: str) -> Any:
        def keep(_: Any, __: Any, output: Any) -> None:
            index = calls[path] = calls.get(path, -1) + 1
            for pick, tensor in flat(output):
                values[path, index, pick] = tensor.detach()

        return keep

    handles = [child.register_forward_hook(hook(path)) for path, child in module.named_modules()]
    with torch.inference_mode():
        module(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    for handle in handles:
        handle.remove()
    return values
