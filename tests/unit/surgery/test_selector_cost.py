"""A pattern is matched on the server's event loop: no text may keep it busy."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
from trocar_server.surgery.parsing import parse_selector
path = sys.argv[2]
print(parse_selector(sys.argv[1]).matches(path, "Conv2d"))
"""
_HOPELESS_S = 20  # matching takes microseconds, or hours


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
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, selector, path],
        capture_output=True,
        text=True,
        timeout=_HOPELESS_S,
        check=True,
    )
    assert run.stdout.strip() == "False"
