"""Copies for another thread."""

import torch
from torch import nn
from torchvision.models import mnasnet1_3

from tests.unit.training.stores import assert_same_state, assert_same_tensors, bits, make_state
from trocar_server.training.files.snapshots import (
    same_memory,
    snapshot,
    snapshot_state_dict,
    snapshot_tensors,
)


def test_a_snapshot_stays_as_it_is_while_the_trainer_goes_on() -> None:
    state = make_state()
    before = {name: bits(tensor) for name, tensor in state.tensors.items()}
    copied = snapshot(state)
    for tensor in state.tensors.values():
        tensor.zero_()
    assert {name: bits(tensor) for name, tensor in copied.tensors.items()} == before


def test_a_snapshot_is_contiguous_and_equal() -> None:
    state = make_state(3)
    copied = snapshot(state)
    assert_same_state(copied, state)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in copied.tensors.values())


def test_tied_tensors_are_copied_once_and_others_apart() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "one": weight,
        "two": weight.view(3, 4),
        "transposed": weight.t(),
        "rows": weight[:2],
        "shifted": weight.reshape(-1)[1:],
        "bits": weight.view(torch.int32),
        "empty": torch.empty(0),
        "other empty": torch.empty(0),
    }
    assert same_memory(tensors) == {"two": "one"}
    copied = snapshot_tensors(tensors)
    assert copied["two"] is copied["one"]
    assert len({id(tensor) for tensor in copied.values()}) == len(tensors) - 1
    assert_same_tensors(copied, tensors)


def test_a_conjugated_view_is_not_taken_for_what_it_is_a_view_of() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    copied = snapshot_tensors({"plain": values, "conjugated": values.conj()})
    assert copied["conjugated"].tolist() == [1 - 2j, 3 + 4j]
    assert copied["plain"].tolist() == [1 + 2j, 3 - 4j]


def test_what_does_not_change_is_not_copied() -> None:
    frozen, trained = torch.ones(3), torch.ones(3)
    copied = snapshot_tensors({"frozen": frozen, "trained": trained}, unchanging=("frozen",))
    assert copied["frozen"].data_ptr() == frozen.data_ptr()
    assert copied["trained"].data_ptr() != trained.data_ptr()


def test_a_state_dict_keeps_its_versions() -> None:
    module = mnasnet1_3()
    copied = snapshot_state_dict(module)
    assert copied._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    assert list(copied) == list(module.state_dict())
    mnasnet1_3().load_state_dict(copied)


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_is_no_tensor_is_left_out_of_a_state_dict() -> None:
    assert list(snapshot_state_dict(WithExtra(1, 1))) == ["weight", "bias"]
