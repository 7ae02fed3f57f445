"""Codec of taps: from a `Tap` message to the values that the engine collects."""

from collections.abc import Mapping
from dataclasses import replace

from trocar_api.v1 import tap_pb2 as pb
from trocar_server.engine.request.plan import TapRequest
from trocar_server.rpc.codec.edits import StoredList
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_count, invalid
from trocar_server.rpc.codec.positions import positions_from_wire
from trocar_server.rpc.codec.reductions import cast_from_wire, reductions_from_wire
from trocar_server.rpc.codec.selector_parts import selector_of
from trocar_server.rpc.codec.statistics import SCOPES, STATISTICS, statistics_problem, tap_parameters
from trocar_server.surgery import Selector
from trocar_server.tensors.reductions import Lens, Pool, PoolKind
from trocar_server.tensors.stats.statistic_requests import MAX_BINS, MAX_QUANTILES

LENS_SUFFIX = ":lens"
"""Of the names of a lens, so that the value itself may be tapped as well."""
_WITH_GRADIENTS = ("module", "regex")
_MAX_STATISTICS = 256
"""Far more than there are; one that is named twice counts twice."""


def tap_request(field: str, tap: pb.Tap) -> TapRequest:
    """Convert and check one tap; `field` is its name in errors, for example `taps[0]`.

    Raises:
        ServiceError: With the field named.
    """
    if len(tap.alias) > MAX_TEXT_CHARACTERS:
        raise invalid(field, f"over {MAX_TEXT_CHARACTERS} characters")
    check_count(f"{field}.statistics", len(tap.statistics), _MAX_STATISTICS)
    check_count(f"{field}.quantiles", len(tap.quantiles), MAX_QUANTILES)
    check_count(f"{field}.histogram.edges", len(tap.histogram.edges), MAX_BINS + 1)
    unknown = [kind for kind in tap.statistics if kind not in STATISTICS]
    if unknown:
        raise invalid(f"{field}.statistics", f"unknown statistic {unknown[0]}")
    if tap.scope not in SCOPES:
        raise invalid(f"{field}.scope", f"unknown scope {tap.scope}")
    problem = statistics_problem(tap)
    if problem is not None:
        raise invalid(f"{field}.{problem[0]}", problem[1])
    values = tap.values if tap.HasField("values") else True
    if not values and not tap.statistics:
        raise invalid(field, "requests neither values nor statistics")
    if not values and tap.HasField("cast"):
        raise invalid(f"{field}.cast", "casts values that are not asked for; leave it out")
    reductions = reductions_from_wire(f"{field}.reductions", tap.reductions)
    is_lens = bool(reductions) and isinstance(reductions[-1], Lens)
    selector = _selector(field, tap)
    if is_lens and selector.is_gradient:
        raise invalid(f"{field}.reductions", "a gradient has no lens; tap the value")
    return TapRequest(
        selector=selector,
        alias=tap.alias,
        values=values,
        statistics=tuple(STATISTICS[kind] for kind in dict.fromkeys(tap.statistics)),
        scope=SCOPES[tap.scope],
        channel_dim=tap.channel_dim if tap.HasField("channel_dim") else None,
        reductions=reductions,
        suffix=LENS_SUFFIX if is_lens and not tap.alias else "",
        cast=cast_from_wire(f"{field}.cast", tap.cast) if tap.HasField("cast") else None,
        parameters=tap_parameters(tap),
        includes_padding=tap.includes_padding,
        positions=positions_from_wire(f"{field}.positions", tap.positions)
        if tap.HasField("positions")
        else None,
    )


def tap_requests(field: str, tap: pb.Tap, stored: Mapping[str, StoredList]) -> list[TapRequest]:
    """Convert and check one tap; a readout becomes one for each place of its direction.

    Raises:
        ServiceError: With the field named.
    """
    if not any(reduction.HasField("readout") for reduction in tap.reductions):
        return [tap_request(field, tap)]
    if field not in stored:
        raise invalid(f"{field}.reductions", "this call takes no readouts of directions")
    readout = tap.reductions[0].readout
    plain = pb.Tap()
    plain.CopyFrom(tap)
    plain.ClearField("reductions")
    if not (tap.selector or tap.HasField("parts")):
        plain.selector = "/out"
    request = tap_request(field, plain)
    if request.selector.is_gradient:
        raise invalid(f"{field}.reductions", "a gradient has no readout; tap the value")
    pooled = (Pool(PoolKind.AVG),) if readout.is_pooled else ()
    suffix = "" if tap.alias else f":{readout.name}"
    return [
        replace(request, selector=selector, reductions=(*pooled, reading), suffix=suffix, stored=field)
        for selector, reading in stored[field].readouts
    ]


def _selector(field: str, tap: pb.Tap) -> Selector:
    selector = selector_of(field, tap)
    if not tap.is_gradient or selector.is_gradient:
        return selector
    if selector.kind not in _WITH_GRADIENTS or selector.is_attention:
        raise invalid(f"{field}.is_gradient", "only modules and parameters have gradients; select a module")
    return replace(selector, is_gradient=True)
