"""Training on every way has equal bits: see `trainings.py`."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.relations.test_relations import COUNT, SEED
from tests.relations.trainings import TRAINED, WAYS, Restartable, trainable, training

NAMES = TRAINED if COUNT else TRAINED[2:4]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    with trainable(tmp_path_factory.mktemp("data"), NAMES) as running:
        yield running


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_another_way_have_equal_bits(hosts: Restartable, name: str, way: str) -> None:
    for number in range(COUNT or 1):
        outcome = training(way, hosts, name, Random(f"{SEED} {way} {name} {number}"))
        assert not outcome.comparison.differences, number
