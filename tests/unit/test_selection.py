"""A run has a sample of long lists, and the tests of a change are those that reach what differs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.selection import reached, test_map
from tests.support.selection.test_map import Row, Test, TestMap
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


def reaching(name: str, *functions: str, seconds: float = 1.0, is_whole: bool = True) -> Row:
    return Row(Test(name, seconds, len(functions)), frozenset(functions), is_whole)


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
        reaching(
            "tests/a.py::test_wide", "service/x.py::f", "service/x.py::g", "service/y.py::C.h", seconds=2.0
        ),
        reaching("tests/b.py::test_narrow", "service/x.py::f"),
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
        reaching(f"tests/{file}.py::test_{i}", "f", *map(str, range(i))) for file in "ab" for i in range(9)
    ]
    kept = [test.name for test in test_map.joined(recorded).functions["f"]]
    assert kept == [f"tests/{file}.py::test_{i}" for i in range(4) for file in "ab"]


HERE = "tests/unit/test_selection.py::test_"
READ, NEW, SAMPLE = (
    HERE + name for name in (
        "a_map_is_read_as_it_was_written", "a_new_file_is_all_of_its_functions",
        "all_parameters_run_unless_a_sample_is_asked_for",
    )
)  # fmt: skip
MERGED, JOINED, IS_THERE = (
    f"tests/support/selection/test_map.py::{name}" for name in ("merged", "joined", "is_there")
)


def names(known: TestMap) -> dict[str, list[str]]:
    return {function: [test.name for test in tests] for function, tests in known.functions.items()}


def test_a_partial_run_keeps_the_rows_of_tests_that_did_not_run() -> None:
    known = test_map.joined([reaching(READ, MERGED, JOINED), reaching(NEW, JOINED)])
    made = test_map.merged(known, [reaching(NEW, IS_THERE)])
    assert names(made) == {IS_THERE: [NEW], JOINED: [READ], MERGED: [READ]}
    assert made.functions[MERGED] == [Test(READ, 1.0, 2)]
    assert names(test_map.merged(made, [])) == names(made)


def test_a_test_that_ran_in_part_also_keeps_what_it_reached_before() -> None:
    known = test_map.joined([reaching(NEW, MERGED, JOINED, seconds=3.0)])
    made = test_map.merged(known, [reaching(NEW, MERGED, IS_THERE, seconds=0.5, is_whole=False)])
    assert made.functions == {name: [Test(NEW, 3.0, 3)] for name in (IS_THERE, JOINED, MERGED)}


def test_tests_and_functions_that_are_gone_leave_the_map() -> None:
    renamed, moved = f"{HERE}of_another_name", "tests/unit/test_not_there.py::test_x"
    lost = ["tests/support/selection/test_map.py::of_another_name", "service/not_there.py::f"]
    known = test_map.joined([reaching(test, JOINED, *lost) for test in (NEW, renamed, moved)])
    assert names(test_map.merged(known, [reaching(SAMPLE, JOINED)])) == {JOINED: [SAMPLE, NEW]}


SIZES = "tests/unit/test_byte_sizes.py"
READS, REFUSES, STAYS = (
    f"{SIZES}::test_{name}"
    for name in (
        "a_size_is_read",
        "what_is_no_size_is_refused_with_an_example",
        "whole_numbers_stay_as_they_are",
    )
)
BYTE_COUNT = "proto/trocar_api/byte_sizes.py::byte_count"
RECORD = """
import pathlib, sys, pytest
from tests.support.selection import test_map

class Failing:
    def pytest_runtest_call(self, item):
        assert not item.name.endswith("[nan]")

test_map.FILE = pathlib.Path(sys.argv[1])
words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--record", *sys.argv[2:]]
sys.exit(pytest.main(words, plugins=[Failing()]))
"""


def recorded_over(known: list[Row], path: Path, *words: str) -> tuple[int, dict[str, list[str]]]:
    """Run tests of byte sizes, of which `nan` fails, and record them; return the exit code and the map.

    The map has these rows before.
    """
    test_map.write(test_map.joined(known), path)
    command = (sys.executable, "-c", RECORD, str(path), SIZES, *words)
    # Of the run that this test is in, which may be one of several workers, the other run knows nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, names(test_map.read(path))


def test_a_run_of_some_tests_records_into_the_map_that_is_there(tmp_path: Path) -> None:
    known = [reaching(test, JOINED) for test in (READS, REFUSES, STAYS)]
    code, made = recorded_over(known, tmp_path / "map.json", "-k", "is_read or (no_size and MiB)")
    assert (code, set(made[JOINED])) == (0, {REFUSES, STAYS})  # of `no_size` a part ran
    assert set(made[BYTE_COUNT]) == {READS, REFUSES}


def test_a_run_that_a_failure_ends_records_what_ran(tmp_path: Path) -> None:
    known = [reaching(test, JOINED) for test in (READS, REFUSES, STAYS)]
    code, made = recorded_over(known, tmp_path / "map.json", "-x")
    assert (code, set(made[JOINED])) == (1, {REFUSES, STAYS})
    assert set(made[BYTE_COUNT]) == {READS, REFUSES}


def test_seconds_are_those_of_a_sample_over_all_workers(tmp_path: Path) -> None:
    entry = {"collected": 100, "is_whole": True, "functions": {"f"}}
    reached.write_part(tmp_path, "gw0", {NEW: {**entry, "seconds": 3.0, "cases": 3}})
    reached.write_part(tmp_path, "gw1", {NEW: {**entry, "seconds": 1.0, "cases": 1, "functions": {"g"}}})
    (row,) = reached.read_parts(tmp_path)
    assert row == reaching(NEW, "f", "g", seconds=8.0, is_whole=False)


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
