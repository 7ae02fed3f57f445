"""Training on every way has equal bits: see `trainings.py`."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.relations import planted_training, trainings
from tests.relations.planted_training import PLANTED
from tests.relations.test_relations import COUNT, SEED
from tests.relations.trainings import (
    KILLED,
    TRAINED,
    WAYS,
    Restartable,
    is_possible,
    killable,
    trainable,
    training,
)
from tests.support.servers.server_processes import server_processes

# Of modules that are checkpointed in the reentrant way, in passes without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
NAMES = TRAINED if COUNT else TRAINED[2:4]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    with trainable(tmp_path_factory.mktemp("data"), NAMES) as running:
        yield running


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    with (
        server_processes(first=(trainings.__name__,)) as processes,
        killable(tmp_path_factory.mktemp("data"), processes, NAMES) as running,
    ):
        yield running


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_another_way_have_equal_bits(hosts: Restartable, name: str, way: str) -> None:
    _compare(hosts, name, way)


@pytest.mark.parametrize("way", KILLED)
@pytest.mark.parametrize("name", NAMES)
def test_steps_around_a_kill_have_equal_bits(killed: Restartable, name: str, way: str) -> None:
    _compare(killed, name, way)


def _compare(hosts: Restartable, name: str, way: str) -> None:
    for number in range((COUNT or 1) if is_possible(way, name) else 0):
        outcome = training(way, hosts, name, Random(f"{SEED} {way} {name} {number}"))
        assert not outcome.comparison.differences, number


FAMILY = "volume"
"""Where the planted faults show."""


def test_every_way_has_a_planted_fault() -> None:
    assert PLANTED.keys() == WAYS.keys()


@pytest.mark.parametrize("way", PLANTED)
def test_a_way_fails_on_its_planted_fault(
    hosts: Restartable, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[way](monkeypatch)
    assert training(way, hosts, FAMILY, Random(0)).comparison.differences


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    planted = f"{planted_training.__name__}:{planted_training.plant_for_good.__name__}"
    with (
        server_processes(first=(trainings.__name__, planted)) as processes,
        killable(tmp_path_factory.mktemp("data"), processes, (FAMILY,)) as hosts,
    ):
        yield hosts


@pytest.mark.parametrize("way", KILLED)
def test_a_kill_after_which_state_is_forgotten_is_noticed(forgetful: Restartable, way: str) -> None:
    assert training(way, forgetful, FAMILY, Random(0)).comparison.differences
