"""Changing values with hooks: what is changed, and that nothing is left behind."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.tiny_models import Plain
from tests.support.servers.footprint import hook_count
from tests.support.servers.serving import rebuilt
from trocar_server.models import make_replica
from trocar_server.surgery import (
    CallInput,
    Collector,
    EditSession,
    EditTarget,
    TapSession,
    Target,
    ValueMissingError,
)
from trocar_server.tensors.edits import Add, AddInput, Edit, Scale, Skip, Swap, Zero

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def at(path: str, call: int = 0, port: str = "out", picks: tuple[int | str, ...] = ()) -> Target:
    return Target(f"{path}@{call}/{port}", path, call, port, picks)


def state_of(model: nn.Module) -> tuple[int, list[bool], list[int]]:
    tables = [id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    return hook_count(model), ["forward" in vars(module) for module in model.modules()], tables


def plain() -> Any:
    return make_replica(rebuilt(Plain).eval().requires_grad_(False))


def run(model: Any, *edits: EditTarget, found: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    before = state_of(model)
    with EditSession(model, edits, found), torch.inference_mode():
        result: torch.Tensor = model(IMAGES)
    assert state_of(model) == before
    return result


def by_hand(model: Any, change: Any) -> torch.Tensor:
    """Compute the forward of `Plain` step by step; `change(place, value)` returns what goes on."""
    with torch.inference_mode():
        x = change("conv", model.conv(IMAGES))
        x = change("relu@0", torch.relu(x))
        x = change("conv2", model.conv2(change("conv2/in", x)))
        x = torch.relu(x)
        result: torch.Tensor = model.fc(model.pool(x).flatten(1))
    return result


@pytest.mark.parametrize(
    ("target", "place"),
    [
        (at("conv"), "conv"),
        (at("relu"), "relu@0"),
        (at("conv2"), "conv2"),
        (at("conv2", 0, "in", (0,)), "conv2/in"),
    ],
)
def test_an_edited_value_goes_on_through_the_model(target: Target, place: str) -> None:
    model = plain()
    found = run(model, EditTarget(target, Edit(Scale(0.5))))
    expected = by_hand(model, lambda where, value: value * 0.5 if where == place else value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_edits_of_one_value_run_in_the_order_of_the_list() -> None:
    model, one, two = plain(), Edit(Scale(2.0)), Edit(Add(1.0))
    first = run(model, EditTarget(at("conv"), one), EditTarget(at("conv"), two))
    second = run(model, EditTarget(at("conv"), two), EditTarget(at("conv"), one))
    expected = [
        by_hand(model, lambda where, value: value * 2 + 1 if where == "conv" else value),
        by_hand(model, lambda where, value: (value + 1) * 2 if where == "conv" else value),
    ]
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_taps_see_what_sessions_entered_before_have_changed() -> None:
    model = plain()
    target = at("conv")
    plain_value = model.conv(IMAGES)
    taps = TapSession(model, [target], Collector(ends_pass=False))
    before, after = ([EditTarget(target, Edit(operation))] for operation in (Scale(3.0), Zero()))
    results = []
    with torch.inference_mode(), EditSession(model, before), taps, EditSession(model, after):
        results.append(model(IMAGES))
    assert torch.equal(taps.values[target.name], plain_value * 3)
    expected = by_hand(model, lambda where, value: value * 0 if where == "conv" else value)
    assert torch.equal(results[0], expected)


def test_the_input_of_an_in_place_module_is_added_as_it_was() -> None:
    model = plain()
    call_input = CallInput("in", (0,), clone=True)
    found = run(model, EditTarget(at("relu"), Edit(AddInput()), call_input=call_input))
    with torch.inference_mode():
        x = model.conv(IMAGES)
        x = torch.relu(x) + x
        expected = model.fc(model.pool(torch.relu(model.conv2(x))).flatten(1))
    assert torch.equal(found, expected)


class Counting(nn.Module):
    """Adds one, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return self.inner(x) + 1


class Twice(nn.Module):
    """Calls one module three times; the second fails and is caught."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Counting()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.part(x)
        try:
            self.part("no tensor")
        except TypeError:
            x = self.part(x)
        return x


def test_a_skipped_call_returns_its_input_and_does_not_run() -> None:
    model: Any = Twice()
    call_input = CallInput("in", (0,))
    skips = [EditTarget(at("part", call), Edit(Skip()), call_input=call_input) for call in (0, 2)]
    rows = torch.ones(2, 3)
    with EditSession(model, skips[:1]):
        assert torch.equal(model(rows), rows + 1)
    assert model.part.runs == 2  # the one that fails, and the last
    with EditSession(model, skips):
        result = model(rows)
    assert torch.equal(result, rows)
    assert result is not rows  # what comes later may write to it
    assert model.part.runs == 3
    assert torch.equal(model(rows), rows + 2)


def test_parameters_are_others_for_the_pass_alone() -> None:
    model = plain()
    weight = model.fc.weight
    before = weight.clone()
    found = run(model, EditTarget(at("fc", 0, "param(weight)"), Edit(Scale(2.0))))
    with torch.inference_mode():
        features = model.pool(torch.relu(model.conv2(torch.relu(model.conv(IMAGES))))).flatten(1)
        assert torch.equal(found, nn.functional.linear(features, weight * 2, model.fc.bias))
    assert model.fc.weight is weight
    assert torch.equal(weight, before)


def test_tied_weights_change_together() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    rows, weight = torch.rand(2, 3), model[0].weight
    with EditSession(model, [EditTarget(at("1", 0, "param(weight)"), Edit(Scale(2.0)))]):
        assert torch.equal(model(rows), rows @ (2 * weight).T @ (2 * weight).T)
    assert model[0].weight is weight
    assert model[1].weight is weight


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_takes_an_edited_weight(kind: type[nn.Module]) -> None:
    model: Any = kind(3, 4)
    rows = torch.rand(5, 2, 3)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.weight_hh_l0.mul_(0.5)
        with EditSession(model, [EditTarget(at("", 0, "param(weight_hh_l0)"), Edit(Scale(0.5)))]):
            found = model(rows)[0]
        assert torch.equal(found, changed(rows)[0])
        assert not torch.equal(model(rows)[0], found)


def test_a_swap_puts_in_what_was_found() -> None:
    model = plain()
    other = torch.rand(2, 4, 8, 8)
    swap = EditTarget(at("conv"), Edit(Swap(source="a")), found="elsewhere")
    found = run(model, swap, found={"elsewhere": other})
    assert torch.equal(found, by_hand(model, lambda where, value: other if where == "conv" else value))


def test_everything_is_as_before_when_the_pass_fails() -> None:
    model = plain()
    before = state_of(model)
    edits = [
        EditTarget(at("fc", 0, "param(weight)"), Edit(Scale(2.0))),
        EditTarget(at("conv2"), Edit(Skip()), call_input=CallInput("in", (0,))),
        EditTarget(at("conv", 0, "out", (3, "no")), Edit(Zero())),
    ]
    with pytest.raises(ValueMissingError), EditSession(model, edits):
        model(IMAGES)
    assert state_of(model) == before


def test_nothing_is_registered_when_one_edit_is_impossible() -> None:
    model = plain()
    before = state_of(model)
    edits = [
        EditTarget(at("conv"), Edit(Zero())),
        EditTarget(at("fc", 0, "param(weight)"), Edit(Zero())),
        EditTarget(at("fc", 0, "param(no)"), Edit(Zero())),
    ]
    with pytest.raises(ValueMissingError), EditSession(model, edits):
        raise AssertionError("not reached")
    assert state_of(model) == before
