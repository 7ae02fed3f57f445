"""Writing a selector from its parts: the server's parser reads the same parts again."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trocar
from trocar_server.surgery import parse_selector

_NAME = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)
_PATH = st.lists(_NAME, min_size=1, max_size=4).map(".".join)
_PICKS = st.lists(st.integers(-999, 999) | st.text(st.characters(codec="utf-8"), max_size=5), max_size=3)


@pytest.mark.parametrize(
    ("path", "parts", "expected"),
    [
        ("layer4", {}, "layer4"),
        ("", {}, "/out"),
        ("", {"port": "in"}, "/in"),
        ("blocks.a:b", {"port": "in"}, 'blocks."a:b"/in'),
        ("parts.*", {}, 'parts."*"'),
        ("layer*.0.relu", {"kind": "pattern", "call": -1}, "layer*.0.relu@-1"),
        ("**", {"kind": "pattern", "type": "Conv2d"}, "**:Conv2d"),
        ("relu", {"call": "*"}, "relu@*"),
        ("relu", {"call": np.int64(1)}, "relu@1"),
        (r"layer\d", {"kind": "regex", "port": "in"}, r're:"layer\\d"/in'),
        ("layer1.0.add", {"kind": "fx"}, "fx:layer1.0.add"),
        ("sdpa", {"kind": "fn", "call": 3, "port": "scores"}, "fn:sdpa@3/scores"),
        ("fc", {"port": "param(weight)"}, "fc/param(weight)"),
        ("fc", {"port": "param(a b)"}, 'fc/param("a b")'),
        ("fc", {"port": "param(*)"}, "fc/param(*)"),
        ("fc", {"port": "param_grad(*)"}, "fc/param_grad(*)"),
        ("fc", {"port": "in(*)"}, 'fc/in("*")'),
        ("fc", {"port": "grad_out", "call": 1}, "fc@1/grad_out"),
        ("", {"port": "grad_in"}, "/grad_in"),
        ("fc", {"port": "grad_in(a b)"}, 'fc/grad_in("a b")'),
        ("head", {"picks": ["out", 0]}, 'head["out"][0]'),
        ("head", {"picks": "out"}, 'head["out"]'),
        ("re", {"type": "ReLU"}, '"re":ReLU'),
    ],
)
def test_a_selector_is_written_with_no_more_quotes_than_it_needs(
    path: str, parts: dict[str, Any], expected: str
) -> None:
    assert trocar.selector(path, **parts) == expected


@given(
    path=_PATH,
    call=st.none() | st.integers(-99, 99) | st.just("*"),
    argument=st.none() | _NAME,
    picks=_PICKS,
    class_name=st.none() | st.sampled_from(["Conv2d", "_Block"]),
)
def test_the_server_reads_what_was_said(
    path: str, call: Any, argument: str | None, picks: list[int | str], class_name: str | None
) -> None:
    port = "out" if argument is None else f"in({argument})"
    selector = parse_selector(trocar.selector(path, type=class_name, call=call, port=port, picks=picks))
    found = (selector.kind, selector.path, selector.type_name, selector.call, selector.port, selector.picks)
    assert found == ("module", path, class_name, call, port, tuple(picks))
    assert selector.is_pattern is (class_name is not None)


@given(path=_PATH, name=_NAME.filter(lambda name: name != "*"), word=st.sampled_from(["param", "param_grad"]))
def test_the_server_reads_the_parameter_that_was_said(path: str, name: str, word: str) -> None:
    selector = parse_selector(trocar.selector(path, port=f"{word}({name})"))
    assert (selector.path, selector.parameter) == (path, name)
    assert selector.is_gradient is (word == "param_grad")


@given(path=_PATH, name=_NAME)
def test_the_server_reads_the_gradient_of_an_argument(path: str, name: str) -> None:
    selector = parse_selector(trocar.selector(path, port=f"grad_in({name})"))
    assert (selector.path, selector.port, selector.is_gradient) == (path, f"in({name})", True)


@given(pattern=st.sampled_from([r"layer[34]\.\d+", '"', "a|b", "größe@1", "\\\\"]), call=st.integers(-9, 9))
def test_the_server_reads_the_regular_expression_that_was_said(pattern: str, call: int) -> None:
    selector = parse_selector(trocar.selector(pattern, kind="regex", call=call))
    assert (selector.kind, selector.path, selector.call) == ("regex", pattern, call)


@pytest.mark.parametrize("kind", ["pattern", "fx", "fn"])
def test_stars_of_a_pattern_stay_stars(kind: Any) -> None:
    selector = parse_selector(trocar.selector("**.a b.l*", kind=kind))
    assert selector.is_pattern
    assert selector.names == ("**", "a b", "l*")
    assert selector.quoted == {1}


@pytest.mark.parametrize(
    "parts",
    [
        {"kind": "module path"},
        {"type": "A B"},
        {"type": ""},
        {"call": "last"},
        {"call": 1.5},
        {"call": True},
        {"port": "ou"},
        {"port": ""},
        {"port": "in()"},
        {"port": "in[0]"},
    ],
)
def test_a_part_that_there_is_not_is_an_error_before_any_call(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(parts))):
        trocar.selector("a", **parts)
