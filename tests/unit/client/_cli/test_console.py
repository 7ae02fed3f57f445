import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.text import Text

from trocar import OutputInfo
from trocar._base.tables import size_text
from trocar._base.text_tables import table_width, text_table
from trocar._cli.console import plain, show, show_json, table


def test_json_has_numbers_that_json_lacks_as_strings(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"x": [math.nan, math.inf, -math.inf, 1.5]})
    assert json.loads(capsys.readouterr().out) == {"x": ["NaN", "Infinity", "-Infinity", 1.5]}


def printed(code: str) -> bytes:
    """Run code that prints with `console` as `c`, in a process whose output is strict UTF-8."""
    code = f"import trocar._cli.console as c; {code}"
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "utf-8:strict",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    ).stdout


def test_json_with_a_path_that_is_no_utf_8_can_be_written() -> None:
    assert json.loads(printed("c.show_json({'é': 'caf\\udce9.txt'})")) == {"é": "caf\udce9.txt"}


def test_a_table_with_a_path_that_is_no_utf_8_can_be_written() -> None:
    code = "rows = c.table('name'); rows.add_row('caf\\udce9.txt'); c.show(rows)"
    assert "caf\\udce9.txt" in printed(code).decode()


def test_dataclasses_tuples_and_arrays_become_plain() -> None:
    info = OutputInfo("", "Tensor", (1, 2), "float32", 8)
    assert plain([info, np.arange(2)]) == [
        {"pick": "", "type": "Tensor", "shape": [1, 2], "dtype": "float32", "byte_count": 8, "axes": []},
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


PATHS = [f"features.denseblock{block}.denselayer{layer}.conv2" for block in (1, 12) for layer in (1, 24)]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_fit_and_every_name_can_be_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = table("feature map", "shape", "mean", "zero_fraction", "absmax", right=("mean",))
    for path in PATHS:
        rows.add_row(path, "(16, 1024, 14, 14)", "0.00012345", "0.5", "123.45")
    show(rows)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    first_column = "".join(line[: _end_of_first_column(shown)].strip() for line in shown.splitlines())
    assert all(path in first_column for path in PATHS)
    assert re.findall(r"denselayer\d+", shown) == [path.split(".")[2] for path in PATHS]


def _end_of_first_column(shown: str) -> int:
    """Where the rule under the title of the second column begins, or the end where there are no columns."""
    return shown.find("  ") if "─" not in shown else shown.splitlines()[0].find("shape")


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_tables_of_results_fit_and_no_word_is_broken(columns: int) -> None:
    head = ("module", "type", "gradient", "zeros", "of weights", "flags")
    rows = [(path, "BatchNorm2d", "1.2345e-05", "50.0%", "0.00123", "vanishing, dead") for path in PATHS]
    with table_width(columns):
        shown = text_table(head, rows, head[2:-1])
    assert max(map(len, shown.splitlines())) <= columns
    words = set(re.split(r"[\s.,;]+", shown))
    assert {"denselayer24", "BatchNorm2d", "vanishing", "dead", "conv2"} <= words
    assert shown.count("2345e-05") == len(PATHS)


def test_what_does_not_fit_as_columns_becomes_lines_under_each_name() -> None:
    with table_width(30):
        shown = text_table(("module", "type", "norm", "flag"), [("conv1", "Conv2d" * 3, "0.5" * 3, "")])
    assert shown == "conv1\n    type Conv2dConv2dConv2d;\n    norm 0.50.50.5"
