"""From selectors to values: every expansion, every reason, every hint."""

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_32

from tests.support.models.odd_models import (
    CatchesErrors,
    Deep,
    Nothing,
    OddKeys,
    OddNames,
    Recursive,
    Shared,
    TakesMany,
    TorchLayers,
)
from tests.support.models.tiny_models import Half, Plain, Structured
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, parse_selector, resolve

PLAIN = recorded(Plain, (2, 3, 8, 8))
STRUCTURED = recorded(Structured, (2, 3))
DEEP = recorded(Deep, (2, 3))
NOTHING = recorded(Nothing, (2, 3))


def names(selector: str, recording: Recording = PLAIN) -> list[str]:
    (values,) = resolve([parse_selector(selector)], recording)
    return [target.name for target, _ in values]


def refused(selector: str, recording: Recording = PLAIN) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        resolve([parse_selector(selector)], recording)
    return caught.value


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("conv", ["conv"]),
        ("relu@0", ["relu@0"]),
        ("relu@-1", ["relu@1"]),
        ("relu@*", ["relu@0", "relu@1"]),
        ("conv@0", ["conv"]),
        ("conv@-1", ["conv"]),
        ("conv@*", ["conv"]),
        ("fc/in", ["fc/in"]),
        ("fc/in[0]", ["fc/in"]),
        ("fc/in[-1]", ["fc/in"]),
        ("fc/out", ["fc"]),
        ("/in", ["/in"]),
        ("/out", ["/out"]),
        ("@0/out", ["/out"]),
        ("conv*", ["conv", "conv2"]),
        ("*", ["conv", "relu@0", "conv2", "relu@1", "pool", "fc"]),
        ("**", ["conv", "relu@0", "conv2", "relu@1", "pool", "fc"]),
        ("**:Conv2d", ["conv", "conv2"]),
        ("conv:Conv2d", ["conv"]),
        ("*:ReLU@1", ["relu@1"]),
        ("*/in", ["conv/in", "relu@0/in", "conv2/in", "relu@1/in", "pool/in", "fc/in"]),
        ("*@1", ["relu@1"]),
        ("re:.*[vu]2?", ["conv", "relu@0", "conv2", "relu@1"]),
        ('re:"relu"@-1/in', ["relu@1/in"]),
        ('re:".*":Conv2d', ["conv", "conv2"]),
    ],
)
def test_a_selector_stands_for_values_in_execution_order(selector: str, expected: list[str]) -> None:
    assert names(selector) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("both", ['both["first"]', 'both["second"]']),
        ('both["second"]', ['both["second"]']),
        ("split", ["split[0]"]),
        ("split[0]", ["split[0]"]),
        ("split[-3]", ["split[0]"]),
        ("split/in", ["split/in"]),
        ("split/in[0]", ["split/in"]),
        ("split/in[1]", ["split/in(scale)"]),
        ("split/in[-1]", ["split/in(scale)"]),
        ("split/in(scale)", ["split/in(scale)"]),
        ("/out", ['/out["out"]', '/out["aux"]']),
        ('/out["aux"]', ['/out["aux"]']),
        ("*", ['both["first"]', 'both["second"]', "split[0]"]),
    ],
)
def test_structures_come_flattened_with_their_picks(selector: str, expected: list[str]) -> None:
    assert names(selector, STRUCTURED) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("#0", ["conv"]),
        ("#-1", ["fc"]),
        ("#-1/in", ["fc/in"]),
        ("#1:4", ["relu@0", "conv2", "relu@1"]),
        ("#4:", ["pool", "fc"]),
        ("#:2", ["conv", "relu@0"]),
        ("#-2:-1", ["pool"]),
        ("#:", ["conv", "relu@0", "conv2", "relu@1", "pool", "fc"]),
        ("#4:100", ["pool", "fc"]),
        ("relu#1", ["relu@1"]),
        ("relu#-2/in", ["relu@0/in"]),
        ("relu#:", ["relu@0", "relu@1"]),
        ("**:Conv2d#-1", ["conv2"]),
        ("*@1#0", ["relu@1"]),
        ('re:".*"#2', ["conv2"]),
    ],
)
def test_an_order_chooses_among_all_calls_as_they_come(selector: str, expected: list[str]) -> None:
    assert names(selector) == expected


