"""100,000 texts: each is a selector or an error that points into it, and nothing else."""

import random
from collections.abc import Callable

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Selector, parse_selector

COUNT = 25_000

GOOD = (
    *("layer4", "layer*.0.relu@1", "encoder.**:Conv2d", "fc/in", "/in[0]", "out_proj/in(query)", "a.b.c@*"),
    *('head["out"]', '/out["aux"][-2]', "#-1", "#3:7/in", "layer1.**:ReLU#:5[0]", "**#2", "fc/param(weight)"),
    *('**:BatchNorm2d/param("running mean")', r"re:layer[34]\.\d+\.conv\d", r're:"layer[34]\\..*"@-1/in'),
    *("fx:layer1.0.add", "fx:**.add*[0]", "fn:softmax@3", "fn:scaled_dot_product_attention@-1/in(attn_mask)"),
    *(
        "fn:sdpa/scores",
        "stage2/in",
        'parts."a:b"."*"@0/in("x y")',
        '"größe"',
        "model.encoder.0:Block@-12#0:9/out",
    ),
)
FRAGMENTS = (
    *GOOD,
    *(
        ".",
        "..",
        "*",
        "**",
        ":",
        "@",
        "#",
        "/",
        "[",
        "]",
        "(",
        ")",
        '"',
        "\\",
        "-",
        ",",
        " ",
        "\n",
        "\0",
        "\ud800",
    ),
    *(
        "re:",
        "fx:",
        "fn:",
        "in",
        "out",
        "param",
        "scores",
        "/in",
        "/param(",
        '["',
        '"]',
        "@-",
        "#-",
        "0" * 20,
    ),
    *(
        r"\d",
        r"\u12",
        r"\ud800",
        "{1001}",
        "(?=",
        "(?i)",
        "é",
        "٣",
        "²",
        "🙂",
        "\u202e",
        "\u0301",
        "\ufeff",
        "\x7f",
    ),
)


def mutated(chance: random.Random) -> str:
    """Change a good selector in one to four places."""
    text = chance.choice(GOOD)
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.randint(0, 3))
        other = chance.choice(FRAGMENTS)
        piece = chance.choice(("", other, other[:1], text[start:end] * 2, text[start:end][::-1]))
        text = text[:start] + piece + text[end:]
    return text


def derived(chance: random.Random) -> str:
    """Follow the grammar, with each part there or not; most are selectors."""

    def maybe(make: Callable[[], str]) -> str:
        return make() if chance.random() < 0.4 else ""

    def name() -> str:
        return chance.choice(
            ("a", "layer4", "0", "*", "**", "l*r", '"a:b"', '"\\u00e9"', "in", "re", "größe")
        )

    def number() -> str:
        return str(chance.randint(-12, 12) * 10 ** chance.randint(0, 9))

    def port() -> str:
        word = chance.choice(("out", "in", "in", "param", "scores", "grad"))
        return f"/{word}" + maybe(lambda: f"({chance.choice(('x', 'weight', 'a b', '*'))})")

    def order() -> str:
        return "#" + maybe(number) + maybe(lambda: ":" + maybe(number))

    path = maybe(lambda: chance.choice(("re:", "fx:", "fn:"))) + maybe(
        lambda: ".".join(name() for _ in range(chance.randint(1, 4)))
    )
    picks = "".join(
        chance.choice((f"[{number()}]", '["k"]', "[k]")) for _ in range(chance.choice((0, 0, 1, 3)))
    )
    call = maybe(lambda: "@" + chance.choice((number(), "*")))
    return path + maybe(lambda: ":Conv2d") + call + maybe(order) + maybe(port) + picks


def joined(chance: random.Random) -> str:
    """Put pieces of selectors in any order."""
    return "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(0, 12)))


def unicode(chance: random.Random) -> str:
    """Take any characters, halves of surrogate pairs included."""
    limit = chance.choice((0x80, 0x250, 0xFFFF, 0x10FFFF))
    return "".join(chr(chance.randint(0, limit)) for _ in range(chance.randint(0, 60)))


def outcome(text: str) -> Selector | int:
    """Return the selector, or where the error points."""
    try:
        selector = parse_selector(text)
    except ServiceError as error:
        assert error.reason is ErrorReason.INVALID_SELECTOR  # noqa: PT017 - only if one is raised
        error.message.encode()
        assert len(error.message) < 3000  # noqa: PT017
        return int(error.details["position"])
    assert selector.text == text
    return selector


@pytest.mark.parametrize("make", [mutated, derived, joined, unicode])
def test_any_text_is_a_selector_or_an_error_that_points_into_it(make: Callable[[random.Random], str]) -> None:
    """What is before the character is not to blame: it is a selector, or lacks what comes next, or a path."""
    chance = random.Random(make.__name__)
    kinds = {"selector": 0, "error": 0}
    for _ in range(COUNT):
        text = make(chance)
        found = outcome(text)
        if isinstance(found, Selector):
            kinds["selector"] += 1
            continue
        kinds["error"] += 1
        assert 0 <= found <= len(text), repr(text)
        before = outcome(text[:found])
        lacks_path = before == (len("re:") if text.startswith(("re:", "fx:", "fn:")) else 0)
        assert isinstance(before, Selector) or before == found or lacks_path, repr(text)
    assert min(kinds.values()) > COUNT // 100  # both were tried
