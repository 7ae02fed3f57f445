"""The grammar: every form, every error with its position, and nothing else whatever comes in."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Selector, parse_selector
from trocar_server.surgery.naming import canonical_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer4", {"path": "layer4"}),
        ("layer4.0.relu@1", {"path": "layer4.0.relu", "call": 1}),
        ("relu@-1", {"path": "relu", "call": -1}),
        ("relu@*", {"path": "relu", "call": "*"}),
        ("fc/in", {"path": "fc", "port": "in"}),
        ("fc/out", {"path": "fc", "port": "out"}),
        ("mha/in(query)", {"path": "mha", "port": "in(query)"}),
        ("/in", {"path": "", "port": "in"}),
        ("/out", {"path": "", "port": "out"}),
        ("@0/out", {"path": "", "call": 0, "port": "out"}),
        ("split[0]", {"path": "split", "picks": (0,)}),
        ("split[-1]", {"path": "split", "picks": (-1,)}),
        ('head["out"]', {"path": "head", "picks": ("out",)}),
        ('/out["aux"][2]', {"path": "", "port": "out", "picks": ("aux", 2)}),
        ("layer1.0/in[0]", {"path": "layer1.0", "port": "in", "picks": (0,)}),
        ("encoder.**:Conv2d", {"path": "encoder.**", "type_name": "Conv2d"}),
        (
            "layer*.0:Bottleneck@0/in[0]",
            {"path": "layer*.0", "type_name": "Bottleneck", "call": 0, "port": "in", "picks": (0,)},
        ),
        ("in", {"path": "in"}),
        ("out/in", {"path": "out", "port": "in"}),
        ("größe", {"path": "größe"}),
        ('x["]"]', {"path": "x", "picks": ("]",)}),
        ('x["a\\"b"]', {"path": "x", "picks": ('a"b',)}),
        ('x[""]', {"path": "x", "picks": ("",)}),
    ],
)
def test_a_selector_is_read_part_by_part(text: str, expected: dict[str, object]) -> None:
    assert parse_selector(text) == Selector(text=text, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        (":Conv2d", 0),
        ("@0", 0),
        ("[0]", 0),
        ("a..b", 2),
        (".a", 0),
        ("a.", 2),
        ("a.b***", 3),
        ("a**", 1),
        ("layer 4", 5),
        ("layer4 ", 6),
        ("layer4:", 6),
        ("layer4:2d", 6),
        ("layer4@", 6),
        ("layer4@one", 6),
        ("layer4@--1", 6),
        ("layer4@1@2", 8),
        ("layer4@1:ReLU", 8),
        ("layer4/", 6),
        ("layer4/weight", 6),
        ("layer4/inn", 6),
        ("layer4/in()", 6),
        ("layer4/in(0)", 6),
        ("layer4/out(x)", 6),
        ("layer4/in/out", 6),
        ("layer4[", 6),
        ("layer4[]", 6),
        ("layer4[out]", 6),
        ("layer4['out']", 6),
        ("layer4[1.5]", 6),
        ("layer4[0]x", 9),
        ("layer4[0]/in", 9),
        ('layer4["a\\x"]', 6),
        ('layer4["open]', 6),
        ("layer4[12345678901]", 6),
    ],
)
def test_an_error_points_at_the_first_character_that_does_not_fit(text: str, position: int) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_selector(text)
    assert caught.value.reason is ErrorReason.INVALID_SELECTOR
    assert caught.value.details["position"] == str(position)


def test_the_caret_of_an_error_stands_under_the_character() -> None:
    with pytest.raises(ServiceError) as caught:
        parse_selector("layer4@one")
    _, shown, caret = caught.value.message.splitlines()
    assert shown[caret.index("^")] == "@"


def test_an_error_shows_no_more_than_the_start_of_a_long_selector() -> None:
    with pytest.raises(ServiceError) as caught:
        parse_selector("x" * 100_000 + "]")
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layer*", "layer4", True),
        ("layer*", "layer4.0", False),
        ("layer*.0", "layer4.0", True),
        ("layer*.0", "layer4.1.0", False),
        ("*", "layer4", True),
        ("*", "layer4.0", False),
        ("*.*", "layer4.0", True),
        ("l*r*", "layer4", True),
        ("l*4*r", "layer4", False),
        ("**", "layer4", True),
        ("**", "layer4.0.conv1", True),
        ("layer4.**", "layer4.0.conv1", True),
        ("layer4.**", "layer4", False),
        ("**.conv1", "conv1", True),
        ("**.conv1", "layer4.0.conv1", True),
        ("**.conv1", "layer4.0.myconv1", False),
        ("layer4.**.conv1", "layer4.conv1", True),
        ("layer4.**.conv1", "layer4.0.1.conv1", True),
        ("layer4.**.conv1", "layer40.conv1", False),
        ("**.**", "layer4", True),
        ("a+b*", "a+bc", True),
        ("a+b*", "aab", False),
        ("*", "größe", True),
    ],
)
def test_stars_match_as_in_gitignore(pattern: str, path: str, matches: bool) -> None:
    assert parse_selector(pattern).matches(path, "Conv2d") is matches


def test_a_type_limits_a_pattern_to_modules_of_this_class() -> None:
    selector = parse_selector("**:Conv2d")
    assert selector.matches("conv1", "Conv2d")
    assert not selector.matches("conv1", "Conv2dNormActivation")


@pytest.mark.parametrize(
    ("text", "is_pattern"), [("layer4", False), ("layer4@*", False), ("layer*", True), ("layer4:ReLU", True)]
)
def test_only_stars_in_the_path_and_types_make_a_pattern(text: str, is_pattern: bool) -> None:
    assert parse_selector(text).is_pattern is is_pattern


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("layer4", None, "out", ()), "layer4"),
        (("relu", 1, "out", ()), "relu@1"),
        (("fc", None, "in", ()), "fc/in"),
        (("", None, "out", ()), "/out"),
        (("", None, "in", (0,)), "/in[0]"),
        (("mha", 0, "in(query)", ()), "mha@0/in(query)"),
        (("head", None, "out", ("out", 0)), 'head["out"][0]'),
    ],
)
def test_a_canonical_name_says_no_more_than_needed(
    arguments: tuple[str, int | None, str, tuple[int | str, ...]], name: str
) -> None:
    assert canonical_name(*arguments) == name


_PATHS = st.lists(st.from_regex(r"[A-Za-z0-9_äß#+-]{1,8}", fullmatch=True), min_size=1, max_size=5).map(
    ".".join
)
_PICKS = st.lists(
    st.integers(-(10**6), 10**6) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=3
).map(tuple)


@given(
    path=_PATHS,
    call=st.none() | st.integers(0, 10**6),
    port=st.sampled_from(["out", "in", "in(query)", "in(_x1)"]),
    picks=_PICKS,
)
def test_every_canonical_name_is_a_selector_for_the_same(
    path: str, call: int | None, port: str, picks: tuple[int | str, ...]
) -> None:
    selector = parse_selector(canonical_name(path, call, port, picks))
    assert (selector.path, selector.call, selector.port, selector.picks) == (path, call, port, picks)


_PARTS = r"""
    layer4 relu . .. * ** : :Conv2d @ @1 @-1 @* / /in /out /in(x) ( )
    [ ] [0] [-1] ["out"] ["\ud800"] ["\" \ " é ٣ ² 🙂 -
"""
_FRAGMENTS = st.sampled_from([*_PARTS.split(), " ", "\n", "\0", "0" * 20])


@settings(max_examples=2000)
@given(st.one_of(st.lists(_FRAGMENTS, max_size=12).map("".join), st.text(max_size=40)))
@example("@٣/in")
@example('x["\\ud800"]')
def test_any_text_is_a_selector_or_an_invalid_selector(text: str) -> None:
    try:
        selector = parse_selector(text)
    except ServiceError as error:
        assert error.reason is ErrorReason.INVALID_SELECTOR  # noqa: PT017 - only if one is raised
    else:
        assert selector.text == text


@settings(max_examples=2000)
@given(st.lists(_FRAGMENTS, max_size=12).map("".join))
@example('x["\\ud800"]')
def test_whatever_is_said_about_a_selector_can_be_sent(text: str) -> None:
    """Error messages quote picks and selectors; text that UTF-8 cannot hold breaks the reply."""
    try:
        selector = parse_selector(text)
    except ServiceError as error:
        error.message.encode()
    else:
        canonical_name(selector.path, 0, selector.port, selector.picks).encode()
