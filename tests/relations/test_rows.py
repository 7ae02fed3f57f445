"""Rows of the families' passes: what is proved to be independent, torch computes alike in any company."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.relations.families import FAMILIES
from tests.relations.layouts import places
from trocar_server.engine.compiled.backends.graph_tracing import why_rows_mix
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.surgery import Collector, TapSession, Target

SHARE = 0.9
"""Of the families whose last block has one row for each sample, at least so many are proved."""
UNPROVED = {"vilt", "mixtral", "qwen3-moe", "deberta", "counting"}
"""One reads its data, one writes to itself, experts sort the tokens of all rows, one folds a constant in."""
BATCHES = ((2, 0), (1, 1), (1, 3))
"""Rows before and behind those that are compared."""


@cache
def last_block(name: str) -> str:
    """Return the last module whose output has one row for each sample; empty without one."""
    rows = [place for place in places(name) if place.samples == 0 and place.is_float and place.rank > 1]
    plain = [place for place in rows if place.selector == place.path and place.path]
    return plain[-1].path if plain else ""


def recipe_of(name: str) -> Recipe:
    inputs = FAMILIES[name].inputs(np.random.default_rng(0), 2)
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    specs = [ArgumentSpec(value.dtype, tuple(value.shape[1:]), key) for key, value in tensors.items()]
    return Recipe(tuple(specs), (Target("value", last_block(name), 0),))


@cache
def why(name: str) -> str:
    return why_rows_mix(FAMILIES[name].build(), recipe_of(name))


def values(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    module, collector = FAMILIES[name].build(), Collector(ends_pass=False)
    with torch.no_grad(), TapSession(module, recipe_of(name).targets, collector):
        module(**{key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in inputs.items()})
    return collector.values["value"].double()


FITTING = [name for name in FAMILIES if last_block(name)]


@pytest.mark.parametrize("name", FITTING)
def test_what_is_proved_is_the_same_in_any_company(name: str) -> None:
    if why(name):
        return
    family = FAMILIES[name]
    given = family.inputs(np.random.default_rng(0), 8)
    alone = values(name, {key: value[4:5] for key, value in given.items()})
    for before, behind in BATCHES:
        chosen = {key: value[4 - before : 5 + behind] for key, value in given.items()}
        found = values(name, chosen)[before : before + 1]
        torch.testing.assert_close(found, alone, rtol=family.tolerance * 10, atol=family.tolerance)


@pytest.mark.whole
def test_most_families_are_proved() -> None:
    unproved = {name: why(name) for name in FITTING if why(name)}
    assert unproved.keys() <= UNPROVED, unproved
    assert len(FITTING) >= SHARE * len(FAMILIES)
