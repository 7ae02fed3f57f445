"""The page on reliability names tests that exist, and all of these belong to the suite."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.files.reliability_page import is_named, named_tests
from tests.support.files.scale import count


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_a_test_that_the_page_names_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    wanted = rf"^(async )?def {name}\b" if name else r"^(async def test_|def test_|Test)"
    assert re.search(wanted, text, re.MULTILINE)


def test_every_file_of_the_folder_is_on_the_page() -> None:
    files = {f"tests/reliability/{path.name}" for path in (ROOT / "tests/reliability").glob("test_*.py")}
    assert files <= {file for file, _ in named_tests()}


def test_tests_that_the_page_names_carry_the_marker(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("reliability") is not None  # as the page names this file


@pytest.mark.parametrize(
    ("file", "name", "cls", "expected"),
    [
        ("a.py", "test_x", "", True),
        ("a.py", "test_y", "", False),
        ("b.py", "test_anything", "", True),
        ("b.py", "test_anything", "TestClass", True),
        ("c.py", "test_x", "", False),
    ],
)
def test_a_name_stands_for_one_test_and_a_file_for_all(
    file: str, name: str, cls: str, expected: bool
) -> None:
    assert is_named(file, name, cls, {("a.py", "test_x"), ("b.py", "")}) is expected


def test_a_scale_multiplies_and_a_number_of_its_own_wins() -> None:
    code = "from tests.support.files.scale import count; print(count(7), count(7, 'OWN'))"
    environment = {**os.environ, "RELIABILITY_SCALE": "20", "OWN": "3"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["140", "3"]
    assert count(7, "SURELY_NOT_SET") % 7 == 0
