from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torchvision.models import mnasnet0_5

from tests.unit.models.conftest import assert_same_state, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.matching import load_matching


def test_every_key_that_does_not_fit_is_in_one_error() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    state = OrderedDict(module.state_dict())
    del state["0.bias"]
    state["1.weight"] = torch.zeros(7, 3)
    state["2.weight"] = torch.zeros(1)
    with pytest.raises(ServiceError) as error:
        load_matching(module, state, "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_MISMATCH
    assert error.value.details == {
        "missing": "0.bias",
        "unexpected": "2.weight",
        "wrong_shape": "1.weight (7, 3), the model has (4, 3)",
    }
    assert all(
        key in error.value.message for key in ("0.bias", "2.weight", "1.weight (7, 3)", "w.safetensors")
    )


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_details() -> None:
    with pytest.raises(ServiceError, match=r"100 unexpected: .* and 80 more") as error:
        load_matching(nn.Identity(), OrderedDict((f"k{i:03}", torch.zeros(1)) for i in range(100)), "w")
    assert len(error.value.details["unexpected"].splitlines()) == 100


def test_a_state_dict_from_before_batch_counts_still_loads() -> None:
    original = nn.Sequential(nn.BatchNorm2d(2))
    state = OrderedDict(
        (key, value) for key, value in original.state_dict().items() if "num_batches" not in key
    )
    restored = nn.Sequential(nn.BatchNorm2d(2))
    load_matching(restored, state, "w")
    assert_same_state(restored, original)


def test_mnasnet_loads_from_a_file_that_lost_its_module_versions() -> None:
    original, restored = mnasnet0_5(weights=None), mnasnet0_5(weights=None)
    load_matching(restored, OrderedDict(original.state_dict().items()), "w")
    assert_same_state(restored, original)


def test_one_name_of_a_tied_pair_is_enough(tmp_path: Path) -> None:
    saved, module = _tied(), _tied()
    save_model(saved, str(tmp_path / "w.safetensors"))  # safetensors' own: it leaves one name out
    state = OrderedDict(load_file(tmp_path / "w.safetensors"))
    assert len(state) == 2
    load_matching(module, state, "w.safetensors")
    assert_same_state(module, saved)


def test_no_name_of_a_tied_pair_is_a_mismatch() -> None:
    state = OrderedDict(_tied().state_dict())
    del state["0.weight"], state["1.weight"]
    with pytest.raises(ServiceError) as error:
        load_matching(_tied(), state, "w.safetensors")
    assert error.value.details == {"missing": "0.weight\n1.weight"}


def _tied() -> nn.Sequential:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    module[1].weight = module[0].weight
    return module


def test_values_are_cast_to_the_models_dtype() -> None:
    module = nn.Linear(2, 2)
    load_matching(
        module, OrderedDict((k, torch.ones_like(v).half()) for k, v in module.state_dict().items()), "w"
    )
    assert module.weight.dtype is torch.float32
    assert torch.equal(module.weight, torch.ones(2, 2))
