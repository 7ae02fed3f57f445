import json
import math

import numpy as np
import pytest
from rich.text import Text

from trocar import OutputInfo
from trocar._cli.output import plain, show, show_json, size_text, table


def test_json_has_numbers_that_json_lacks_as_strings(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"x": [math.nan, math.inf, -math.inf, 1.5]})
    assert json.loads(capsys.readouterr().out) == {"x": ["NaN", "Infinity", "-Infinity", 1.5]}


def test_dataclasses_tuples_and_arrays_become_plain() -> None:
    info = OutputInfo("", "Tensor", (1, 2), "float32", 8)
    assert plain([info, np.arange(2)]) == [
        {"pick": "", "type": "Tensor", "shape": [1, 2], "dtype": "float32", "byte_count": 8},
        [0, 1],
    ]


def test_pick_of_a_selector_is_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("feature map")
    rows.add_row('head["out"][0]')
    show(rows)
    show(Text(":cat: layer1[bold]"))
    assert 'head["out"][0]' in (out := capsys.readouterr().out)
    assert ":cat: layer1[bold]" in out


def test_pipe_gets_long_lines_whole_and_without_padding(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("a", "b")
    rows.add_row("x" * 150, "y")
    rows.add_row("x", "")
    show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "x" * 150 + "   y"
    assert lines[3] == "x"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (97_800_000, "97.8 MB"), (3e12, "3000.0 GB")]
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert size_text(int(count)) == text
