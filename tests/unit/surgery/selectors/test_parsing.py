"""The grammar: every form, and every error with its position."""

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Selector, parse_selector
from trocar_server.surgery.selectors.selectors import Order


def refused(text: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        parse_selector(text)
    assert caught.value.reason is ErrorReason.INVALID_SELECTOR
    return caught.value


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
        ('mha/in("a b")', {"path": "mha", "port": "in(a b)"}),
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
        ('a."b:c@*"', {"path": "a.b:c@*", "quoted": frozenset({1})}),
        ('x["]"]', {"path": "x", "picks": ("]",)}),
        ('x["a\\"b"]', {"path": "x", "picks": ('a"b',)}),
        ('x[""]', {"path": "x", "picks": ("",)}),
        ("#3", {"path": "", "order": Order(3)}),
        ("#-1/in", {"path": "", "order": Order(-1), "port": "in"}),
        ("#3:7", {"path": "", "order": Order(3, 7, is_range=True)}),
        ("#3:", {"path": "", "order": Order(3, None, is_range=True)}),
        ("#:-5", {"path": "", "order": Order(None, -5, is_range=True)}),
        ("#:", {"path": "", "order": Order(None, None, is_range=True)}),
        ("**:ReLU@0#1[0]", {"path": "**", "type_name": "ReLU", "call": 0, "order": Order(1), "picks": (0,)}),
        ("fc/param(weight)", {"path": "fc", "port": "param(weight)"}),
        ('fc/param("a)b")', {"path": "fc", "port": "param(a)b)"}),
        ("/param(scale)", {"path": "", "port": "param(scale)"}),
        ("re", {"path": "re"}),
        ('"re":ReLU', {"path": "re", "type_name": "ReLU", "quoted": frozenset({0})}),
        (r"re:layer[34]\.\d", {"path": r"layer[34]\.\d", "kind": "regex", "quoted": frozenset({0})}),
        ("re:a@1/in", {"path": "a@1/in", "kind": "regex", "quoted": frozenset({0})}),
        (
            r're:"layer\\d"@-1/in',
            {"path": r"layer\d", "kind": "regex", "call": -1, "port": "in", "quoted": frozenset({0})},
        ),
        ("fx:layer1.0.add", {"path": "layer1.0.add", "kind": "fx"}),
        ("fx:**.add*[0]", {"path": "**.add*", "kind": "fx", "picks": (0,)}),
        ("fx:#-1", {"path": "", "kind": "fx", "order": Order(-1)}),
        ("fn:softmax@3", {"path": "softmax", "kind": "fn", "call": 3}),
        ("fn:*pool*@*", {"path": "*pool*", "kind": "fn", "call": "*"}),
        ("fn:sdpa@-1/in(attn_mask)", {"path": "sdpa", "kind": "fn", "call": -1, "port": "in(attn_mask)"}),
        ("fn:sdpa/scores", {"path": "sdpa", "kind": "fn", "port": "scores"}),
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
        (" layer4", 0),
        ("layer 4", 5),
        ("layer4 ", 6),
        ('layer"4"', 5),
        ('""', 0),
        ('"a.b"', 0),
        ('"a', 2),
        ("layer4:", 7),
        ("layer4:2d", 7),
        ("layer4@", 7),
        ("layer4@one", 7),
        ("layer4@-", 8),
        ("layer4@--1", 8),
        ("layer4@٣", 7),
        ("layer4@1@2", 8),
        ("layer4@1:ReLU", 8),
        ("layer4@12345678901", 16),
        ("#", 1),
        ("#-", 2),
        ("#x", 1),
        ("#1:2:3", 4),
        ("#1:x", 3),
        ("#1#2", 2),
        ("a#1@2", 3),
        ("a#1:ReLU", 4),
        ("@0#1", 0),
        ("layer4/", 7),
        ("layer4/ou", 7),
        ("layer4/inn", 7),
        ("layer4/weight", 7),
        ("layer4/scores", 7),
        ("layer4/in(", 10),
        ("layer4/in()", 10),
        ("layer4/in(a b)", 11),
        ("layer4/in(a", 11),
        ('layer4/in("a', 12),
        ("layer4/out(x)", 10),
        ("layer4/in/out", 9),
        ("fc/param", 8),
        ("fc/param/in", 8),
        ("fc/param()", 9),
        ("fc/param(a.b)", 10),
        ("fc@0/param(weight)", 2),
        ("fc#0/param(weight)", 2),
        ("fc/param(weight)[0]", 16),
        ("layer4[", 7),
        ("layer4[]", 7),
        ("layer4[out]", 7),
        ("layer4['out']", 7),
        ("layer4[1.5]", 8),
        ("layer4[0", 8),
        ("layer4[0]x", 9),
        ("layer4[0]/in", 9),
        ('layer4["a\\x"]', 9),
        ('layer4["a\nb"]', 9),
        ('layer4["open]', 13),
        ("layer4[12345678901]", 16),
        ("re:", 3),
        ('re:""', 3),
        ("re:(", 3),
        ("re:a**", 3),
        (r"re:(?=a)", 3),
        (r"re:\1", 3),
        (r're:"\d"', 4),
        ('re:"a"x', 6),
        ("fx:", 3),
        ("fx:/out", 3),
        ("fx:a/in", 5),
        ("fx:a:T", 4),
        ("fx:a@0", 4),
        ("fx:a/param(w)", 5),
        ("fn:", 3),
        ("fn:@0", 3),
        ("fn:f:T", 4),
        ("fn:f/param(w)", 5),
        ("fn:f/scores/in", 11),
    ],
)
def test_an_error_points_at_the_first_character_that_does_not_fit(text: str, position: int) -> None:
    assert refused(text).details["position"] == str(position)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer4/ou", "available: out, in, in(name), param(name)"),
        ("fx:a/in", "available: out"),
        ("fn:f/param(w)", "available: out, in, in(name), scores"),
        (":Conv2d", "`**:Conv2d`"),
        ("layer4:", "`:Conv2d`"),
        ("fc@x", "`@-1` for the last"),
        ("#", "`#3:7` for a range"),
        ("#1:2:3", "no step"),
        ("re:(", "missing )"),
        ('re:"\\d"', "written twice"),
        ("fn:", "fn:softmax"),
        ("a..b", "each dot"),
        ("a b", "double quotes"),
        ('"a.b"', "quote each"),
        ("fc/param()", "weight"),
        ("fc/param", "/param(weight)"),
        ('a["x', "the quotes that open at character 3"),
        ("a[0", "`]`"),
        ("a/in@1", "path:Type@call#order/port[pick]"),
    ],
)
def test_an_error_says_what_would_fit(text: str, words: str) -> None:
    assert words in refused(text).message


@pytest.mark.parametrize(
    "text", ["layer4@one", "x" * 300 + "@one" + "y" * 300, "a\n\tb.c@one", "\x1b[0m@one"]
)
def test_the_caret_of_an_error_stands_under_the_character(text: str) -> None:
    error = refused(text)
    _, shown, caret = error.message.splitlines()
    position = int(error.details["position"])
    assert shown[caret.index("^")] == repr(text[position]).strip("'\"")[0]


def test_an_error_shows_no_more_than_what_is_around_the_character() -> None:
    error = refused("x" * 100_000 + "]" + "y" * 100_000)
    assert len(error.message) < 1000
    assert "xx]yy" in error.message
    assert error.details["position"] == "100000"


@pytest.mark.parametrize("text", ["\ud800", 'x["\\ud800"]', 'x["\ud800"]', "re:\ud800", "x/in(\udfff)"])
def test_half_a_surrogate_pair_is_refused_in_words_that_can_be_sent(text: str) -> None:
    refused(text).message.encode()
