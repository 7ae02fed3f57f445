"""Finding and replacing classifiers: every family of torchvision, and models of other makes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torchvision
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import make_meta_replica
from trocar_server.models.weights.initial_values import no_initial_values
from trocar_server.surgery import Recording, record_calls
from trocar_server.training.losses.loss_function import main_output
from trocar_server.training.model.head import class_counts, find_head, replace_head
from trocar_server.training.spec.trainer_spec import HeadSpec

ALL = torchvision.models.list_models(module=torchvision.models)
FAMILIES = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "vgg11",
    "vit_b_32",
)


def _on_meta(name: str) -> nn.Module:
    """Build a model without memory; `torch.device("meta")` is not for RegNets, which compute their widths."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        plain(self, key, parameter if parameter is None else nn.Parameter(parameter.to("meta")))

    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with patch.object(nn.Module, "register_parameter", register), no_initial_values():
        model: nn.Module = torchvision.models.get_model(name, **options)
    return model.to("meta").eval()


def _images(name: str, count: int = 1) -> torch.Tensor:
    size = 299 if name.startswith("inception") else 224
    return torch.empty((count, 3, size, size), device="meta")


def _record(model: nn.Module, *shape: int) -> Recording:
    return record_calls(make_meta_replica(model), (torch.empty(shape, device="meta"),))


@pytest.mark.parametrize("name", ALL)
def test_every_classifier_of_torchvision_can_be_replaced(name: str) -> None:
    model = _on_meta(name)
    path = find_head(model)
    shape = model.get_parameter(f"{path}.weight").shape
    assert shape[0] == 1000
    assert replace_head(model, HeadSpec(classes=7), 0) == path
    assert model.get_parameter(f"{path}.weight").shape == (7, *shape[1:])


@pytest.mark.parametrize("name", ["densenet121", "googlenet", "squeezenet1_0", "vit_b_32"])
def test_a_replaced_classifier_gives_the_output_of_eval_mode(name: str) -> None:
    model = _on_meta(name)
    replace_head(model, HeadSpec(classes=7), 0)
    assert main_output(model(_images(name, 2))).shape == (2, 7)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_recorded_pass_tells_the_same_layer_and_a_head_works_in_train_mode(name: str) -> None:
    model = _on_meta(name)
    recording = record_calls(model, (_images(name),))
    assert find_head(model, recording) == find_head(model)
    replace_head(model, HeadSpec(classes=7, hidden=(5,), dropout=0.1), 0, recording)
    assert main_output(model.train()(_images(name, 2))).shape == (2, 7)


def test_auxiliary_heads_stay_as_they_are() -> None:
    model = _on_meta("googlenet")
    assert replace_head(model, HeadSpec(classes=7), 0) == "fc"
    output = model.train()(_images("googlenet", 2))
    assert (output.logits.shape, output.aux_logits1.shape) == ((2, 7), (2, 1000))


def test_an_efficientnet_lite_has_its_head_at_its_own_name() -> None:
    lite = pytest.importorskip("efficientnet_lite_pytorch")
    model = lite.EfficientNet.from_name("efficientnet-lite0").eval()
    recording = _record(model, 1, 3, 64, 64)
    assert find_head(model, recording) == find_head(model) == "_fc"
    replace_head(model, HeadSpec(classes=10), 0, recording)
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)


class Named(nn.Module):
    """A backbone and a head of any name, which is registered before the backbone."""

    def __init__(self, head: nn.Module, name: str = "head") -> None:
        super().__init__()
        self.name = name
        self.add_module(name, head)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.get_submodule(self.name)(self.body(x))


