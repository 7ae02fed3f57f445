"""Compiled passes keep their promise for any numbers: see `compiled.py`."""

from collections.abc import Iterator
from random import Random

import pytest

import trocar
from tests.relations.compiled import COMPILED, ENGINE, SPECIAL, compiled, one_input
from tests.relations.hosting import tables
from tests.relations.test_relations import COUNT, SEED
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server

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
