"""Statistics of a stream, of the whole, and of a stream that was resumed."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.draw_taps import Rules, draw_tap
from tests.relations.families import FAMILIES
from tests.relations.family import SAMPLES, Family, Inputs
from tests.relations.hosting import Hosts
from tests.relations.layouts import Place, places
from tests.relations.outcome import Outcome, asked, compare_bits, named, refused_alike
from tests.relations.relations import tolerance
from tests.relations.replies import Parts, parts
from tests.relations.request import Request, Wanted
from tests.relations.requests import draw_inputs

_BATCHES = 3


def split(hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare running statistics with those of one large batch, and of a stream that was resumed."""
    family = FAMILIES[name]
    rules = Rules(is_padded=bool(family.sides))
    batches = [draw_inputs(chance, family, rules) for _ in range(_BATCHES)]
    whole = {
        key: np.concatenate([batch[key] for batch in batches], family.axes[key].index(SAMPLES))
        for key in family.axes
    }
    request = request or _draw(chance, name)
    outcome = Outcome("split", name, request=request, inputs=whole)
    at_once = asked(lambda: request.ask(hosts.client, family, whole, 3 * _BATCHES))
    resumed_at = chance.randrange(1, _BATCHES)
    in_parts: Any = asked(lambda: _streamed(hosts, family, request, batches, resumed_at))
    if refused_alike(outcome, at_once, in_parts):
        return outcome
    outcome.tapped(at_once)
    running, resumed = in_parts
    mine = parts(at_once)  # type: ignore[arg-type]
    for tapped, wanted in named(request, at_once).items():
        for part in [part for part in mine if part[0] == tapped and part[1] != "values"]:
            outcome.comparison.note(part, mine[part], running[part], tolerance(request, wanted, part[1]))
    compare_bits(outcome.comparison, running, resumed)
    return outcome


def _streamed(hosts: Hosts, family: Family, request: Request, batches: list[Inputs], at: int) -> Any:
    """Return the statistics of a stream, and of one that ended before batch `at` and was resumed there."""
    options: dict[str, Any] = {"running_statistics": True, "checkpoint_interval": 1}
    with hosts.client.extract_stream(family.name, batches, request.taps, **options) as stream:
        results = list(stream)
        for result in results:
            result.unwrap()
        complete = _numbers(stream.statistics)
    options |= {"checkpoint": results[at - 1].checkpoint, "first_batch": at}
    with hosts.client.extract_stream(family.name, batches[at:], request.taps, **options) as stream:
        for result in stream:
            result.unwrap()
        return complete, _numbers(stream.statistics)


def _numbers(statistics: Any) -> Parts:
    found: Parts = {}
    for name, stats in statistics.items():
        for kind, value in stats.as_dict().items():
            is_histogram = isinstance(value, trocar.Histogram)
            found[name, kind] = np.asarray(value.counts if is_histogram else value)
            found |= {(name, "edges"): np.asarray(value.edges)} if is_histogram else {}
    return found


def _draw(chance: Random, name: str) -> Request:
    known = [place for place in places(name) if place.is_float and place.samples is not None]
    wanted = [_running(chance, place, number) for number, place in enumerate(chance.sample(known, 2))]
    return Request(tuple(wanted))


def _running(chance: Random, place: Place, number: int) -> Wanted:
    """Draw a tap whose statistics may run over batches."""
    while True:
        wanted = draw_tap(chance, place, number, Rules(is_padded=True))
        takes_samples = wanted.rows != place.samples
        if wanted.tap.stats and wanted.tap.over != "sample" and not takes_samples:
            return replace(wanted, tap=replace(wanted.tap, values=False, cast=None))
