"""Every operation on the output of a module, against a forward hook, on models that no other test hosts.

The sweeps compare the same with nnsight and pyvene.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trocar
from tests.support.models.other_models import OTHER_MODELS, without_in_place
from tests.support.oracles.oracle import noise
from tests.support.wire.changes import CHANGES, Place, Tally

Hosted = tuple[trocar.Client, str, torch.nn.Module]


@pytest.fixture(scope="module", params=["mobilenet_v3_large", "efficientnet_lite0", "swin_t", "vit_b_32"])
def hosted(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    places = OTHER_MODELS[request.param]
    model = places.built()
    models = {request.param: {"module": model, "input_shape": places.shape}}
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as client:
        yield client, request.param, without_in_place(model)


@pytest.mark.parametrize("name", CHANGES)
def test_an_operation_does_what_a_hook_does(hosted: Hosted, name: str) -> None:
    client, model_id, model = hosted
    places, (make, in_torch) = OTHER_MODELS[model_id], CHANGES[name]
    x = noise(2, *places.shape)
    place = Place.of(model, places.late, places, torch.from_numpy(x))
    plain = client.extract(model_id, x, "/out")["/out"]
    found = client.extract(model_id, x, "/out", edits=[make(place)])["/out"]
    module: Any = model.get_submodule(place.path)
    handle = module.register_forward_hook(lambda _module, _args, output: in_torch(place, output))
    with torch.no_grad():
        expected = model(torch.from_numpy(x))
    handle.remove()
    tally = Tally()
    tally.add(name, found, expected)
    assert tally.wrong == []
    assert not torch.allclose(torch.from_numpy(plain), expected, rtol=1e-5, atol=1e-5)
