"""Exact, fast and bf16 calls of many threads at once: every call gets its own rows, at its own promise."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import trocar
from tests.integration.extraction.test_numerics import ENGINE, is_close, until_ready
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

TAP_SETS = (["conv", "fc"], ["relu@0", "fc/in"])
HALVED = [trocar.edit("conv", "scale", 0.5)]


@dataclass(frozen=True)
class Ask:
    """One call: what it takes, and where in the batch sizes and marks it stands."""

    index: int
    numerics: trocar.Numerics
    taps: list[str]
    is_edited: bool

    @property
    def images(self) -> Array:
        """A batch that no other call has: its rows are of a size of their own, and so are their values."""
        rows = 1 + self.index % 3
        marks = 1 + self.index + np.arange(rows, dtype=np.float32).reshape(-1, 1, 1, 1) / 4
        return np.asarray(noise(rows, 3, 8, 8, seed=self.index) * marks)

    @property
    def options(self) -> dict[str, Any]:
        return {"edits": HALVED} if self.is_edited else {}


# 3 numerics, 2 sets of taps, merged or not, 3 batch sizes, every tenth edited: all of them mixed.
ASKS = [
    Ask(
        index,
        ("exact", "fast", "bf16")[index % 3],
        TAP_SETS[index // 3 % 2],
        is_edited=index % 10 == 7,
    )
    for index in range(120)
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"plain": custom(Plain, (3, 8, 8), merge="everybody")}
    with running_server(models=models, device="cpu", engine=ENGINE) as server:
        build_here(server)
        yield server


@pytest.fixture(scope="module")
def solo(server: RunningServer) -> list[trocar.FeatureMaps]:
    """What each call gets from eager PyTorch with nobody beside it; the forms are ready afterwards."""
    with trocar.connect(server.address) as client:
        for taps in TAP_SETS:
            for numerics in ("fast", "bf16"):
                until_ready(server, client, "plain", taps, numerics)
        return [client.extract("plain", ask.images, ask.taps, **ask.options) for ask in ASKS]


@pytest.fixture(scope="module")
def found(server: RunningServer, solo: list[trocar.FeatureMaps]) -> list[trocar.FeatureMaps]:
    with trocar.connect(server.address) as client, ThreadPoolExecutor(12) as threads:

        def ask_for(ask: Ask) -> trocar.FeatureMaps:
            how = trocar.options(numerics=ask.numerics, merge=ask.index % 4 != 0)
            return client.extract("plain", ask.images, ask.taps, options=how, **ask.options)

        return list(threads.map(ask_for, ASKS))


def test_exact_calls_are_bit_equal_to_those_alone(
    found: list[trocar.FeatureMaps], solo: list[trocar.FeatureMaps]
) -> None:
    exact = [ask for ask in ASKS if ask.numerics == "exact" or ask.is_edited]
    assert len(exact) > 40
    for ask in exact:
        maps, alone = found[ask.index], solo[ask.index]
        done = maps.execution
        assert (done.numerics, done.engine, done.row_count) == ("exact", "eager", len(ask.images))
        assert (done.is_cached, done.asked) == (False, ask.numerics)
        assert bool(done.reason) == (ask.numerics != "exact")  # passes with edits are always exact
        assert all(maps[name].tobytes() == alone[name].tobytes() for name in alone)


@pytest.mark.parametrize("numerics", ["fast", "bf16"])
def test_the_others_keep_their_promise_row_by_row(
    found: list[trocar.FeatureMaps], solo: list[trocar.FeatureMaps], numerics: str
) -> None:
    for ask in ASKS:
        if ask.numerics != numerics or ask.is_edited:
            continue
        maps, alone = found[ask.index], solo[ask.index]
        assert maps.execution.engine != "eager"
        assert list(maps) == list(alone)
        for name in alone:
            assert maps[name].shape == alone[name].shape
            assert is_close(maps[name], alone[name], numerics)
            # Rows differ in size by their marks: another call's rows, or others of the same, would show.
            sizes = row_sizes(maps[name]) / row_sizes(alone[name])
            assert sizes == pytest.approx(1, rel=0.02)


def test_who_refuses_company_gets_none(found: list[trocar.FeatureMaps]) -> None:
    alone = [ask for ask in ASKS if ask.index % 4 == 0]
    assert [found[ask.index].execution.row_count for ask in alone] == [len(ask.images) for ask in alone]


def row_sizes(value: Array) -> Array:
    return np.asarray(np.linalg.norm(value.reshape(len(value), -1).astype(np.float64), axis=1))
