"""Every way to ask for what `extract` returns, each with the same bits.

| way | how |
|---|---|
| `stream` | as a batch of `extract_stream`, between two others |
| `prepared` | by a prepared call, which is made twice |
| `cached` | by the digest of its payloads, from the cache of replies |
| `beside` | with further taps before and after |
| `reversed` | with its taps in the opposite order |
| `singly` | each tap by itself |
| `position` | with arguments by position |
| `parts` | with selectors in parts |
| `local` | from a local server, over a Unix socket |
| `start_at` | from a value in the middle of the pass |
| `open_inference` | by the Open Inference Protocol |
| `gateway` | through a gateway of a cluster |
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import numpy as np

import trocar
from tests.relations.draw_taps import PartsTap, Rules, in_parts
from tests.relations.families import FAMILIES
from tests.relations.family import Family, Inputs
from tests.relations.hosting import Hosts
from tests.relations.layouts import Place, places
from tests.relations.outcome import Outcome, asked, compare_bits, refused_alike
from tests.relations.replies import Parts, close, parts, same_bits
from tests.relations.request import Request
from tests.relations.requests import draw_inputs, draw_request, is_positional
from tests.support.wire.open_inference import arrays_of, infer, request_of

Way = Callable[[Hosts, Family, Request, Inputs], Any]
"""Asks in another way; None where the way cannot say the request."""


def stream(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask for the batch between two others in a stream."""
    if request.sources:
        return None
    given = request.with_options(cache=False).arguments(3)
    other = {name: value[..., ::-1].copy() for name, value in inputs.items()}
    with hosts.client.extract_stream(family.name, [other, inputs, other], request.taps, **given) as results:
        return next(result for result in results if result.index == 1).unwrap()


