"""A selector in parts is the same as its text; what cannot be one is refused with its field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tap_pb2 as pb
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.selector_parts import selector_of, selector_text
from trocar_server.rpc.codec.tap_requests import tap_request
from trocar_server.surgery import parse_selector


def text(**fields: Any) -> str:
    return selector_text("taps[0].parts", pb.SelectorParts(**fields))


def refused(tap: pb.Tap) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        selector_of("taps[0]", tap)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"path": "layer4"}, "layer4"),
        ({"path": "layer4", "kind": pb.SELECTOR_KIND_MODULE}, "layer4"),
        ({"path": "a.b:c.*"}, 'a."b:c"."*"'),
        ({"path": "re", "type": "ReLU"}, '"re":ReLU'),
        ({"port": "in"}, "/in"),
        ({"port": "out", "picks": [pb.Pick(key="aux"), pb.Pick(position=-1)]}, '/out["aux"][-1]'),
        ({"path": "relu", "call": -1}, "relu@-1"),
        ({"path": "relu", "call": 0}, "relu@0"),
        ({"path": "relu", "is_every_call": True}, "relu@*"),
        ({"path": "fc", "port": "in(a b)"}, 'fc/in("a b")'),
        ({"path": "fc", "port": "param(weight)"}, "fc/param(weight)"),
        ({"path": "layer*.**", "kind": pb.SELECTOR_KIND_PATTERN, "type": "Conv2d"}, "layer*.**:Conv2d"),
        ({"path": "a b.*", "kind": pb.SELECTOR_KIND_PATTERN}, '"a b".*'),
        ({"path": r"layer\d", "kind": pb.SELECTOR_KIND_REGEX, "call": 1}, r're:"layer\\d"@1'),
        ({"path": "layer1.0.add", "kind": pb.SELECTOR_KIND_FX}, "fx:layer1.0.add"),
        ({"path": "sdpa", "kind": pb.SELECTOR_KIND_FUNCTION, "port": "scores"}, "fn:sdpa/scores"),
    ],
)
def test_parts_are_written_as_the_text_that_says_the_same(fields: dict[str, Any], expected: str) -> None:
    assert text(**fields) == expected
    assert selector_of("taps[0]", pb.Tap(parts=pb.SelectorParts(**fields))) == parse_selector(expected)


def test_a_tap_in_parts_wants_what_a_tap_in_text_wants() -> None:
    parts = pb.SelectorParts(path="layer*", kind=pb.SELECTOR_KIND_PATTERN, call=-1)
    in_parts = tap_request("taps[0]", pb.Tap(parts=parts, alias="x"))
    assert in_parts == tap_request("taps[0]", pb.Tap(selector="layer*@-1", alias="x"))


_NAME = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)
_PATH = st.lists(_NAME, min_size=1, max_size=4).map(".".join)
_PICKS = st.lists(st.integers(-999, 999) | st.text(st.characters(codec="utf-8"), max_size=5), max_size=3)


@given(path=_PATH, call=st.none() | st.integers(-99, 99), argument=st.none() | _NAME, picks=_PICKS)
def test_every_name_reaches_the_selector_as_it_is(
    path: str, call: int | None, argument: str | None, picks: list[int | str]
) -> None:
    port = "out" if argument is None else f"in({argument})"
    steps = [pb.Pick(key=pick) if isinstance(pick, str) else pb.Pick(position=pick) for pick in picks]
    parts = pb.SelectorParts(path=path, call=call, port=port, picks=steps)
    selector = selector_of("taps[0]", pb.Tap(parts=parts))
    assert (selector.path, selector.call, selector.port) == (path, call, port)
    assert selector.picks == tuple(picks)
    assert not selector.is_pattern


@given(pattern=st.sampled_from(["a", "(x|y)+", r"\d\.", '"', "a b@1/in", "größe"]))
def test_a_regular_expression_reaches_the_selector_as_it_is(pattern: str) -> None:
    parts = pb.SelectorParts(path=pattern, kind=pb.SELECTOR_KIND_REGEX, port="in")
    selector = selector_of("taps[0]", pb.Tap(parts=parts))
    assert (selector.kind, selector.path, selector.port) == ("regex", pattern, "in")


@pytest.mark.parametrize(
    ("tap", "field"),
    [
        (pb.Tap(selector="a", parts=pb.SelectorParts(path="a")), "taps[0]"),
        (pb.Tap(parts=pb.SelectorParts(path="a", kind=99)), "taps[0].parts.kind"),  # type: ignore[arg-type]
        (pb.Tap(parts=pb.SelectorParts(path="a", type="A@1")), "taps[0].parts.type"),
        (pb.Tap(parts=pb.SelectorParts(path="a", port="ou")), "taps[0].parts.port"),
        (pb.Tap(parts=pb.SelectorParts(path="a", port="in[0]")), "taps[0].parts.port"),
        (pb.Tap(parts=pb.SelectorParts(path="a", port="in()")), "taps[0].parts.port"),
        (pb.Tap(parts=pb.SelectorParts(path="a", call=0, is_every_call=True)), "taps[0].parts"),
        (pb.Tap(parts=pb.SelectorParts(path="a", picks=[pb.Pick()])), "taps[0].parts.picks[0]"),
        (pb.Tap(parts=pb.SelectorParts(path="a" * 2000)), "taps[0]"),
        (pb.Tap(selector="a" * 2000), "taps[0]"),
    ],
)
def test_what_is_no_part_is_refused_with_its_field(tap: pb.Tap, field: str) -> None:
    error = refused(tap)
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert error.details["field"] == field


@pytest.mark.parametrize(
    "parts",
    [
        pb.SelectorParts(),
        pb.SelectorParts(path="a..b"),
        pb.SelectorParts(kind=pb.SELECTOR_KIND_REGEX),
        pb.SelectorParts(kind=pb.SELECTOR_KIND_REGEX, path="("),
        pb.SelectorParts(kind=pb.SELECTOR_KIND_FX, path="a", port="in"),
        pb.SelectorParts(kind=pb.SELECTOR_KIND_FX, path="a", call=0),
        pb.SelectorParts(kind=pb.SELECTOR_KIND_FUNCTION, path="a", port="param(w)"),
        pb.SelectorParts(path="a", port="scores"),
        pb.SelectorParts(path="a", port="param(w)", call=1),
        pb.SelectorParts(path="a", call=-(2**31)),
        pb.SelectorParts(path="a", picks=[pb.Pick(position=2**62)]),
    ],
)
def test_parts_that_do_not_go_together_are_an_invalid_selector(parts: pb.SelectorParts) -> None:
    assert refused(pb.Tap(parts=parts)).reason is ErrorReason.INVALID_SELECTOR
