"""Weights from a file: equal to torchvision's ordinary way, whatever was left out on the way."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from trocar_server.models.architectures import named_weights
from trocar_server.models.building import build, supply_state_dict
from trocar_server.models.spec import ModelSpec
from trocar_server.models.weights import initial_values
from trocar_server.models.weights.downloads import stored_path
from trocar_server.models.weights.initial_values import are_all_in, no_initial_values
from trocar_server.models.weights.weights_file import StateDict, write_weights

SOME = ["mnasnet0_5", "mobilenet_v3_small", "shufflenet_v2_x0_5", "resnet18", "squeezenet1_1"]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a module by name: buffers that are not saved, and plain attributes, too."""
    named = dict(chain(module.named_parameters(), module.named_buffers()))
    for path, part in module.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, Tensor)}
        named |= {f"{path}.{key}": value for key, value in plain.items()}
    return named


@pytest.mark.parametrize("name", SOME)
def test_a_module_from_a_file_is_torchvisions(name: str, tmp_path: Any) -> None:
    weights = named_weights(name)["DEFAULT"]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = get_model(name, weights=None).state_dict()
    path = stored_path(weights, tmp_path)
    path.parent.mkdir()
    write_weights(state, path)
    state_of_theirs = StateDict(state)
    state_of_theirs._metadata = state._metadata  # type: ignore[attr-defined]  # MNASNet's version is there
    with supply_state_dict(weights, state_of_theirs):
        theirs = tensors(get_model(name, weights=weights))
    ours = tensors(build(ModelSpec(name, name), tmp_path).module)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_parameters_are_not_filled_and_everything_else_is() -> None:
    plain, before = torch.empty(3), torch.randn(4)
    parameter = nn.Parameter(before.clone())
    with no_initial_values():
        assert nn.init.constant_(parameter, 7.0) is parameter
        nn.init.constant_(plain, 7.0)
    assert torch.equal(parameter.detach(), before)
    assert plain.tolist() == [7.0, 7.0, 7.0]


def test_a_failure_in_between_leaves_torch_as_it_was() -> None:
    before = {name: getattr(nn.init, name) for name in initial_values._FUNCTIONS}
    with pytest.raises(ZeroDivisionError), no_initial_values():
        _ = 1 / 0
    assert {name: getattr(nn.init, name) for name in before} == before


def test_a_parameter_that_no_file_has_is_noticed() -> None:
    module = nn.Linear(2, 2)
    assert are_all_in(module, module.state_dict())
    assert not are_all_in(module, {"weight": module.weight})
