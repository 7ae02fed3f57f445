"""Warm calls: the files that one enters are those of `docs/architecture.md`, and few functions."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PACKAGES = {
    "client": ROOT / "client/trocar",
    "service": ROOT / "service/trocar_server",
    "proto": ROOT / "proto",
}
MOST_CALLS = 200
MOST_FUNCTIONS = {"extract": 120, "training step": 131}
MOST_FILES = {"extract": 34, "training step": 31}
TABLES = {"extract": "An `extract` of one tap:", "training step": "A training step:"}


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """What the tool counts, in a process whose threads all begin after its profile hook."""
    command = [sys.executable, "tools/warm_calls.py", "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def rows_of(name: str) -> list[list[str]]:
    text = (ROOT / "docs/architecture.md").read_text()
    _, _, behind = text.partition(TABLES[name] + "\n\n")
    lines = behind.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def path_of(shown: str) -> Path:
    """The path of a file or folder as the tables show it."""
    found = [folder / shown for folder in PACKAGES.values() if (folder / shown).exists()]
    assert found, f"docs/architecture.md names '{shown}', which does not exist"
    return found[0]


def paths_of(cell: str) -> list[str]:
    return [str(path_of(shown).relative_to(ROOT)) for shown in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("name", list(TABLES))
def test_a_repeated_call_enters_the_files_of_the_table_in_order(counted: dict[str, Any], name: str) -> None:
    shown = [path for _, files, _ in rows_of(name) for path in paths_of(files)]
    entered = counted[name]["files"]
    for package in PACKAGES:  # client and server run at the same time
        ours = [path for path in entered if path.startswith(package)]
        assert [path for path in shown if path.startswith(package)] == ours


@pytest.mark.parametrize("name", list(TABLES))
def test_what_the_table_names_besides_exists_and_is_not_entered(counted: dict[str, Any], name: str) -> None:
    shown = [path for *_, others in rows_of(name) for path in paths_of(others)]
    assert shown
    assert not set(shown) & set(counted[name]["files"])


@pytest.mark.parametrize("name", list(TABLES))
def test_a_repeated_call_enters_few_functions_in_few_files(counted: dict[str, Any], name: str) -> None:
    assert counted[name]["calls"] <= MOST_CALLS
    assert counted[name]["functions"] <= MOST_FUNCTIONS[name]
    assert len(counted[name]["files"]) <= MOST_FILES[name]
