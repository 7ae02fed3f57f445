"""The relations: each asks for one thing in two ways and compares the replies. No expected values.

| relation | the two ways |
|---|---|
| `alone` | a sample in a padded batch, and by itself |
| `order` | a batch, and the same in another order |
| `company` | a call by itself, and after and beside other calls |
| ways | `extract`, and every other way to ask: see `ways.py` |

Both ways are refused for one reason of `outcome.TRUE_REFUSALS`, or neither is.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np

from tests.relations.draw_taps import Rules
from tests.relations.families import FAMILIES
from tests.relations.hosting import Hosts
from tests.relations.layouts import BATCH
from tests.relations.outcome import Outcome, asked, compare_bits, named, refused_alike
from tests.relations.replies import Comparison, close, parts
from tests.relations.request import Request, Wanted
from tests.relations.requests import draw_inputs, draw_request


def alone(hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare each sample of a batch, padded where the family has padding, with itself alone."""
    family = FAMILIES[name]
    side = chance.choice(family.sides) if family.sides else "right"
    rules = Rules(by_sample=True, is_padded=bool(family.sides), side=side)
    inputs, request = draw_inputs(chance, family, rules), request or draw_request(chance, name, rules)
    outcome = Outcome("alone", name, request=request, inputs=inputs)
    together = asked(lambda: request.ask(hosts.client, family, inputs))
    sample = chance.randrange(BATCH)
    single = family.alone(inputs, sample)
    by_itself = asked(lambda: request.ask(hosts.client, family, single, 1))
    if refused_alike(outcome, together, by_itself):
        return outcome
    kept = {
        letter: np.flatnonzero(inputs[mask][sample])
        for letter, mask in family.masks.items()
        if mask in inputs
    }
    outcome.tapped(together)
    compare_sample(outcome.comparison, request, together, by_itself, sample, kept)
    return outcome


def compare_sample(
    comparison: Comparison, request: Request, together: Any, single: Any, sample: int, kept: dict[str, Any]
) -> None:
    """Compare one sample of a reply with a reply of that sample alone."""
    mine, own = parts(together), parts(single)
    for name, wanted in named(request, together).items():
        if wanted.rows is None:
            continue
        for part in [part for part in mine if part[0] == name]:
            same = tolerance(request, wanted, part[1])
            if part[1] == "values":
                if wanted.place.stretched and wanted.is_cut:
                    continue  # which of its positions are padding is not known here
                value = np.take(mine[part], [sample], wanted.rows)
                for letter, dim in wanted.place.lengths.items():
                    if wanted.is_cut and letter in kept:
                        value = np.take(value, kept[letter], dim)
                comparison.note(part, value, own[part], same)
            elif part[1] != "edges" and wanted.tap.over == "sample":
                if len(mine[part]) != BATCH or len(own[part]) != 1:
                    comparison.note(part, mine[part], own[part], same)
                else:
                    comparison.note(part, mine[part][sample], own[part][0], same)


def order(hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare a batch with the same samples in another order."""
    family, rules = FAMILIES[name], Rules(by_sample=True)
    inputs, request = draw_inputs(chance, family, rules), request or draw_request(chance, name, rules)
    outcome = Outcome("order", name, request=request, inputs=inputs)
    permutation = chance.choice([[2, 0, 1], [1, 2, 0], [2, 1, 0]])
    one = asked(lambda: request.ask(hosts.client, family, inputs))
    other = asked(lambda: request.ask(hosts.client, family, family.take(inputs, permutation)))
    if refused_alike(outcome, one, other):
        return outcome
    outcome.tapped(one)
    mine, theirs = parts(one), parts(other)  # type: ignore[arg-type]
    for tapped, wanted in named(request, one).items():
        for part in [part for part in mine if part[0] == tapped]:
            value, same = mine[part], tolerance(request, wanted, part[1])
            if part[1] == "values":
                if wanted.rows is None:
                    continue
                value = np.take(value, permutation, wanted.rows)
            elif wanted.tap.over == "sample" and part[1] != "edges":
                if len(value) != BATCH:
                    outcome.comparison.note(part, value, np.zeros(BATCH), same, " per sample")
                    continue
                value = value[permutation]
            outcome.comparison.note(part, value, theirs[part], same)
    if ("", "objective") in mine:
        outcome.comparison.note(
            ("", "objective"), mine["", "objective"], theirs["", "objective"], close(1e-2)
        )
    return outcome


def company(hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare a call with the same after, and at the same time as, calls of others."""
    family, rules = FAMILIES[name], Rules()
    inputs, request = draw_inputs(chance, family, rules), request or draw_request(chance, name, rules)
    others = [(draw_request(chance, name, rules), draw_inputs(chance, family, rules)) for _ in range(2)]
    outcome = Outcome("company", name, request=request, inputs=inputs)
    quiet = asked(lambda: request.ask(hosts.client, family, inputs))

    def other(number: int) -> Any:
        theirs, given = others[number]
        return asked(lambda: theirs.ask(hosts.client, family, given))

    other(0)
    with ThreadPoolExecutor(3) as callers:
        before = callers.submit(other, 1)
        mine = callers.submit(asked, lambda: request.ask(hosts.client, family, inputs))
        after = callers.submit(other, 0)
        beside = mine.result()
        before.result(), after.result()
    if not refused_alike(outcome, quiet, beside):
        outcome.tapped(quiet)
        compare_bits(outcome.comparison, parts(quiet), parts(beside))  # type: ignore[arg-type]
    return outcome


_LOOSE = {"skewness": 0.05, "kurtosis": 0.05, "zero_fraction": 0.05, "var": 1e-2, "std": 1e-2}


def tolerance(request: Request, wanted: Wanted, kind: str) -> Callable[[Any, Any], bool]:
    """Return how a part is compared where the arithmetic of a pass may differ in its last bits."""
    family_tolerance = 2e-3
    if wanted.tap.cast or any(word in repr(edit) for edit in request.edits for word in ("cast", "normalise")):
        family_tolerance = 2e-2
    if kind == "histogram":
        return lambda one, other: bool(
            one.sum() == other.sum() and np.abs(one - other).sum() <= max(2, 0.02 * other.sum())
        )
    return close(max(family_tolerance, _LOOSE.get(kind, 0)))
