"""Collecting values: what is kept, when the pass ends, and what is left behind."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor

from tests.support.models.odd_models import (
    CatchesErrors,
    InPlaceOnInput,
    Overwrites,
    Recursive,
    WritesThroughNumpy,
)
from tests.support.models.tiny_models import Plain, Structured
from tests.support.servers.footprint import hook_count
from tests.support.servers.serving import rebuilt
from trocar_server.surgery import TapSession, Target, parse_selector, record_calls, resolve

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.arange(6.0).reshape(2, 3) - 2


def targets_of(
    model: nn.Module, selectors: list[str], inputs: torch.Tensor, *, is_symbolic: bool = True
) -> list[Target]:
    """Resolve selectors with a recorded pass, as the engine does."""
    if is_symbolic:
        with torch.device("meta"):
            recording = record_calls(type(model)(), [inputs.to("meta")])
    else:
        recording = record_calls(model, [inputs.clone()], is_symbolic=False)
    found = resolve([parse_selector(selector) for selector in selectors], recording)
    return [target for expansion in found for target, _ in expansion]


def collected(
    kind: Callable[[], nn.Module], selectors: list[str], inputs: torch.Tensor, *, is_symbolic: bool = True
) -> dict[str, torch.Tensor]:
    model = rebuilt(kind)
    targets = targets_of(model, selectors, inputs, is_symbolic=is_symbolic)
    with torch.inference_mode(), TapSession(model, targets) as session:
        model(inputs.clone())
    return session.values


def at(path: str, call: int = 0, **fields: object) -> Target:
    return replace(Target(name=f"{path}@{call}", path=path, call=call), **fields)  # type: ignore[arg-type]


def test_a_value_is_what_the_module_returned() -> None:
    model = rebuilt(Plain)
    with torch.inference_mode():
        expected = model.conv(IMAGES)
        with TapSession(model, [at("conv")]) as session:
            model(IMAGES)
    assert torch.equal(session.values["conv@0"], expected)


def test_every_call_of_a_module_is_told_apart() -> None:
    model = rebuilt(Plain)
    with torch.inference_mode():
        first = model.relu(model.conv(IMAGES)).clone()
        second = model.relu(model.conv2(first)).clone()
        with TapSession(model, [at("relu", 0), at("relu", 1)]) as session:
            model(IMAGES)
    assert torch.equal(session.values["relu@0"], first)
    assert torch.equal(session.values["relu@1"], second)


def test_bn1_of_resnet18_keeps_its_true_minimum() -> None:
    """Kept by reference it would be 0: the next ReLU is in place."""
    torch.manual_seed(0)
    model = resnet18(weights=None).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.device("meta"):
        recording = record_calls(resnet18(weights=None), [images.to("meta")])
    targets = [target for target, _ in resolve([parse_selector("bn1"), parse_selector("fc")], recording)[0]]
    with torch.inference_mode():
        expected = model.bn1(model.conv1(images))
        with TapSession(model, targets) as session:
            model(images)
    assert expected.min() < -1
    assert torch.equal(session.values["bn1"], expected)


def test_values_agree_with_torchvisions_extractor_where_nothing_is_in_place() -> None:
    torch.manual_seed(0)
    model = resnet18(weights=None).eval()
    images = torch.rand(2, 3, 64, 64)
    nodes = {"layer2": "layer2", "avgpool": "avgpool", "layer4.1.conv2": "layer4.1.conv2"}
    with torch.no_grad():
        expected = create_feature_extractor(model, nodes)(images)
        with TapSession(model, [at(path) for path in nodes]) as session:
            model(images)
    assert all(torch.equal(session.values[f"{path}@0"], expected[path]) for path in nodes)


@pytest.mark.parametrize(
    ("index", "way"),
    list(
        enumerate(["in place", "through detach()", "through a view", "with out=", "through .data", "by item"])
    ),
)
def test_a_value_is_as_it_was_when_the_module_returned_it(index: int, way: str) -> None:
    values = collected(Overwrites, [f"ways.{index}", "/out"], ROWS)
    assert torch.equal(values[f"ways.{index}"], ROWS + 1), way


def test_a_write_that_torch_cannot_count_does_not_reach_a_value() -> None:
    values = collected(WritesThroughNumpy, ["value", "/out"], ROWS, is_symbolic=False)
    assert torch.equal(values["value"], ROWS + 1)


def test_the_input_of_a_model_is_as_it_came() -> None:
    values = collected(InPlaceOnInput, ["/in", "identity", "/out"], ROWS)
    assert torch.equal(values["/in"], ROWS)
    assert torch.equal(values["identity"], ROWS)
    assert torch.equal(values["/out"], ROWS * 2)


def test_picks_lead_into_tuples_dicts_and_dataclasses() -> None:
    values = collected(Structured, ["both", "split[0]", '/out["aux"]'], ROWS)
    assert torch.equal(values['both["first"]'], ROWS + 1)
    assert torch.equal(values['both["second"]'], ROWS * 2)
    assert torch.equal(values["split[0]"], (ROWS + 1) * ROWS * 2)
    assert torch.equal(values['/out["aux"]'], ROWS * 2)


def test_keyword_inputs_are_collected_by_name() -> None:
    values = collected(Structured, ["split/in", "split/in(scale)", "/out"], ROWS)
    assert torch.equal(values["split/in"], ROWS + 1)
    assert torch.equal(values["split/in(scale)"], ROWS * 2)


def test_calls_inside_a_call_of_the_same_module_are_counted_as_they_start() -> None:
    """As `modules` lists them, and as `nested@0/in` counts them."""
    values = collected(Recursive, ["nested@0", "nested@2", "nested@0/in[0]"], ROWS)
    assert torch.equal(values["nested@2"], ROWS + 1)
    assert torch.equal(values["nested@0"], ROWS + 3)


def test_a_call_that_raised_does_not_shift_the_ones_after_it() -> None:
    values = collected(CatchesErrors, ["step@1", "step@2"], ROWS)
    assert torch.equal(values["step@1"], (ROWS + 1) * 2)
    assert torch.equal(values["step@2"], (ROWS + 1) * 4)


def test_the_pass_ends_after_the_last_executed_needed_call() -> None:
    """Not after the last listed: here the first listed runs last."""
    model, called = rebuilt(Plain), []
    model.pool.register_forward_hook(lambda *_: called.append("pool"))
    model.fc.register_forward_hook(lambda *_: called.append("fc"))
    with torch.inference_mode(), TapSession(model, [at("pool"), at("conv")]) as session:
        model(IMAGES)
    assert called == ["pool"]
    assert session.stopped_at == "pool"


def test_a_tapped_input_ends_the_pass_before_the_module_runs() -> None:
    model, called = rebuilt(Plain), []
    model.fc.register_forward_hook(lambda *_: called.append("fc"))
    with torch.inference_mode(), TapSession(model, [at("fc", port="in", picks=(0,))]) as session:
        model(IMAGES)
    assert not called
    assert session.stopped_at == "fc"


def test_a_models_own_except_does_not_keep_a_stopped_pass_alive() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            with suppress(Exception):
                x = self.inner(x)
            return self.after(x)

    model, called = Swallows(), []
    model.after.register_forward_hook(lambda *_: called.append("after"))
    with TapSession(model, [at("inner")]):
        model(ROWS)
    assert not called


def test_no_hook_is_left_after_a_pass() -> None:
    model = rebuilt(Plain)
    with TapSession(model, [at("relu", 1), at("fc", port="in", picks=(0,))]):
        model(IMAGES)
    assert hook_count(model) == 0


def test_no_hook_is_left_after_a_pass_that_was_stopped() -> None:
    model = rebuilt(Plain)
    with TapSession(model, [at("conv")]):
        model(IMAGES)
    assert hook_count(model) == 0


def test_no_hook_is_left_after_the_forward_pass_fails() -> None:
    model = rebuilt(Plain)
    with pytest.raises(RuntimeError), TapSession(model, [at("conv"), at("fc")]):
        model(IMAGES[:, :2])
    assert hook_count(model) == 0


def test_no_hook_is_left_when_a_value_cannot_be_picked() -> None:
    model = rebuilt(Plain)
    with pytest.raises(KeyError), TapSession(model, [at("conv", picks=(0,)), at("fc")]):
        model(IMAGES)
    assert hook_count(model) == 0


def test_a_bad_path_registers_nothing() -> None:
    model = rebuilt(Plain)
    with pytest.raises(AttributeError), TapSession(model, [at("conv"), at("nowhere")]):
        model(IMAGES)
    assert hook_count(model) == 0


def test_a_hook_that_cannot_be_registered_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rebuilt(Plain)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(model.fc, "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no hooks here"), TapSession(model, [at("conv"), at("fc")]):
        pass
    assert hook_count(model) == 0


def test_foreign_hooks_stay_and_run() -> None:
    model, called = rebuilt(Plain), []
    model.conv.register_forward_hook(lambda *_: called.append("conv"))
    with TapSession(model, [at("conv"), at("conv", port="in", picks=(0,))]):
        model(IMAGES)
    model(IMAGES)
    assert called == ["conv", "conv"]
    assert hook_count(model) == 1


def test_a_session_without_targets_lets_the_pass_run() -> None:
    model = rebuilt(Plain)
    with TapSession(model, []) as session:
        assert model(IMAGES).shape == (2, 5)
    assert session.stopped_at is None


def test_two_names_for_one_value_both_get_it() -> None:
    model = rebuilt(Plain)
    with TapSession(model, [at("fc", name="a"), at("fc", name="b")]) as session:
        model(IMAGES)
    assert torch.equal(session.values["a"], session.values["b"])


class Checked(nn.Linear):
    """Refuses its own output in a forward hook, as checks for NaN do."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_forward_hook(self.refuse)

    def refuse(self, *_: object) -> None:
        raise ValueError("NaN found")


def test_a_tap_does_not_hide_the_error_of_an_earlier_hook_at_its_module() -> None:
    model = nn.Sequential(Checked())
    with pytest.raises(ValueError, match="NaN found"), TapSession(model, [at("0")]) as session:
        model(ROWS)
    assert session.values == {}


def test_a_module_that_is_called_while_an_error_is_handled_is_collected() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with TapSession(model, [at("0")]) as session:
        try:
            raise KeyError("of the caller")
        except KeyError:
            model(ROWS)
    assert torch.equal(session.values["0@0"], model(ROWS))
