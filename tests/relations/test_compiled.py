"""Compiled passes keep their promise for any numbers: see `compiled.py`."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.relations.compiled import COMPILED, ENGINE, MERGED, SPECIAL, company, compiled, one_input
from tests.relations.hosting import tables
from tests.relations.layouts import places
from tests.relations.test_relations import COUNT, SEED
from tests.support.models.row_models import MIXES, WIDTH, Mixing
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.engine.compiled.backends import graph_tracing
from trocar_server.engine.compiled.compiled_executor import CompiledExecutor
from trocar_server.engine.run import runner

NAMES = COMPILED if COUNT else COMPILED[:1]
TOGETHER = MERGED if COUNT else MERGED[:2]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        **tables(NAMES),
        **{f"{name}-merged": {**table, "merge": "everybody"} for name, table in tables(TOGETHER).items()},
        **{name: {**custom(Mixing, (WIDTH,), arguments=(name,)), "merge": "everybody"} for name in MIXES},
    }
    with running_server(models=models, device="cpu", engine=ENGINE) as running:
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
        maps = client.extract(NAMES[0], inputs, ["second"], options=trocar.options(numerics="fast"))
        engines.append(maps.execution.engine)
        server.run(server.engine.compiled.settled)
    assert engines[-1] != "eager"


@pytest.mark.parametrize("name", TOGETHER)
def test_calls_that_share_a_pass_know_nothing_of_each_other(
    server: RunningServer, client: trocar.Client, name: str
) -> None:
    """Whatever comes before and after them, however large."""
    for number in range(COUNT or 1):
        chance = Random(f"{SEED} {name} {number}")
        inputs = [one_input(name, chance.randrange(10**6)) for _ in range(4)]
        inputs = [(scale * one)[: chance.randint(1, 3)] for scale, one in zip(SCALES, inputs, strict=True)]
        taps = [place.selector for place in places(name) if place.is_float and place.samples == 0]
        outcome, most = company(server, client, f"{name}-merged", inputs, chance.sample(taps, 2))
        assert most > 3, "no calls were merged"
        assert not outcome.comparison.differences, number


SCALES = (1.0, 1e3, 1.0, 1e-3)


def _mixed(server: RunningServer, client: trocar.Client, name: str) -> list[Any]:
    """Ask a model that mixes its rows in some way."""
    inputs = [np.random.default_rng(seed).normal(size=(2, WIDTH)).astype(np.float32) for seed in range(3)]
    outcome, _ = company(server, client, name, inputs, ["linear"])
    return outcome.comparison.differences


@pytest.mark.parametrize("name", sorted(MIXES.keys() - {"earlier"}))  # which has no compiled pass
def test_calls_of_a_model_that_mixes_rows_know_nothing_of_each_other(
    server: RunningServer, client: trocar.Client, name: str
) -> None:
    assert not _mixed(server, client, name)


@pytest.mark.parametrize("name", ["cumsum", "first", "mean"])
def test_a_merge_without_a_proof_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_tracing, "why_mixed", lambda *_: "")
    models: dict[str, Any] = {name: {**custom(Mixing, (WIDTH,), arguments=(name,)), "merge": "everybody"}}
    with (
        running_server(models=models, device="cpu", engine=ENGINE) as server,
        trocar.connect(server.address) as client,
    ):
        build_here(server)
        assert _mixed(server, client, name)


def _looks_at_no_number(patch: pytest.MonkeyPatch) -> None:
    for name in ("are_within", "are_finite"):
        patch.setattr(runner, name, lambda _: True)


def _is_rounded(patch: pytest.MonkeyPatch) -> None:
    original = CompiledExecutor.run

    def rounded(self: CompiledExecutor, calls: Any) -> Any:
        passes = original(self, calls)
        for found in passes:
            for name, value in found.values.items():
                found.values[name] = value.to(torch.bfloat16).to(value.dtype)
        return passes

    patch.setattr(CompiledExecutor, "run", rounded)


FAULTS = {"usual": _is_rounded, "nan": _looks_at_no_number}
"""By the kind of numbers that shows them."""


@pytest.mark.parametrize("special", FAULTS)
def test_a_planted_fault_is_noticed(
    server: RunningServer, client: trocar.Client, special: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[special](monkeypatch)
    cases = [compiled(server, client, NAMES[0], special, Random(number)) for number in range(5)]
    assert any(case.comparison.differences for case in cases)
