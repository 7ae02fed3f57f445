"""The names of a reply: each is a selector for that value alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.surgery import parse_selector
from trocar_server.surgery.selectors.naming import canonical_name


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


@pytest.mark.parametrize(
    ("port", "name"),
    [
        ("out", "fc/grad_out"),
        ("in", "fc/grad_in"),
        ("in(query)", "fc/grad_in(query)"),
        ("param(bias)", "fc/param_grad(bias)"),
    ],
)
def test_a_gradient_is_named_after_its_value(port: str, name: str) -> None:
    assert canonical_name("fc", None, port, (), is_gradient=True) == name


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)
_PATHS = st.lists(_NAMES, min_size=1, max_size=5).map(".".join)
_PICKS = st.lists(
    st.integers(-(10**6), 10**6) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=3
).map(tuple)
_PORTS = st.sampled_from(["out", "in"]) | _NAMES.map("in({})".format)


@given(path=_PATHS, call=st.none() | st.integers(0, 10**6), port=_PORTS, picks=_PICKS)
def test_every_canonical_name_is_a_selector_for_the_same(
    path: str, call: int | None, port: str, picks: tuple[int | str, ...]
) -> None:
    selector = parse_selector(canonical_name(path, call, port, picks))
    assert (selector.path, selector.call, selector.port, selector.picks) == (path, call, port, picks)
    assert not selector.is_pattern


@given(path=_PATHS, name=_NAMES)
def test_every_canonical_name_of_a_parameter_is_a_selector_for_it(path: str, name: str) -> None:
    selector = parse_selector(canonical_name(path, None, f"param({name})", ()))
    assert (selector.path, selector.parameter) == (path, name)


@given(path=_PATHS, call=st.none() | st.integers(0, 10**6), picks=_PICKS)
def test_every_canonical_name_of_a_function_is_a_selector_for_it(
    path: str, call: int | None, picks: tuple[int | str, ...]
) -> None:
    selector = parse_selector(canonical_name(path, call, "out", picks, "fn"))
    assert (selector.kind, selector.path, selector.call, selector.picks) == ("fn", path, call, picks)