def test_an_order_without_a_path_counts_modules_that_call_no_other() -> None:
    assert names("#:", DEEP) == ["stem.0.0.0", "stem.0.0.1"]
    assert names("**#:", DEEP) == ["stem.0.0.0", "stem.0.0.1", "stem.0.0", "stem.0", "stem"]


def test_inputs_are_in_order_of_the_start_of_calls() -> None:
    assert names("**#:/in", DEEP) == [
        *("stem/in", "stem.0/in", "stem.0.0/in", "stem.0.0.0/in", "stem.0.0.1/in"),
    ]
    assert names("**#0/in", DEEP) == ["stem/in"]


def test_a_module_that_calls_only_itself_counts_as_one_that_calls_no_other() -> None:
    assert names("#:", recorded(Recursive, (3,))) == ["nested@2", "nested@1", "nested@0"]


def test_a_model_without_modules_is_its_own_only_call() -> None:
    assert names("#-1", recorded(Half, (2, 7))) == ["/out"]


def test_an_order_counts_calls_and_not_the_tensors_of_one() -> None:
    assert names("#0", STRUCTURED) == ['both["first"]', 'both["second"]']
    assert names("#1", STRUCTURED) == ["split[0]"]
    assert names('#0["second"]', STRUCTURED) == ['both["second"]']


def test_the_leaf_calls_of_a_real_model_are_those_that_its_own_tree_has() -> None:
    recording = recorded(lambda: resnet18(weights=None), (1, 3, 64, 64))
    with torch.device("meta"):
        model = resnet18(weights=None).eval()
    expected: list[str] = []
    for path, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, path=path: expected.append(path))
    model(torch.zeros(1, 3, 64, 64, device="meta"))
    assert [target.path for target, _ in resolve([parse_selector("#:")], recording)[0]] == expected


def test_the_model_itself_is_not_one_of_its_modules() -> None:
    assert "/out" not in names("**")


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        ("convv", ErrorReason.UNKNOWN_MODULE),
        ("conv.0", ErrorReason.UNKNOWN_MODULE),
        ("nothing*", ErrorReason.UNKNOWN_MODULE),
        ("conv:ReLU", ErrorReason.UNKNOWN_MODULE),
        ("**:conv2d", ErrorReason.UNKNOWN_MODULE),
        ("unused", ErrorReason.MODULE_NOT_CALLED),
        ("unused/in", ErrorReason.MODULE_NOT_CALLED),
        ("unused@0", ErrorReason.MODULE_NOT_CALLED),
        ("unus*", ErrorReason.MODULE_NOT_CALLED),
        ("relu", ErrorReason.AMBIGUOUS_CALL),
        ("relu/in", ErrorReason.AMBIGUOUS_CALL),
        ("relu@2", ErrorReason.CALL_OUT_OF_RANGE),
        ("relu@-3", ErrorReason.CALL_OUT_OF_RANGE),
        ("conv@1", ErrorReason.CALL_OUT_OF_RANGE),
        ("conv[0]", ErrorReason.UNKNOWN_PICK),
        ('conv["out"]', ErrorReason.UNKNOWN_PICK),
        ("fc/in[1]", ErrorReason.UNKNOWN_PICK),
        ("fc/in[-2]", ErrorReason.UNKNOWN_PICK),
        ("fc/in(x)", ErrorReason.UNKNOWN_PICK),
        ("*:ReLU@7", ErrorReason.CALL_OUT_OF_RANGE),
        ('conv*["out"]', ErrorReason.UNKNOWN_PICK),
        ("conv*/in(x)", ErrorReason.UNKNOWN_PICK),
        ("re:con", ErrorReason.UNKNOWN_MODULE),
        ("re:unused", ErrorReason.MODULE_NOT_CALLED),
        ("re:", ErrorReason.INVALID_SELECTOR),
        ("#6", ErrorReason.CALL_OUT_OF_RANGE),
        ("#-7", ErrorReason.CALL_OUT_OF_RANGE),
        ("relu#2", ErrorReason.CALL_OUT_OF_RANGE),
        ("#3:3", ErrorReason.UNKNOWN_MODULE),
        ("#9:", ErrorReason.UNKNOWN_MODULE),
        ("convv#0", ErrorReason.UNKNOWN_MODULE),
        ("unused#0", ErrorReason.MODULE_NOT_CALLED),
        ("*[0]#0", ErrorReason.INVALID_SELECTOR),
        ("*#0[0]", ErrorReason.UNKNOWN_PICK),
        ("fx:conv", ErrorReason.NOT_TRACEABLE),
        ("fn:relu", ErrorReason.UNKNOWN_FUNCTION),
    ],
)
def test_what_cannot_be_resolved_says_why(selector: str, reason: ErrorReason) -> None:
    assert refused(selector).reason is reason


