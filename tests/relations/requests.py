"""Random requests for a family: taps, edits, objectives, sources and options together."""

import inspect
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.draw_edits import draw_edit, draw_objective
from tests.relations.draw_taps import Rules, draw_tap
from tests.relations.families import FAMILIES
from tests.relations.family import Family, Inputs
from tests.relations.layouts import BATCH, Place, places
from tests.relations.request import Request, Wanted


def draw_inputs(chance: Random, family: Family, rules: Rules, batch: int = BATCH) -> Inputs:
    """Draw inputs; padded ones have one sample of full length, and others of at least 3 tokens."""
    lengths = {}
    if rules.is_padded:
        for letter in family.masks:
            size = family.sizes[letter]
            least = 3 if letter != "s" else size // 2
            lengths[letter] = [size, *(chance.randint(least, size - 1) for _ in range(batch - 1))]
    return family.inputs(np.random.default_rng(chance.randrange(10**6)), batch, rules.side, lengths)


def draw_request(chance: Random, name: str, rules: Rules, most_taps: int = 3) -> Request:
    """Draw a request; most are possible, and some are refused."""
    family, known = FAMILIES[name], places(name)
    floats = [index for index, place in enumerate(known) if place.is_float]
    last = chance.choice(floats[len(floats) // 2 :])
    before = known[chance.choice([index for index in floats if index <= last])]
    of = draw_objective(chance, family, known[last], before, rules) if chance.random() < 0.35 else None
    wanted: list[Wanted] = []
    for number in range(chance.randint(1, most_taps)):
        is_gradient = of is not None and (not wanted or chance.random() < 0.5)
        index = chance.choice([at for at in floats if at <= last] if is_gradient else range(len(known)))
        if all(known[index].selector != other.place.selector for other in wanted):
            wanted.append(draw_tap(chance, known[index], number, rules, gradient=is_gradient))
    latest = max(known.index(each.place) for each in wanted)
    edits, sources = _edits(chance, family, known[: latest + 1], rules)
    return Request(tuple(wanted), edits, of, sources, _options(chance))


def _edits(
    chance: Random, family: Family, known: Sequence[Place], rules: Rules
) -> tuple[tuple[trocar.Edit, ...], dict[str, Inputs]]:
    """Draw edits at some values, and the sources that they name."""
    usable = [place for place in known if place.is_float and (not rules.by_sample or place.samples == 0)]
    if not usable or chance.random() < 0.55:
        return (), {}
    has_source = not rules.by_sample and chance.random() < 0.4
    at = sorted(chance.choices(range(len(usable)), k=chance.choice([1, 1, 2])))
    edits = tuple(draw_edit(chance, usable[index], rules, has_source=has_source) for index in at)
    is_used = any(edit.message.swap.source for edit in edits)
    return edits, {"other": draw_inputs(chance, family, rules)} if is_used else {}


def _options(chance: Random) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [
        {"numerics": "exact"},
        {"merge": False},
        {"priority": chance.choice(["low", "high"])},
        {"chunk_bytes": 4096},
        {"wire": chance.choice(["float16", "bfloat16"])},
        {"numerics": chance.choice(["fast", "bf16"]), "merge": False},
    ]
    return chance.choice(choices) if chance.random() < 0.3 else {}


def is_positional(family: Family, module: Any) -> bool:
    """Whether the arguments are the first ones of `forward`, in their order."""
    return list(inspect.signature(module.forward).parameters)[: len(family.axes)] == list(family.axes)
