"""The page on reliability names tests that exist, and all of these belong to the suite."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support.reliability_page import ROOT, named_tests
from tests.support.scale import count


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_a_test_that_the_page_names_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert any(test.startswith("test_") for test in found) or name
    assert not name or name in found


def test_every_file_of_the_folder_is_on_the_page() -> None:
    files = {f"tests/reliability/{path.name}" for path in (ROOT / "tests/reliability").glob("test_*.py")}
    assert files - {"tests/reliability/test_page.py"} <= {file for file, _ in named_tests()}


def test_tests_that_the_page_names_carry_the_marker() -> None:
    files = ["tests/unit/test_durable.py", "tests/unit/models/test_convert.py"]
    command = [sys.executable, "-m", "pytest", "-m", "reliability", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "test_the_bytes_are_on_disk_before_the_name_is" in listed
    assert "test_a_pickle_with_code_is_refused_and_never_run" in listed
    assert "test_tied_weights_are_converted" not in listed


def test_a_scale_multiplies_and_a_number_of_its_own_wins() -> None:
    code = "from tests.support.scale import count; print(count(7), count(7, 'OWN'))"
    environment = {**os.environ, "RELIABILITY_SCALE": "20", "OWN": "3"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["140", "3"]
    assert count(7, "SURELY_NOT_SET") % 7 == 0
