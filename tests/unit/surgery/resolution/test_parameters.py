"""Parameters and buffers by name: resolved without a call, collected without a pass."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_32

from tests.support.models.odd_models import KeepsState, TorchLayers
from tests.support.models.tiny_models import DataDependent, Half, Plain
from tests.support.servers.footprint import hook_count
from tests.support.servers.serving import rebuilt
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    Recording,
    TapSession,
    Target,
    ValueMissingError,
    parse_selector,
    record_calls,
    resolve,
)

RESNET = recorded(lambda: resnet18(weights=None), (1, 3, 64, 64))
IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def targets(selector: str, recording: Recording) -> list[Target]:
    (values,) = resolve([parse_selector(selector)], recording)
    return [target for target, _ in values]


def refused(selector: str, recording: Recording) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        resolve([parse_selector(selector)], recording)
    return caught.value


class OddParameters(nn.Module):
    """Parameters and buffers whose names a selector has other plans for."""

    NAMES = ("plain", "a)b", "a b", "in", "*", "größe", '"', "[0]", "weight(1)")

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(self.NAMES):
            self.register_parameter(name, nn.Parameter(torch.full((2,), float(number))))
        self.register_buffer("state", torch.arange(3))
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_every_parameter_and_buffer_of_a_model_has_its_shape_and_its_own_name() -> None:
    model = resnet18(weights=None)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {
        f"{record.path}.{name}": leaf
        for record in RESNET.modules.values()
        for name, leaf in record.parameters.items()
    }
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()
    }
    for name in expected:
        path, _, own = name.rpartition(".")
        (target,) = targets(f"{path}/param({own})", RESNET)
        assert (target.name, target.path, target.port) == (f"{path}/param({own})", path, f"param({own})")


def test_a_pattern_takes_every_module_that_has_one() -> None:
    model = resnet18(weights=None)
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    found = targets("**:BatchNorm2d/param(running_mean)", RESNET)
    assert sorted(target.path for target in found) == sorted(norms)


def test_a_module_that_is_never_called_has_its_parameters() -> None:
    recording = recorded(lambda: vit_b_32(weights=None), (1, 3, 224, 224))
    attention = "encoder.layers.encoder_layer_0.self_attention"
    assert len(targets(f"{attention}.out_proj/param(bias)", recording)) == 1
    assert len(targets(f"{attention}/param(in_proj_weight)", recording)) == 1


@pytest.mark.parametrize("name", [*OddParameters.NAMES, "state"])
def test_a_parameter_of_any_name_is_selected_by_its_name_in_a_reply(name: str) -> None:
    recording = recorded(OddParameters, (3,))
    port = recording.modules[""].parameters[name].port
    assert port == f"param({name})"
    quoted = name.replace('"', '\\"')
    (target,) = targets(f'/param("{quoted}")', recording)
    assert targets(target.name, recording) == [target]
    assert target.port == port


def test_the_models_own_parameter_needs_no_path() -> None:
    assert [target.name for target in targets("/param(scale)", recorded(Half, (2, 7)))] == ["/param(scale)"]


def test_a_parameter_that_is_none_is_not_there() -> None:
    assert refused("/param(nothing)", recorded(OddParameters, (3,))).reason is ErrorReason.UNKNOWN_PARAMETER


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("fc/param(wieght)", "available: weight, bias"),
        ("relu/param(weight)", "it has none"),
        ("layer1.0/param(weight)", "one inside is 'layer1.0.conv1/param(weight)'"),
        ("**:ReLU/param(weight)", "none of the 9 modules has"),
        ("**/param(wieght)", "weight, bias, running_mean"),
    ],
)
def test_an_unknown_parameter_is_answered_with_what_there_is(selector: str, words: str) -> None:
    error = refused(selector, RESNET)
    assert error.reason is ErrorReason.UNKNOWN_PARAMETER
    assert words in error.message


def test_an_unknown_module_is_no_unknown_parameter() -> None:
    assert refused("fcc/param(weight)", RESNET).reason is ErrorReason.UNKNOWN_MODULE


def test_a_parametrised_module_has_what_it_is_made_from() -> None:
    recording = recorded(TorchLayers, (2, 4, 6))
    assert refused("parametrized/param(weight)", recording).reason is ErrorReason.UNKNOWN_PARAMETER
    assert len(targets("parametrized.parametrizations.weight/param(original0)", recording)) == 1


def test_parameters_alone_need_no_pass() -> None:
    model = rebuilt(Plain)
    wanted = targets("fc/param(weight)", recorded(Plain, (2, 3, 8, 8)))
    with TapSession(model, wanted) as session:
        assert not session.needs_pass
        assert hook_count(model) == 0
    assert torch.equal(session.values["fc/param(weight)"], model.fc.weight)
    assert not session.values["fc/param(weight)"].requires_grad


def test_parameters_do_not_keep_a_pass_going() -> None:
    model, recording = rebuilt(Plain), recorded(Plain, (2, 3, 8, 8))
    wanted = [*targets("fc/param(bias)", recording), *targets("conv", recording)]
    with torch.inference_mode(), TapSession(model, wanted) as session:
        assert session.needs_pass
        model(IMAGES)
    assert session.stopped_at == "conv"
    assert set(session.values) == {"fc/param(bias)", "conv"}


def test_what_no_pass_writes_to_is_not_copied() -> None:
    model = rebuilt(Plain)
    with TapSession(model, targets("fc/param(weight)", recorded(Plain, (2, 3, 8, 8)))) as session:
        pass
    assert session.values["fc/param(weight)"].data_ptr() == model.fc.weight.data_ptr()


def test_a_buffer_that_the_pass_writes_to_is_the_one_before_the_pass() -> None:
    model = rebuilt(KeepsState)
    model.total.fill_(5)
    wanted = targets("/param(total)", recorded(KeepsState, (2, 4)))
    with torch.inference_mode(), TapSession(model, wanted) as session:
        model(torch.ones(2, 4))
    assert session.values["/param(total)"].tolist() == [5.0] * 4
    assert model.total.tolist() == [7.0] * 4


def test_a_buffer_is_copied_since_batch_norm_does_not_say_that_it_writes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).train()
    with torch.device("meta"):
        recording = record_calls(nn.Sequential(nn.BatchNorm1d(3)).train(), [torch.zeros(2, 3)])
    wanted = [*targets("0/param(running_mean)", recording), *targets("0/param(weight)", recording)]
    with TapSession(model, wanted) as session:
        model(torch.ones(2, 3))
    assert session.values["0/param(running_mean)"].tolist() == [0.0] * 3
    assert session.values["0/param(weight)"].data_ptr() == next(model.parameters()).data_ptr()


def test_a_parameter_that_the_pass_writes_to_is_copied() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale.mul_(2)

    model = Writes()
    with TapSession(model, targets("/param(scale)", recorded(Writes, (3,)))) as session:
        model(torch.ones(3))
    assert session.values["/param(scale)"].tolist() == [1.0] * 3


def test_without_a_symbolic_pass_every_parameter_counts_as_overwritten() -> None:
    recording = recorded(DataDependent, (2, 3), is_symbolic=False)
    assert all(leaf.is_overwritten for leaf in recording.modules["first"].parameters.values())


def test_a_parameter_that_the_model_lacks_is_missing_before_any_hook_is_on() -> None:
    model = rebuilt(Plain)
    wanted = [Target("conv", "conv", 0), Target("x", "fc", 0, port="param(x)")]
    with pytest.raises(ValueMissingError), TapSession(model, wanted):
        pass
    assert hook_count(model) == 0
