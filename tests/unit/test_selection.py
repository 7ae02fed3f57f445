"""A run has a sample of long lists, and the tests of a change are those that reach what differs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.selection import test_map
from tests.support.selection.test_map import Test, TestMap
from tools.changed_tests import Change, changed_lines, choices, chosen, functions_at
from tools.importing_tests import importing_tests

SOURCE = """
LIMIT = 3

def first():
    def inner():
        return 1
    return inner()

class Thing:
    size: int = 0

    @property
    def second(self):
        return 2
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_run_has_so_many_parameters_of_each_test_and_tells_the_seed() -> None:
    file = "tests/unit/test_byte_sizes.py"
    words = ("--collect-only", "-q", "--sample", "2", "--sample-seed", "5", file)
    first, again = run(*words), run(*words)
    names = [line for line in first.stdout.splitlines() if "::" in line]
    functions = [name.partition("[")[0] for name in names]
    assert max(map(functions.count, functions)) == 2
    assert names == [line for line in again.stdout.splitlines() if "::" in line]
    assert "--sample-seed 5" in run("--sample", "2", "--sample-seed", "5", file).stdout


def test_all_parameters_run_unless_a_sample_is_asked_for() -> None:
    stdout = run("--collect-only", "-q", "tests/unit/storage/test_tensor_file.py").stdout
    function = "test_every_dtype_and_shape_comes_back_here_and_in_safetensors"
    assert stdout.count(function) > 50


@pytest.mark.parametrize(
    ("diff", "lines"),
    [
        ("@@ -1,2 +3,4 @@ def x", {3, 4, 5, 6}),
        ("@@ -7 +8 @@", {8}),
        ("@@ -7,2 +6,0 @@", {6}),
        ("@@ -1 +1 @@\n-a\n+b\n@@ -9,0 +10,2 @@", {1, 10, 11}),
    ],
)
def test_the_lines_of_a_change_are_those_of_the_new_file(diff: str, lines: set[int]) -> None:
    assert changed_lines(diff) == lines


@pytest.mark.parametrize(
    ("line", "name"),
    [(2, ""), (4, "first"), (6, "first"), (10, ""), (12, "Thing.second"), (14, "Thing.second")],
)
def test_a_line_is_in_the_outermost_function_around_it(line: int, name: str) -> None:
    assert functions_at(SOURCE, "a.py", {line}) == [f"a.py::{name}"]


def test_a_new_file_is_all_of_its_functions() -> None:
    assert functions_at(SOURCE, "a.py", None) == ["a.py::first", "a.py::Thing.second"]


def narrow(name: str, seconds: float = 1.0) -> Test:
    return Test(name, seconds, 1)


def test_tests_of_all_functions_come_in_turns_until_their_time_is_up() -> None:
    here = "tests/unit/test_selection.py::test_"
    names = [here + name for name in (
        "a_new_file_is_all_of_its_functions", "all_parameters_run_unless_a_sample_is_asked_for",
        "a_map_is_read_as_it_was_written",
    )]  # fmt: skip
    lists = [[narrow(names[0]), narrow(names[1])], [narrow(names[2], 5.0)]]
    assert chosen(lists, 100) == [names[0], names[2], names[1]]
    assert chosen(lists, 2) == names[:2]
    assert chosen([[narrow("tests/unit/test_gone.py::test_x")]], 9) == []  # a map may be older than the tests


def test_a_file_that_no_run_recorded_has_the_tests_that_import_it() -> None:
    lists = choices(Change(["service/trocar_server/tasks.py::shielded"]), TestMap())
    assert "tests/unit/test_tasks.py" in [test.name for test in lists[0]]


def test_importing_tests_are_found_through_what_tests_share() -> None:
    tests = importing_tests(ROOT, "tests/support/selection/test_map.py")
    assert "tests/unit/test_selection.py" in tests
    assert importing_tests(ROOT, "client/trocar/_base/nothing_there.py") == ["tests/unit/client/_base"]


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorded = [
        ("tests/a.py::test_wide", 2.0, {"service/x.py::f", "service/x.py::g", "service/y.py::C.h"}),
        ("tests/b.py::test_narrow", 1.0, {"service/x.py::f"}),
    ]
    path = tmp_path / "map.json"
    test_map.write(test_map.joined(recorded), path)
    read = test_map.read(path)
    assert [test.name for test in read.functions["service/x.py::f"]] == [
        "tests/b.py::test_narrow",
        "tests/a.py::test_wide",
    ]
    assert read.functions["service/y.py::C.h"] == [Test("tests/a.py::test_wide", 2.0, 3)]
    assert [[test.name for test in tests] for tests in read.of_file("service/x.py")][1] == [
        "tests/a.py::test_wide"
    ]


def test_a_function_keeps_the_narrowest_tests_of_several_files() -> None:
    recorded = [
        (f"tests/{file}.py::test_{i}", 1.0, {"f", *map(str, range(i))}) for file in "ab" for i in range(9)
    ]
    kept = [test.name for test in test_map.joined(recorded).functions["f"]]
    assert kept == [f"tests/{file}.py::test_{i}" for i in range(4) for file in "ab"]


def test_functions_of_every_thread_are_recorded() -> None:
    code = """
import threading
from tests.support.selection.reached import Recorder
recorder = Recorder()
from trocar_api.byte_sizes import byte_count
recorder._take()
recorder._test = "test"
thread = threading.Thread(target=byte_count, args=(4096,))
thread.start()
thread.join()
print(*sorted(recorder.close()["test"]["functions"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["proto/trocar_api/byte_sizes.py::byte_count"]
