"""A recorded pass: order, calls, shapes, and which values are written to after a hook has seen them."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.odd_models import CatchesErrors, InPlaceOnInput, Overwrites, Recursive
from tests.support.models.tiny_models import Plain, Structured
from tests.support.servers.footprint import hook_count
from tests.unit.surgery.recordings import outputs, recorded
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, record_calls


def test_modules_come_in_the_order_of_their_first_call_and_the_never_called_last() -> None:
    recording = recorded(Plain, (2, 3, 8, 8))
    assert list(recording.modules) == ["", "conv", "relu", "conv2", "pool", "fc", "unused"]


def test_the_order_is_that_of_calls_and_not_of_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Tanh(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.first(x))

    assert list(recorded(Backwards, (3,)).modules) == ["", "first", "last"]


def test_every_call_of_a_module_is_counted() -> None:
    recording = recorded(Plain, (2, 3, 8, 8))
    counts = {path: len(record.calls) for path, record in recording.modules.items()}
    assert counts == {"": 1, "conv": 1, "relu": 2, "conv2": 1, "pool": 1, "fc": 1, "unused": 0}


def test_a_call_starts_before_and_ends_after_the_calls_inside_it() -> None:
    recording = recorded(Plain, (2, 3, 8, 8))
    root = recording.modules[""].calls[0]
    inner = [call for path, record in recording.modules.items() if path for call in record.calls]
    assert all(root.started < call.started < call.ended < root.ended for call in inner)


def test_shapes_and_dtypes_are_those_of_the_inputs_given() -> None:
    leaf = outputs(recorded(Plain, (7, 3, 8, 8)), "conv")[0]
    assert (leaf.shape, leaf.dtype, leaf.byte_count) == ((7, 4, 8, 8), torch.float32, 7 * 4 * 64 * 4)


def test_structures_are_recorded_leaf_by_leaf() -> None:
    recording = recorded(Structured, (4, 3))
    assert [(leaf.picks, leaf.type_name) for leaf in outputs(recording, "split")] == [
        ((0,), "Tensor"),
        ((1,), "NoneType"),
        ((2,), "int"),
    ]
    assert [leaf.picks for leaf in outputs(recording, "both")] == [("first",), ("second",)]
    assert [leaf.picks for leaf in outputs(recording, "")] == [("out",), ("aux",)]


def test_inputs_are_recorded_by_position_and_by_keyword() -> None:
    inputs = recorded(Structured, (4, 3)).modules["split"].calls[0].inputs
    assert [(leaf.port, leaf.picks) for leaf in inputs] == [("in", (0,)), ("in(scale)", ())]


def test_keyword_inputs_of_the_model_are_passed_on() -> None:
    with torch.device("meta"):
        recording = record_calls(Structured(), [torch.zeros(4, 3)], {"bias": torch.zeros(3)})
    assert [leaf.port for leaf in recording.modules[""].calls[0].inputs] == ["in", "in(bias)"]


def test_what_a_later_module_overwrites_in_place_is_marked() -> None:
    recording = recorded(Plain, (2, 3, 8, 8))
    marks = {
        path: outputs(recording, path)[0].is_overwritten for path in ("conv", "relu", "conv2", "pool", "fc")
    }
    assert marks == {"conv": True, "relu": False, "conv2": True, "pool": False, "fc": False}


def test_the_input_of_an_in_place_module_is_marked() -> None:
    relu = recorded(Plain, (2, 3, 8, 8)).modules["relu"].calls[0]
    assert relu.inputs[0].is_overwritten


def test_a_model_that_overwrites_its_own_input_is_noticed() -> None:
    recording = recorded(InPlaceOnInput, (2, 3))
    assert recording.modules[""].calls[0].inputs[0].is_overwritten
    assert outputs(recording, "identity")[0].is_overwritten


@pytest.mark.parametrize(
    ("index", "way"),
    list(
        enumerate(["in place", "through detach()", "through a view", "with out=", "through .data", "by item"])
    ),
)
def test_a_write_is_noticed_whichever_way_it_takes(index: int, way: str) -> None:
    assert outputs(recorded(Overwrites, (2, 3)), f"ways.{index}")[0].is_overwritten, way


def test_without_symbols_every_value_counts_as_overwritten() -> None:
    recording = recorded(Plain, (2, 3, 8, 8), is_symbolic=False)
    assert not recording.is_symbolic
    assert all(
        leaf.is_overwritten
        for record in recording.modules.values()
        for call in record.calls
        for leaf in call.outputs
    )


def test_calls_inside_a_call_of_the_same_module_keep_their_outputs_apart() -> None:
    calls = recorded(Recursive, (3,)).modules["nested"].calls
    assert [call.started for call in calls] == sorted(call.started for call in calls)
    assert [call.ended for call in calls] == sorted((call.ended for call in calls), reverse=True)


def test_a_call_that_raises_has_an_index_and_no_output() -> None:
    calls = recorded(CatchesErrors, (3,)).modules["step"].calls
    assert [len(call.outputs) for call in calls] == [0, 1, 1]


def test_a_recorded_model_has_no_hook_left() -> None:
    with torch.device("meta"):
        model = Plain()
        record_calls(model, [torch.zeros(1, 3, 8, 8)])
    assert hook_count(model) == 0


def test_a_recording_that_fails_leaves_no_hook() -> None:
    with torch.device("meta"):
        model = Plain()
        with pytest.raises(RuntimeError):
            record_calls(model, [torch.zeros(1, 4, 8, 8)])
    assert hook_count(model) == 0


def test_a_recording_leaves_foreign_hooks_alone() -> None:
    seen: list[int] = []
    with torch.device("meta"):
        model = Plain()
        model.fc.register_forward_hook(lambda *_: seen.append(1))
        record_calls(model, [torch.zeros(1, 3, 8, 8)])
        model(torch.zeros(1, 3, 8, 8))
    assert len(seen) == 3  # a symbolic recording runs the model twice


def test_a_check_that_refuses_spares_the_second_pass() -> None:
    passes = 0

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            return x + 1

    def check(recording: Recording) -> None:
        leaf = recording.modules[""].calls[0].outputs[0]
        if leaf.byte_count > 100:
            raise ServiceError(ErrorReason.REPLY_TOO_LARGE, "too large")

    record_calls(Counts(), [torch.empty(5, device="meta")], check=check)
    assert passes == 2
    with pytest.raises(ServiceError):
        record_calls(Counts(), [torch.empty(500, device="meta")], check=check)
    assert passes == 3
