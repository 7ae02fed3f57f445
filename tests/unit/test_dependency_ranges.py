"""Ranges of dependencies in pyproject.toml, the constraints and the image's lock."""

import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT
from tools.make_environment import EXTRAS, floors, requirements, shared
from tools.write_lock import EXTRAS as IMAGE_EXTRAS
from tools.write_lock import LOCK, lines, locked

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
CONSTRAINTS: dict[str, str] = {
    canonicalize_name(line.partition("==")[0]): line.strip().partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
}
SMALL = {
    "name": "Thing",
    "dependencies": ["a>=1.2,<3", "B_b==4"],
    "optional-dependencies": {"x": ["Thing[y]", "c~=5.0"], "y": ["d>=6"], "bad": ["e<2"]},
}


def test_floors_are_the_lowest_versions_of_a_project_and_of_the_extras_that_its_extras_name() -> None:
    assert floors(SMALL, ("x",)) == {"a": "1.2", "b-b": "4", "c": "5.0", "d": "6"}


def test_a_requirement_without_a_floor_is_an_error() -> None:
    with pytest.raises(ValueError, match="e<2 has no floor"):
        floors(SMALL, ("bad",))


def test_every_extra_for_users_is_tried_at_both_ends() -> None:
    for_users = set(PROJECT["optional-dependencies"]) - {"dev", "demo", "test"}
    assert for_users <= {*EXTRAS, "plot"}  # which the extra `notebook` brings
    assert set(floors(PROJECT)) >= {"grpcio", "protobuf", "numpy", "torch", "matplotlib", "pytest"}


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"torch": "2.0", "numpy": "1.0", "grpcio": "1.0"}, {"torch", "numpy"}),
        ({"torch": "2.1", "numpy": "1.0", "grpcio": "2.0"}, set()),
        ({}, set()),
    ],
)
def test_packages_are_shared_beside_the_same_torch_only(
    installed: dict[str, str], expected: set[str]
) -> None:
    assert shared({"torch": "2.0", "numpy": "1.0", "grpcio": "2.0"}, installed) == expected


def every_requirement() -> dict[str, Requirement]:
    """Return each requirement once, in an order of names: extras and specifiers are sets, of any order."""
    found = requirements(PROJECT, (*EXTRAS, "dev"))
    named = {f"{each.name}{','.join(sorted(map(str, each.specifier)))}": each for each in found}
    return dict(sorted(named.items()))


@pytest.mark.parametrize("requirement", every_requirement().values(), ids=list(every_requirement()))
def test_the_tested_version_is_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(CONSTRAINTS[canonicalize_name(requirement.name)])


def test_the_lock_has_the_tested_versions_and_hashes_of_all() -> None:
    build = {canonicalize_name(Requirement(text).name) for text in PYPROJECT["build-system"]["requires"]}
    # Not in .venv: hatchling and what only it needs. setuptools: which torch names, every environment's own.
    untested = build | {"tomlkit", "trove-classifiers", "setuptools"}
    tested = {name: version for name, version in locked().items() if name not in untested}
    assert {name: CONSTRAINTS.get(name) for name in tested} == tested
    entries = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_has_all_that_the_image_may_install() -> None:
    needed = {canonicalize_name(entry.name) for entry in requirements(PROJECT, IMAGE_EXTRAS)}
    assert needed | {"hatchling"} <= set(locked())


def test_a_package_without_a_hash_is_no_part_of_a_lock() -> None:
    assert lines(["b==2", "a==1"], {"a==1": {"f0"}, "b==2": {"f2", "f1"}}).splitlines()[2:] == [
        "a==1 --hash=sha256:f0",
        "b==2 --hash=sha256:f1 --hash=sha256:f2",
    ]
    with pytest.raises(SystemExit, match="no hash of a==1"):
        lines(["a==1"], {"a==1": set()})
