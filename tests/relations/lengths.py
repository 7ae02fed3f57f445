"""What does not know of a length: values and statistics of another tower, and the number of channels."""

from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.families import FAMILIES
from tests.relations.hosting import Hosts
from tests.relations.layouts import BATCH, Place, places
from tests.relations.outcome import Outcome, asked, named, refused_alike
from tests.relations.relations import tolerance
from tests.relations.replies import parts
from tests.relations.request import Request, Wanted


def length(hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare statistics of values without tokens, with texts of another length, or with longer sequences.

    Statistics over all elements, and over samples, do not change where neither tokens nor frames are; the
    number of channels changes nowhere, with the size of images neither.
    """
    family = FAMILIES[name]
    letters = [letter for letter in ("t", "l", "h") if letter in family.sizes]
    outcome = Outcome("length", name)
    if not letters or (letters == ["h"] and not family.grows):
        return outcome
    letter = letters[0]
    request = request or _draw(chance, name)
    seed, size = chance.randrange(10**6), family.sizes[letter]
    lengths = {letter: [size, size - 2, size - 1]} if letter in family.masks else {}
    short = family.inputs(np.random.default_rng(seed), BATCH, lengths=lengths)
    longer = family.inputs(
        np.random.default_rng(seed),
        BATCH,
        lengths={key: [counts[0] + 1, *counts[1:]] for key, counts in lengths.items()},
        sizes={letter: 2 * size if letter == "h" else size + 1},
    )
    longer |= {key: value for key, value in short.items() if letter not in family.axes[key]}
    outcome.request, outcome.inputs = request, short
    one = asked(lambda: request.ask(hosts.client, family, short))
    other = asked(lambda: request.ask(hosts.client, family, longer))
    if refused_alike(outcome, one, other):
        return outcome
    outcome.tapped(one)
    mine, theirs = parts(one), parts(other)  # type: ignore[arg-type]
    for tapped, wanted in named(request, one).items():
        for part in [part for part in mine if part[0] == tapped]:
            if _is_elsewhere(wanted.place) and wanted.tap.over != "channel":
                outcome.comparison.note(part, mine[part], theirs[part], tolerance(request, wanted, part[1]))
            elif wanted.tap.over == "channel":
                counts = np.asarray(len(mine[part])), np.asarray(len(theirs[part]))
                outcome.comparison.note(part, *counts, lambda one, other: bool(one == other), " channels")
    return outcome


def _is_elsewhere(place: Place) -> bool:
    return not place.lengths and not place.stretched and not place.spatial and place.is_alone


def _draw(chance: Random, name: str) -> Request:
    known = [
        place for place in places(name) if place.is_float and place.rank > 1 and place.samples is not None
    ]
    wanted = []
    for number, place in enumerate(chance.sample(known, min(3, len(known)))):
        over: Any = (
            "channel"
            if place.lengths or place.spatial or not place.is_alone
            else chance.choice(["all", "sample", "channel"])
        )
        stats: Any = chance.sample(["mean", "std", "min", "max", "count", "l2", "zero_fraction"], 3)
        tap = trocar.tap(place.selector, stats=stats, over=over, values=False, alias=f"tap {number}")
        wanted.append(Wanted(tap, place, place.samples))
    return Request(tuple(wanted))