class Inner(nn.Module):
    """A head as timm has them: dropout and `fc` in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.drop(x))


@pytest.mark.parametrize(
    ("head", "name", "path"),
    [
        (nn.Linear(6, 4), "fc", "fc"),
        (nn.Linear(6, 4), "classifier", "classifier"),
        (Inner(), "head", "head.fc"),
        (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Softmax(1)), "head", "head.1"),
    ],
)
def test_the_order_of_execution_counts(head: nn.Module, name: str, path: str) -> None:
    model = Named(head, name).eval()
    recording = _record(model, 1, 3, 4, 4)
    assert find_head(model, recording) == path
    replace_head(model, HeadSpec(classes=9), 0, recording)
    assert model(torch.rand(2, 3, 4, 4)).shape == (2, 9)


def test_a_head_is_drawn_as_torch_draws_it_after_a_seed() -> None:
    model = Named(nn.Linear(6, 4), "fc")
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    replace_head(model, HeadSpec(path="fc", classes=3, hidden=(8,), dropout=0.2), 5)
    assert torch.equal(torch.get_rng_state(), before)
    made = model.get_submodule("fc")
    assert repr(made) == repr(expected)
    for mine, theirs in zip(made.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("init", ["zeros", "normal", "xavier", "kaiming"])
def test_other_beginnings_are_those_of_torch(init: Any) -> None:
    functions: dict[str, Any] = {
        "zeros": nn.init.zeros_,
        "normal": lambda weight: nn.init.normal_(weight, std=0.01),
        "xavier": nn.init.xavier_uniform_,
        "kaiming": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    }
    torch.manual_seed(3)
    expected = nn.Linear(6, 5)
    functions[init](expected.weight)
    model = Named(nn.Linear(6, 4), "fc")
    replace_head(model, HeadSpec(path="fc", classes=5, init=init), 3)
    made = model.get_submodule("fc")
    assert isinstance(made, nn.Linear)
    assert torch.equal(made.weight, expected.weight)
    assert not made.bias.any()


def test_a_head_has_the_dtype_and_mode_of_the_old_one_and_a_bias_on_request() -> None:
    model = Named(nn.Linear(6, 4).bfloat16().eval(), "fc")
    replace_head(model, HeadSpec(path="fc", classes=5, bias=False), 0)
    made = model.get_submodule("fc")
    assert isinstance(made, nn.Linear)
    assert (made.weight.dtype, made.training) == (torch.bfloat16, False)
    assert [name for name, _ in made.named_parameters()] == ["weight"]


def test_a_convolution_keeps_its_geometry() -> None:
    old = nn.Conv2d(6, 4, 3, stride=2, padding=1, dilation=2, padding_mode="reflect")
    model = nn.Sequential(nn.Conv2d(3, 6, 1), old)
    replace_head(model, HeadSpec(path="1", classes=9, hidden=(5,)), 0)
    x = torch.rand(2, 3, 9, 9)
    with torch.no_grad():
        assert model(x).shape == (2, 9, *old(torch.rand(2, 6, 9, 9)).shape[2:])
    last = model.get_submodule("1.2")
    assert isinstance(last, nn.Conv2d)
    assert (last.stride, last.dilation, last.padding_mode) == ((2, 2), (2, 2), "reflect")


def test_a_segmentation_head_is_given_by_its_path() -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model("fcn_resnet50", weights_backbone=None, aux_loss=True).eval()
    recording = record_calls(model, (torch.empty((1, 3, 64, 64), device="meta"),))
    with pytest.raises(ServiceError, match="returns 2 tensors"):
        find_head(model, recording)
    replace_head(model, HeadSpec(path="classifier.4", classes=3), 0, recording)
    assert main_output(model(torch.empty((2, 3, 64, 64), device="meta"))).shape == (2, 3, 64, 64)


def test_the_heads_of_a_detector_are_given_by_the_paths_of_their_layers() -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model("fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None)
    replace_head(model, HeadSpec(path="roi_heads.box_predictor.cls_score", classes=5), 0)
    assert model.get_submodule("roi_heads.box_predictor.cls_score").weight.shape == (5, 1024)


def test_an_identity_where_a_head_was_is_replaced_by_what_its_input_needs() -> None:
    model = Named(nn.Identity(), "fc").eval()
    recording = _record(model, 1, 3, 4, 4)
    replace_head(model, HeadSpec(path="fc", classes=4), 0, recording)
    assert model(torch.rand(2, 3, 4, 4)).shape == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_head_in_place_of_a_module_without_weights_is_like_the_model(
    dtype: torch.dtype, device: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Identity()).to(device, dtype).eval()
    recording = record_calls(model, (torch.zeros(2, 3, dtype=dtype, device=device),))
    replace_head(model, HeadSpec(path="1", classes=4), 0, recording)
    made = model.get_submodule("1")
    assert isinstance(made, nn.Linear)
    assert (made.weight.dtype, made.weight.device.type) == (dtype, device)


class Tied(nn.Module):
    """Its output layer is its input layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x))


class Normed(nn.Module):
    """Something with weights comes after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.fc(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tied(), "shares its weights with 'first.weight'"),
        (Normed(), "the last module with weights is 'norm'"),
        (nn.Linear(4, 3), "the model is a single layer"),
        (nn.Sequential(nn.ReLU()), "no module with weights"),
    ],
)
def test_a_model_without_a_head_of_its_own_is_refused_with_advice(model: nn.Module, message: str) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        find_head(model, _record(model.eval(), 1, 4))
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    assert "head.path" in caught.value.message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("classifer", "no module 'classifer'; nearest: classifier"),
        ("features.0", None),
        ("features", "does not take one vector per sample; choose one of its layers"),
    ],
)
def test_a_path_that_cannot_be_a_head_is_refused(path: str, message: str | None) -> None:
    model = _on_meta("alexnet")
    recording = record_calls(model, (_images("alexnet"),))
    if message is None:
        assert replace_head(model, HeadSpec(path=path, classes=3), 0, recording) == path
        return
    with pytest.raises(ServiceError, match=message):
        replace_head(model, HeadSpec(path=path, classes=3), 0, recording)


@pytest.mark.parametrize(
    ("outputs", "counts"),
    [
        ({"logits": (1, 8, 9), "last_hidden_state": (1, 8, 16)}, {9}),
        ({"logits": (1, 4), "hidden": (1, 16)}, {4}),
        ({"out": (1, 21, 6, 6), "aux": (1, 21, 6, 6)}, {21}),
        ({"": (1, 7)}, {7}),
        ({"": (1, 3, 20)}, {3, 20}),  # of `nn.Conv1d`, or of tokens
        ({"": (1,)}, set()),
    ],
)
def test_the_number_of_classes_is_that_of_the_logits(
    outputs: dict[str, tuple[int, ...]], counts: set[int]
) -> None:
    class Shaped(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            values = {name: x.sum() + torch.zeros(shape) for name, shape in outputs.items()}
            return values.get("", values)

    assert class_counts(record_calls(Shaped(), (torch.zeros(1),))) == counts