def prepared(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Prepare the request on other inputs of the same sizes, and ask twice."""
    other = {name: value[..., ::-1].copy() for name, value in inputs.items()}
    client = hosts.client if family.says_nothing else hosts.local  # there through shared memory
    given = request.arguments(3)
    with client.prepare(family.name, other, request.taps, **given) as call:
        call(inputs)
        return call(inputs)


def cached(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask twice, after another call with the same inputs: the last is a digest, answered from the cache."""
    given = request.with_options(cache=True).arguments(3)
    first = next((place.selector for place in places(family.name) if place.is_float), "/out")
    hosts.client.extract(family.name, inputs, first, options=trocar.options(cache=True))
    hosts.client.extract(family.name, inputs, request.taps, **given)
    return hosts.client.extract(family.name, inputs, request.taps, **given)


def beside(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask with further taps; edits that were after the last tap would now be reached, and change nothing."""
    known = [place for place in places(family.name) if place.is_float]
    taken = {wanted.tap.selector for wanted in request.wanted}
    more = [
        trocar.tap(place.selector, alias=f"more {number}", stats=["mean"])
        for number, place in enumerate((known[0], known[len(known) // 2], known[-1]))
        if place.selector not in taken
    ]
    maps = hosts.client.extract(
        family.name, inputs, [*more[:1], *request.taps, *more[1:]], **request.arguments(3)
    )
    return {part: value for part, value in parts(maps).items() if not part[0].startswith("more ")}


def reversed_(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask with the taps in the opposite order."""
    return hosts.client.extract(family.name, inputs, request.taps[::-1], **request.arguments(3))


def singly(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask for each tap by itself."""
    if len(request.wanted) < 2:
        return None
    replies: Parts = {}
    for tap in request.taps:
        if request.of is None or tap.gradient:  # others take kernels of passes without gradients
            replies |= parts(hosts.client.extract(family.name, inputs, tap, **request.arguments(3)))
    return replies


def position(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask with all arguments by position."""
    if not is_positional(family, family.build()):
        return None
    sources = {name: tuple(given.values()) for name, given in request.sources.items()}
    return replace(request, sources=sources).ask(hosts.client, family, tuple(inputs.values()))


def in_parts_(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask with selectors in parts, or as text where they are drawn in parts."""
    wanted = tuple(replace(each, tap=_other_form(each.tap)) for each in request.wanted)
    edits = []
    for edit in request.edits:
        message = type(edit.message).FromString(edit.message.SerializeToString())
        if message.selector:
            in_parts(message)
        edits.append(replace(edit, message=message))
    return replace(request, wanted=wanted, edits=tuple(edits)).ask(hosts.client, family, inputs)


def _other_form(tap: trocar.Tap) -> trocar.Tap:
    return (trocar.Tap if isinstance(tap, PartsTap) else PartsTap)(**tap.__dict__)


def local(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask a local server."""
    return None if family.says_nothing else request.ask(hosts.local, family, inputs)


def gateway(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask through a gateway."""
    return request.ask(hosts.gateway, family, inputs)


def start_at(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask from the value of a module before the taps."""
    known = places(family.name)
    first = min(known.index(wanted.place) for wanted in request.wanted)
    if "wire" in request.options:
        return None  # which rounds what is sent: another value here
    usable = [place for place in known[:first] if _can_start(place)]
    if (
        not usable
        or request.edits
        or request.of
        or len(family.axes) > 1
        or family.axes.get("x", "b")[0] != "b"
    ):
        return None
    at = usable[-1 - len(usable) // 3].selector
    value = hosts.client.extract(family.name, inputs, [at])[at]
    shape = next(iter(inputs.values())).shape
    return hosts.client.extract(
        family.name, value, request.taps, start_at=at, start_shape=shape, **request.options
    )


def _can_start(place: Place) -> bool:
    return place.is_float and place.samples == 0 and "[" not in place.selector and bool(place.path)


def open_inference(hosts: Hosts, family: Family, request: Request, inputs: Inputs) -> Any:
    """Ask by the Open Inference Protocol, which knows plain taps and some statistics."""
    outputs: dict[str, tuple[str, str]] = {}
    for wanted in request.wanted:
        tap = wanted.tap
        if tap.reduce or tap.cast or tap.padding or tap.channel_dim is not None or tap.gradient:
            return None
        if not all(isinstance(stat, str) and stat in _INFERRED for stat in tap.stats):
            return None
        name = tap.alias or tap.selector
        outputs |= {tap.selector: (name, "values")} if tap.values else {}
        outputs |= {
            f"{tap.selector}:{stat}:{tap.over}".removesuffix(":all"): (name, stat) for stat in tap.names
        }
    if request.edits or request.of:
        return None
    reply = arrays_of(infer(hosts.channel, request_of(family.name, inputs, outputs)))
    return {
        part: value if part[1] == "values" else _number(value, part[1])
        for output, part in outputs.items()
        for value in [reply[output]]
    }


def _number(value: Any, stat: str) -> Any:
    """Return a statistic as Trocar's own client does, whose counts over everything are whole numbers."""
    if value.shape != (1,):
        return value
    return np.asarray(int(value[0])) if stat.endswith("count") else value[0]


_INFERRED = frozenset(
    (
        *("mean", "var", "std", "min", "max", "absmax", "l2", "l1", "zero_fraction", "nan_count"),
        *("inf_count", "skewness", "kurtosis", "count"),
    )
)

WAYS: dict[str, Way] = {
    "stream": stream,
    "prepared": prepared,
    "cached": cached,
    "beside": beside,
    "reversed": reversed_,
    "singly": singly,
    "position": position,
    "parts": in_parts_,
    "local": local,
    "start_at": start_at,
    "open_inference": open_inference,
    "gateway": gateway,
}
"""The ways by their names."""

_ONE_SIDED = {
    "start_at": ("START_NOT_POSSIBLE",),
    "beside": ("DUPLICATE_NAME",),
}
_DEPENDING = {"beside": ("EDIT_NOT_REACHED", "MODULE_NOT_CALLED"), "singly": ("EDIT_NOT_REACHED",)}
"""Refusals that depend on which values are tapped, which these ways change."""


def compare_way(way: str, hosts: Hosts, name: str, chance: Random, request: Request | None = None) -> Outcome:
    """Compare `extract` with another way."""
    family = FAMILIES[name]
    padded = Rules(is_padded=bool(family.sides), side=chance.choice(family.sides or ("right",)))
    inputs, request = draw_inputs(chance, family, padded), request or draw_request(chance, name, Rules())
    outcome = Outcome(way, name, request=request, inputs=inputs)
    usual = asked(lambda: request.ask(hosts.client, family, inputs))
    other = asked(lambda: WAYS[way](hosts, family, request, inputs))
    if other is None:
        return outcome
    if any(isinstance(reply, str) and reply in _DEPENDING.get(way, ()) for reply in (usual, other)):
        return outcome
    if not refused_alike(outcome, usual, other, one_sided=_ONE_SIDED.get(way, ())):
        outcome.tapped(usual)
        mine = parts(cast(trocar.FeatureMaps, usual))
        theirs = cast(Parts, other) if isinstance(other, dict) else parts(cast(trocar.FeatureMaps, other))
        if way in ("open_inference", "singly"):  # which do not ask for everything
            mine = {part: value for part, value in mine.items() if part in theirs}
        is_fused = family.is_fused and way in ("beside", "singly")
        compare_bits(outcome.comparison, mine, theirs, close(1e-6) if is_fused else same_bits)
    return outcome