@pytest.mark.parametrize("selector", ["count", "split[1]", "split[2]", "coun*"])
def test_a_value_without_tensors_is_no_tensor(selector: str) -> None:
    assert refused(selector, STRUCTURED).reason is ErrorReason.NOT_A_TENSOR


@pytest.mark.parametrize("selector", ["tuple", "dict", "none", "tupl*"])
def test_an_empty_value_is_no_tensor(selector: str) -> None:
    assert refused(selector, NOTHING).reason is ErrorReason.NOT_A_TENSOR


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("convv", "nearest: conv, conv2"),
        ("xyz", "trocar modules"),
        ("relu", "'relu@0' to 'relu@1'"),
        ("relu@5", "the last call is '@1'"),
        ("conv@5", "called 1 time in"),
        ("nothing*", "trocar modules"),
        ("fc/in[3]", "available: fc/in"),
        ("unused", "never calls it"),
        ("**:conv2d", "are AdaptiveAvgPool2d, Conv2d, Linear, ReLU"),
        ("re:conv@0", "in double quotes"),
        ("#6", "there are 6 calls to choose from, so '#6' does not exist; the last one is '#5'"),
        ("#5:2", "'#0' to '#5'"),
        ("conv#1", "there is 1 call to choose"),
    ],
)
def test_an_error_says_what_to_do_next(selector: str, hint: str) -> None:
    assert hint in refused(selector).message


def test_a_value_of_no_tensor_is_named_by_its_type() -> None:
    assert "int" in refused("count", STRUCTURED).message


def test_a_missing_element_is_answered_with_those_that_exist() -> None:
    assert 'both["first"], both["second"]' in refused("both[0]", STRUCTURED).message


def test_a_module_inside_one_that_runs_is_answered_with_that_one() -> None:
    recording = recorded(lambda: vit_b_32(weights=None), (1, 3, 224, 224))
    error = refused("encoder.layers.encoder_layer_0.self_attention.out_proj", recording)
    assert error.reason is ErrorReason.MODULE_NOT_CALLED
    assert error.details["nearest"] == "encoder.layers.encoder_layer_0.self_attention"


def test_a_pattern_skips_calls_and_elements_that_some_modules_lack() -> None:
    assert names("*[0]", STRUCTURED) == ["split[0]"]


def test_deep_patterns_reach_every_level() -> None:
    assert names("**", DEEP) == ["stem.0.0.0", "stem.0.0.1", "stem.0.0", "stem.0", "stem"]


def test_a_module_under_two_names_is_named_by_its_first_and_found_by_both() -> None:
    recording = recorded(Shared, (3,))
    assert names("first@*", recording) == ["first@0", "first@1"]
    assert names("second@*", recording) == ["first@0", "first@1"]


