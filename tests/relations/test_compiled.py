"""Compiled passes keep their promise for any numbers: see `compiled.py`."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

import trocar
from tests.relations.compiled import COMPILED, ENGINE, SPECIAL, compiled, one_input
from tests.relations.hosting import tables
from tests.relations.test_relations import COUNT, SEED
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from trocar_server.engine.compiled import compiled_pass

NAMES = COMPILED if COUNT else COMPILED[:1]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=tables(NAMES), device="cpu", engine=ENGINE) as running:
        build_here(running)
        yield running


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_pass_is_close_to_an_exact_one(
    server: RunningServer, client: trocar.Client, name: str, special: str
) -> None:
    for number in range(COUNT or 1):
        outcome = compiled(server, client, name, special, Random(f"{SEED} {name} {special} {number}"))
        assert not outcome.comparison.differences, number


def test_a_pass_of_these_tests_is_compiled(server: RunningServer, client: trocar.Client) -> None:
    inputs, engines = one_input(NAMES[0], 0), []
    for _ in range(7):
        maps = client.extract(NAMES[0], inputs, ["second"], numerics="fast")
        engines.append(maps.execution.engine)
        server.run(server.engine.compiled.settled)
    assert engines[-1] != "eager"


def _looks_at_no_number(patch: pytest.MonkeyPatch) -> None:
    for name in ("are_within", "are_finite"):
        patch.setattr(compiled_pass, name, lambda _: True)


def _is_rounded(patch: pytest.MonkeyPatch) -> None:
    original = compiled_pass._values

    def rounded(*given: Any) -> Any:
        return [
            {name: value.to(torch.bfloat16).to(value.dtype) for name, value in values.items()}
            for values in original(*given)
        ]

    patch.setattr(compiled_pass, "_values", rounded)


FAULTS = {"usual": _is_rounded, "nan": _looks_at_no_number}
"""By the kind of numbers that shows them."""


@pytest.mark.parametrize("special", FAULTS)
def test_a_planted_fault_is_noticed(
    server: RunningServer, client: trocar.Client, special: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[special](monkeypatch)
    cases = [compiled(server, client, NAMES[0], special, Random(number)) for number in range(5)]
    assert any(case.comparison.differences for case in cases)
