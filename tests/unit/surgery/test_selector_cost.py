"""Selectors are parsed and matched on the server's event loop: no text may keep it busy."""

import sys

import pytest

from tests.support.servers import warm_python
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector

_SCRIPT = """
import sys
from trocar_server.surgery.selectors.parsing import parse_selector
path = sys.argv[2]
print(parse_selector(sys.argv[1]).matches(path, "Conv2d"))
"""
_HOPELESS_S = 240  # matching takes microseconds, or hours; the start of the process takes most


@pytest.mark.parametrize(
    ("selector", "path"),
    [
        ("**." * 200 + "x", "encoder.layers.encoder_layer_0.self_attention.out_proj.a.b.c"),
        ("*a" * 20 + "*b", "a" * 40),
        (".".join(["**", "*a*"] * 20) + ".x", ".".join(["a" * 20] * 12)),
    ],
    ids=["many double stars", "many stars in one component", "both"],
)
def test_no_pattern_takes_exponential_time(selector: str, path: str) -> None:
    run = warm_python.run(
        [sys.executable, "-c", _SCRIPT, selector, path],
        capture_output=True,
        text=True,
        timeout=_HOPELESS_S,
        check=True,
    )
    assert run.stdout.strip() == "False"


_PARSE = """
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
size = 200_000
for text in (
    "a." * size, "a." * size + "a", "[" * size, "a" + "[0]" * size, "a" * size + "[", "@" * size, '"' * size,
    '"' + chr(92) * size, '"' + 2 * chr(92) * size + '"',
    'a["' + "x" * size, "re:" + "(" * size, "re:" + "a" * size, "re:" + "(a?){9}" * size, "#" + "1" * size,
    "**." * size, "a/in(" + "x" * size, chr(10) * size, "x" * size + chr(0xD800),
):
    try:
        parse_selector(text)
        print("selector")
    except ServiceError as error:
        print(error.reason)
"""

_REGEX = """
from trocar_server.surgery import parse_selector
patterns = (
    "(a+)+b", "(a|a)*b", "(a|aa|aaa|.*){60}b", "((a?){20}){20}b", ".*a.{100}b", "(.*)*b", "(?:.*[ab]){40}c",
    "|".join("(.*a.{%d}b)" % count for count in range(12)),
)
paths = ["a" * 100 + "." + str(number) for number in range(300)]
for pattern in patterns:
    selector = parse_selector("re:" + pattern)
    print(any(selector.matches(path, "Conv2d") for path in paths))
"""


def _lines(script: str) -> list[str]:
    run = warm_python.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=_HOPELESS_S, check=True
    )
    return str(run.stdout).split()


def test_no_text_takes_more_than_linear_time_to_parse() -> None:
    assert set(_lines(_PARSE)) == {"selector", "INVALID_SELECTOR"}


def test_no_regular_expression_takes_exponential_time() -> None:
    assert set(_lines(_REGEX)) == {"False"}


@pytest.mark.parametrize("pattern", ["(a{40}){30}", "x{1000}y{1000}", r"[^\pL]{30}", r"(\pL*.){20}z"])
def test_a_regular_expression_that_grows_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(ServiceError, match="RE2"):
        parse_selector(f"re:{pattern}")
