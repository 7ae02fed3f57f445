"""Edits as JSON and configuration files have them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trocar


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"at": "layer3", "op": "scale", "factor": 0.0, "channels": [1, 2]},
            trocar.edit("layer3", "scale", 0.0, channels=[1, 2]),
        ),
        ({"at": "x", "op": "zero", "channels": "2:5"}, trocar.edit("x", "zero", channels=slice(2, 5))),
        ({"at": "x", "op": "zero", "samples": "3"}, trocar.edit("x", "zero", samples=3)),
        ({"at": "x", "op": "zero", "tokens": 0}, trocar.edit("x", "zero", tokens=0)),
        (
            {"at": "x", "op": "zero", "tokens": {"text": "cat"}},
            trocar.edit("x", "zero", tokens=trocar.span("cat")),
        ),
        (
            {"at": "x", "op": "zero", "tokens": {"characters": [4, 9], "decoder": True}},
            trocar.edit("x", "zero", tokens=trocar.span(4, 9, decoder=True)),
        ),
        (
            {"at": "x", "op": "zero", "tokens": [{"role": "user"}, {"text": "a"}], "channels": 3},
            trocar.edit("x", "zero", tokens=[trocar.span(role="user"), trocar.span("a")], channels=3),
        ),
        ({"at": "x", "op": "zero", "tokens": "user"}, trocar.edit("x", "zero", tokens="user")),
        ({"at": "x", "op": "zero", "index": ":, 3:8"}, trocar.edit("x", "zero", index=np.s_[:, 3:8])),
        (
            {"at": "x", "op": "zero", "index": "[0, ..., ::2]"},
            trocar.edit("x", "zero", index=np.s_[0, ..., ::2]),
        ),
        ({"at": "x", "op": "zero", "index": [0, "1:"]}, trocar.edit("x", "zero", index=np.s_[0, 1:])),
        ({"at": "x", "op": "zero", "index": 4}, trocar.edit("x", "zero", index=4)),
        ({"at": "x", "op": "zero", "mask": [True, False]}, trocar.edit("x", "zero", mask=[True, False])),
        (
            {"at": "x", "op": "swap", "source": "clean", "from": "y"},
            trocar.edit("x", "swap", source="clean", at="y"),
        ),
        (
            {"at": "x", "op": "steer", "direction": [1.0, 2.0], "keep_norm": True, "order": "after"},
            trocar.edit("x", "steer", [1.0, 2.0], keep_norm=True, order="after"),
        ),
        (
            {"at": "x", "op": "top_k", "k": 2, "channel_dim": -1},
            trocar.edit("x", "top_k", 2, channel_dim=-1),
        ),
    ],
)
def test_a_mapping_is_the_edit_that_it_describes(mapping: dict[str, Any], expected: trocar.Edit) -> None:
    assert trocar.Edit.from_json(mapping) == expected


@pytest.mark.parametrize(
    ("mapping", "error", "match"),
    [
        ({"at": "x", "op": "scale", "factr": 2}, TypeError, "no 'factr'; did you mean factor"),
        ({"at": "x", "op": "scale", "factor": 2, "chanels": 1}, TypeError, "did you mean channels"),
        ({"at": "x", "op": "swap", "source": "a", "selector": "y"}, TypeError, "available: source, from"),
        ({"at": "x", "op": "zero", "tokens": {"words": "cat"}}, TypeError, 'a span is {"text": "cat"}'),
        ({"at": "x", "op": "zero", "tokens": {"text": "a", "role": "b"}}, TypeError, "a span is"),
        ({"at": "x", "op": "scal", "factor": 2}, ValueError, "did you mean scale"),
        ({"at": "x", "op": ["scale"]}, ValueError, "no operation"),
        ({"op": "zero"}, TypeError, "has at; for example"),
        ({}, TypeError, "has at and op; for example"),
        ({"at": 3, "op": "zero"}, TypeError, "the selector must be a string"),
        ({"at": "x", "op": "scale", "factor": "0.5"}, TypeError, "number or an array"),
        ({"at": "x", "op": "zero", "channels": "a"}, ValueError, "channels has 'a'"),
        ({"at": "x", "op": "zero", "index": "1:2:3:4"}, ValueError, "start:stop:step"),
        ({"at": "x", "op": "zero", "index": ":, b"}, ValueError, "index has 'b'"),
        ({"at": "x", "op": "zero", "index": [None]}, TypeError, "is not a position"),
        ({"at": "x", "op": "zero", "mask": [0, 1]}, TypeError, "a mask must be bool"),
    ],
)
def test_a_mapping_that_describes_no_edit_is_refused(
    mapping: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        trocar.Edit.from_json(mapping)


def test_a_text_has_one_edit_or_several_and_names_of_stored_ones() -> None:
    zero = trocar.edit("x", "zero")
    assert trocar.edits_from_json('{"at": "x", "op": "zero"}') == [zero]
    assert trocar.edits_from_json('[{"at": "x", "op": "zero"}, "ablate-3"]') == [zero, "ablate-3"]
    assert trocar.edits_from_json('"ablate-3"') == ["ablate-3"]
    assert trocar.edits_from_json("[]") == []


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{", ValueError, "line 1"),
        ("3", TypeError, "an edit must be a mapping"),
        ("null", TypeError, "an edit must be a mapping"),
        ("[[]]", TypeError, "edit 0 of the list: an edit must be a mapping"),
        ('["Layer/in"]', ValueError, "edit 0 of the list: 'Layer/in' cannot be the name"),
        ('[{"at": "x", "op": "zero"}, {"at": "x"}]', TypeError, "edit 1 of the list"),
        ('{"at": "x", "op": "set", "value": NaN}', ValueError, "NaN"),
        ('{"at": "x", "op": "set", "value": -Infinity}', ValueError, "-Infinity"),
        ('{"at": "x", "op": "set", "value": 1e999}', ValueError, "only finite"),
    ],
)
def test_a_text_that_has_no_edits_is_refused(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        trocar.edits_from_json(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    operation=st.sampled_from(["set", "clamp", "steer", "top_k", "swap", "noise", "normalise"]),
    options=st.dictionaries(
        st.sampled_from(["value", "low", "direction", "k", "source", "from", "scale", "max_norm", "index"])
        | st.sampled_from(["channels", "samples", "mask", "order", "channel_dim", "seed", "dim"]),
        _JSON,
        max_size=4,
    ),
)
def test_whatever_a_mapping_has_it_is_an_edit_or_refused(operation: str, options: dict[str, Any]) -> None:
    try:
        made = trocar.Edit.from_json({"at": "x", "op": operation, **options})
    except (TypeError, ValueError):
        return
    assert made.message.WhichOneof("operation") == operation
    assert repr(made)
