"""Compiled passes against exact ones, at the tolerance that they promise, also of numbers at the ends."""

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.families import FAMILIES
from tests.relations.family import Array
from tests.relations.layouts import places
from tests.relations.outcome import Outcome
from tests.relations.replies import close, parts
from tests.support.servers.running_server import RunningServer

COMPILED = ("tagger", "volume", "convnext", "unet", "last-state", "tuple")
"""Families of floats, which may hold any number."""
ENGINE: Mapping[str, Any] = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0}
SPECIAL = {
    "usual": (),
    "nan": (np.nan,),
    "infinities": (np.inf, -np.inf),
    "negative zero": (-0.0, 0.0),
    "huge": (1e38, -1e38),
}
"""Numbers that the inputs have beside usual ones."""


def compiled(
    server: RunningServer, client: trocar.Client, name: str, special: str, chance: Random
) -> Outcome:
    """Compare `numerics="fast"`, asked until it is compiled, with an exact pass."""
    outcome = Outcome("compiled", name)
    known = [place for place in places(name) if place.is_float]
    taps = [trocar.tap(place.selector) for place in chance.sample(known, min(2, len(known)))]
    inputs = _with(one_input(name, chance.randrange(10**6)), SPECIAL[special], chance)
    usual = one_input(name, 0)
    for _ in range(7):
        client.extract(name, usual, taps, numerics="fast")
        server.run(server.engine.compiled.settled)
    exact = parts(client.extract(name, inputs, taps, numerics="exact"))
    fast = parts(client.extract(name, inputs, taps, numerics="fast"))
    for part in exact:
        outcome.comparison.note(part, fast[part], exact[part], close(1e-5))
    return outcome


def one_input(name: str, seed: int) -> Array:
    """Return the one argument of a family, to be sent by position."""
    (value,) = FAMILIES[name].inputs(np.random.default_rng(seed)).values()
    return value


def _with(value: Array, numbers: tuple[float, ...], chance: Random) -> Array:
    for number in numbers:
        value.reshape(-1)[chance.randrange(value.size)] = number
    return value
