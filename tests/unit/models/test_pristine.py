"""What passes of a model write to is put back, or it is not used any more."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models.writing_models import (
    WRITING,
    AddsLater,
    AddsRarely,
    AddsToData,
    HalvesData,
    HalvesRarely,
    NormsByFunction,
    Replaces,
    Writing,
    tensor_bits,
)
from trocar_server.engine.schedule import lease
from trocar_server.engine.schedule.lease import Replica, StateWrittenError
from trocar_server.errors import ServiceError
from trocar_server.models import Pristine, pristine

LARGE = torch.full((2, 4), 60.0)
FOUND_AT_LOAD: dict[type[Writing], tuple[str, ...]] = {
    AddsToData: ("seen",),
    HalvesData: ("after.weight",),
    NormsByFunction: ("seen", "spread"),
}
"""Tensors that are written to without a version."""

SERVICE = Path(lease.__file__).parents[2]


@pytest.mark.parametrize("kind", [AddsRarely, HalvesRarely])
def test_a_first_write_is_put_back_and_the_next_pass_has_copies(kind: type[Writing]) -> None:
    model = kind().eval().requires_grad_(False)
    before, replica = tensor_bits(model), Replica(Pristine(model))
    with pytest.raises(StateWrittenError), replica.passing() as module:
        module(LARGE)
    assert tensor_bits(model) == before
    with torch.no_grad():
        expected = kind().eval()(LARGE)
    for _ in range(2):
        with replica.passing() as module:
            assert torch.equal(module(LARGE), expected)
    assert tensor_bits(model) == before


def test_work_runs_again_where_its_pass_was_the_first_to_write() -> None:
    model = AddsRarely().eval().requires_grad_(False)
    with torch.no_grad():
        expected = AddsRarely().eval()(LARGE)
    assert torch.equal(Replica(Pristine(model)).run(lambda module: module(LARGE)), expected)


@pytest.mark.parametrize("kind", WRITING)
def test_a_pass_that_fails_leaves_nothing(kind: type[Writing]) -> None:
    model = kind().eval().requires_grad_(False)
    before, replica = tensor_bits(model), Replica(Pristine(model, FOUND_AT_LOAD.get(kind, ())))
    for _ in range(3):
        with suppress(KeyError), replica.passing() as module:
            module(LARGE)
            raise KeyError
    assert tensor_bits(model) == before


def test_a_replica_whose_entries_were_replaced_is_made_anew() -> None:
    model = Replaces().eval().requires_grad_(False)
    replica = Replica(Pristine(model))
    used = replica.module
    with replica.passing() as module:
        module(LARGE)
    assert replica.module is not used
    assert replica.module.get_buffer("seen") is model.seen


def test_a_large_model_whose_parameter_was_written_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pristine, "_SMALL_BYTES", 0)
    replica = Replica(Pristine(HalvesRarely().eval().requires_grad_(False)))
    with pytest.raises(StateWrittenError), replica.passing() as module:
        module(LARGE)
    with pytest.raises(ServiceError, match=r"written to its 'after.weight'.*load the model again"):
        replica.run(lambda module: module(LARGE))


def test_a_write_of_another_tree_over_the_same_memory_is_put_back() -> None:
    model = AddsLater().eval().requires_grad_(False)
    before, original = tensor_bits(model), Pristine(model)
    original.is_fixed = True
    replica = Replica(original)
    replica.run(lambda module: module(LARGE))
    model.seen.detach().add_(1)
    replica.run(lambda module: module(LARGE))
    assert tensor_bits(model) == before


def test_copies_follow_changes_between_passes() -> None:
    model = AddsRarely().eval().requires_grad_(False)
    replica = Replica(Pristine(model), is_live=True)
    replica.run(lambda module: module(0 * LARGE))
    model.seen.add_(5)
    with pytest.raises(StateWrittenError), replica.passing() as module:
        module(LARGE)
    assert torch.equal(model.seen, torch.full((4,), 5.0))


def test_models_that_write_nothing_keep_their_tree() -> None:
    replica = Replica(Pristine(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()))
    used = replica.module
    replica.run(lambda module: module(LARGE))
    assert replica.module is used


def test_no_pass_runs_on_a_tree_over_a_hosted_model_but_by_its_pristine() -> None:
    """Trees of a hosted model are made in one place: elsewhere no replica is made of one to run it."""
    pattern = re.compile(r"make_(?:replica|training_copy)\((?:self\.|deployment\.)?_?hosted\.module")
    made = [path for path in SERVICE.rglob("*.py") if pattern.search(path.read_text())]
    assert not made