ODD = {
    "plain": PLAIN,
    "structured": STRUCTURED,
    "deep": DEEP,
    "recursive": recorded(Recursive, (3,)),
    "shared": recorded(Shared, (3,)),
    "odd names": recorded(OddNames, (3,)),
    "odd keys": recorded(OddKeys, (3,)),
    "catches errors": recorded(CatchesErrors, (3,)),
    "torch layers": recorded(TorchLayers, (2, 4, 6)),
    "many": recorded(TakesMany, (2, 3)),
    "resnet18": recorded(lambda: resnet18(weights=None), (1, 3, 64, 64)),
}


@pytest.mark.parametrize("recording", ODD.values(), ids=ODD)
def test_every_name_of_a_reply_stands_for_that_value_alone(recording: Recording) -> None:
    every = [f"{path}/{port}" for path in ("**", "") for port in ("out", "in")] + ["#:", "#:/in"]
    for selector in every:
        for target, leaf in resolve([parse_selector(selector)], recording)[0]:
            assert resolve([parse_selector(target.name)], recording) == [[(target, leaf)]]


@pytest.mark.parametrize("name", OddNames.NAMES)
def test_a_module_of_any_name_that_torch_allows_can_be_selected_by_its_name_in_a_reply(name: str) -> None:
    recording = recorded(OddNames, (3,))
    reply_names = {
        target.path: target.name for target, _ in resolve([parse_selector("parts.*")], recording)[0]
    }
    (found,) = resolve([parse_selector(reply_names[f"parts.{name}"])], recording)
    assert [(target.path, target.port) for target, _ in found] == [(f"parts.{name}", "out")]


@pytest.mark.parametrize("module", ["negative", "truth", "lookalikes", "quoted"])
def test_an_element_of_any_key_can_be_selected_by_its_name_in_a_reply(module: str) -> None:
    recording = recorded(OddKeys, (3,))
    found = names(module, recording)
    assert len(set(found)) == len(found) > 1
    assert [names(name, recording) for name in found] == [[name] for name in found]


class WithEmpty(nn.Module):
    """Returns empty structures between its tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, (), x * 2, {"a": [], "b": (x, [])}


@pytest.mark.parametrize("is_symbolic", [True, False])
def test_negative_picks_count_empty_structures_as_python_does(is_symbolic: bool) -> None:
    recording = recorded(WithEmpty, (2, 3), is_symbolic=is_symbolic)
    output = WithEmpty()(torch.zeros(2, 3))
    assert torch.equal(output[-2], output[2])
    assert names("/out[-2]", recording) == ["/out[2]"]
    assert names("/out[-4]", recording) == ["/out[0]"]
    assert names('/out[-1]["b"][-2]', recording) == ['/out[3]["b"][0]']
    assert names("/out", recording) == ["/out[0]", "/out[2]", '/out[3]["b"][0]']
    for text in ("/out[-3]", "/out[1]", '/out[-1]["b"][-1]', '/out[3]["a"]'):
        assert refused(text, recording).reason is ErrorReason.NOT_A_TENSOR


def test_a_negative_pick_counts_within_its_own_structure() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
            return (x, x + 1, x + 2), x + 3

    recording = recorded(Nested, (3,))
    assert names("/out[0][-1]", recording) == ["/out[0][2]"]
    assert names("/out[-1]", recording) == ["/out[1]"]
    assert names("/out[-2][-3]", recording) == ["/out[0][0]"]


@pytest.mark.parametrize(("count", "ending"), [(10, ", Tanh"), (11, ", ...")])
def test_at_most_ten_classes_of_a_path_are_named(count: int, ending: str) -> None:
    kinds: list[type[nn.Module]] = [nn.ReLU, nn.Tanh, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish]
    kinds += [nn.Softplus, nn.Sigmoid, nn.Hardswish]
    recording = recorded(lambda: nn.Sequential(*(kind() for kind in kinds[:count])), (2, 3))
    _, _, named = refused("*:Linear", recording).message.partition("the modules of that path are ")
    first_ten = sorted(kind.__name__ for kind in kinds[:count])[:10]
    assert named == ", ".join(first_ten) + ("" if count == 10 else ending)
    assert named.endswith(ending)
