"""Values of the functions that a model calls: recorded without data, collected from a pass."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torchvision.models import VisionTransformer

from tests.support.servers.footprint import hook_count
from trocar_api.reasons import ErrorReason
from trocar_server.surgery import PassAborted, PassGuard, TapSession, Target, ValueMissingError
from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.sessions.functions import FunctionSession, record_functions
from trocar_server.surgery.sessions.taps import Collector

ATTENTION = "scaled_dot_product_attention"
ROWS = torch.arange(6.0).reshape(2, 3) - 2
IMAGES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))


class Steps(nn.Module):
    """Adds twice, writes in place between, and catches an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        x = x + 1
        y = self.identity(x) * 2
        with suppress(RuntimeError):
            torch.cat([x, y[0]])
        y.relu_()
        return torch.cat([x + 10, y], dim=0)


def vision_transformer() -> VisionTransformer:
    torch.manual_seed(7)
    return VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16
    ).eval()


def at(path: str, call: int = 0, port: str = "out", picks: tuple[int | str, ...] = ()) -> Target:
    return Target(f"{path}@{call}/{port}{picks or ''}", path, call, port, picks, kind="fn")


def on_meta(kind: type[nn.Module], *shape: int) -> dict[str, ModuleRecord]:
    with torch.device("meta"):
        return record_functions(kind().eval(), [torch.zeros(shape)])


def collected(model: nn.Module, targets: list[Target], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode(), FunctionSession(targets) as session:
        model(inputs.clone())
    return session.values


def test_functions_are_recorded_in_the_order_of_their_first_calls() -> None:
    records = on_meta(Steps, 2, 3)
    assert {name: len(record.calls) for name, record in records.items()} == {
        "add": 2,
        "mul": 1,
        "getitem": 1,
        "cat": 2,
        "relu_": 1,
    }
    assert {record.type_name for record in records.values()} == {"function"}


def test_a_call_is_recorded_with_what_it_takes_and_returns() -> None:
    call = on_meta(Steps, 2, 3)["cat"].calls[1]
    assert [(leaf.port, leaf.picks, leaf.shape) for leaf in call.inputs] == [
        ("in", (0, 0), (2, 3)),
        ("in", (0, 1), (2, 3)),
        ("in(dim)", (), None),
    ]
    assert [(leaf.port, leaf.shape) for leaf in call.outputs] == [("out", (4, 3))]


def test_a_call_that_raised_is_recorded_without_outputs() -> None:
    call = on_meta(Steps, 2, 3)["cat"].calls[0]
    assert call.inputs
    assert not call.outputs
    assert call.ended > call.started


def test_what_is_overwritten_later_is_marked() -> None:
    records = on_meta(Steps, 2, 3)
    assert records["mul"].calls[0].outputs[0].is_overwritten
    assert records["relu_"].calls[0].inputs[0].is_overwritten
    assert not records["relu_"].calls[0].outputs[0].is_overwritten
    assert not records["add"].calls[0].outputs[0].is_overwritten


def test_functions_that_give_no_tensor_are_left_out() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.size()
            x.dim()
            torch._assert(x.is_floating_point(), "no")
            return x.neg()

    assert list(on_meta(Asks, 3)) == ["neg"]


def test_a_recording_on_data_counts_the_same_calls() -> None:
    symbolic, real = on_meta(Steps, 2, 3), record_functions(Steps(), [ROWS], is_symbolic=False)
    assert {name: len(record.calls) for name, record in symbolic.items()} == {
        name: len(record.calls) for name, record in real.items()
    }
    assert real["add"].calls[0].outputs[0].is_overwritten


def test_the_calls_of_modules_made_by_the_first_pass_are_no_calls_of_the_model() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear: nn.Module | None = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.linear is None:
                self.linear = nn.Linear(3, 3, device=x.device)
            return self.linear(x)

    assert list(on_meta(Lazy, 2, 3)) == ["linear"]


def test_scores_are_recorded_as_an_output_of_attention() -> None:
    with torch.device("meta"):
        records = record_functions(vision_transformer(), [torch.zeros(2, 3, 16, 16)])
    outputs = records[ATTENTION].calls[1].outputs
    assert [(leaf.port, leaf.shape, leaf.is_overwritten) for leaf in outputs] == [
        ("out", (2, 2, 5, 4), False),
        ("scores", (2, 2, 5, 5), False),
        ("logits", (2, 2, 5, 5), False),
    ]


def test_values_are_those_of_the_calls() -> None:
    targets = [at("add"), at("mul"), at("relu_", port="in", picks=(0,)), at("cat", 1)]
    values = collected(Steps(), targets, ROWS)
    assert torch.equal(values["add@0/out"], ROWS + 1)
    assert torch.equal(values["mul@0/out"], (ROWS + 1) * 2)
    assert torch.equal(values["relu_@0/in(0,)"], (ROWS + 1) * 2)
    assert torch.equal(values["cat@1/out"], torch.cat([ROWS + 11, F.relu((ROWS + 1) * 2)]))


def test_the_scores_of_a_vision_transformer_are_the_weights_of_its_attention() -> None:
    model = vision_transformer()
    weights: list[torch.Tensor] = []

    def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    for path in (f"encoder.layers.encoder_layer_{index}.self_attention" for index in (0, 1)):
        model.get_submodule(path).register_forward_pre_hook(ask, with_kwargs=True)
        model.get_submodule(path).register_forward_hook(lambda *call: weights.append(call[2][1]))
    with torch.inference_mode():
        model(IMAGES)
    values = collected(vision_transformer(), [at(ATTENTION, call, "scores") for call in (0, 1)], IMAGES)
    for call in (0, 1):
        scores = values[f"{ATTENTION}@{call}/scores"]
        torch.testing.assert_close(scores, weights[call], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scores.sum(-1), torch.ones(2, 2, 5))


def test_scores_times_values_are_the_output_of_the_call() -> None:
    targets = [at(ATTENTION, 1, "scores"), at(ATTENTION, 1), at(ATTENTION, 1, "in", (2,))]
    values = collected(vision_transformer(), targets, IMAGES)
    scores, out, value = (values[target.name] for target in targets)
    torch.testing.assert_close(scores @ value, out, rtol=0, atol=1e-6)


def test_other_values_agree_with_the_fused_kernels_up_to_rounding() -> None:
    model = vision_transformer()
    nn.init.normal_(model.get_parameter("heads.head.weight"))
    with torch.inference_mode():
        expected = model(IMAGES)
    found: list[torch.Tensor] = []
    model.register_forward_hook(lambda *call: found.append(call[2]))
    collected(model, [at("linear", 99)], IMAGES)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)


def test_the_pass_ends_after_the_last_needed_call() -> None:
    called: list[str] = []
    model = Steps()
    model.identity.register_forward_hook(lambda *_: called.append("identity"))
    with FunctionSession([at("add")]) as session:
        model(ROWS)
    assert session.stopped_at == "add"
    assert not called


def test_modules_and_functions_are_collected_in_one_pass_which_ends_after_both() -> None:
    collector = Collector()
    taps = [Target("identity", "identity", 0)]
    functions = [at("mul"), at("add", 1)]
    model = Steps()
    with TapSession(model, taps, collector), FunctionSession(functions, collector):
        model(ROWS.clone())
    assert collector.values.keys() == {"identity", "mul@0/out", "add@1/out"}
    assert torch.equal(collector.values["identity"], ROWS + 1)
    assert collector.stopped_at == "add"


def test_the_copies_of_taps_are_no_calls_of_the_model() -> None:
    class Clones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.identity = nn.Identity()

        def forward(self, x: torch.Tensor) -> Any:
            return self.identity(x + 1).clone() * 2

    model, collector = Clones(), Collector()
    with (
        TapSession(model, [Target("identity", "identity", 0)], collector),
        FunctionSession([at("clone"), at("clone", 1)], collector),
    ):
        model(ROWS)
    assert collector.values.keys() == {"identity", "clone@0/out"}


def test_no_mode_is_left_after_a_pass() -> None:
    collected(Steps(), [at("add")], ROWS)
    assert _get_current_function_mode_stack() == []


def test_no_mode_is_left_after_the_forward_pass_fails() -> None:
    with pytest.raises(RuntimeError), FunctionSession([at("linear", 5)]):
        vision_transformer()(IMAGES[:, :2])
    assert _get_current_function_mode_stack() == []


def test_no_mode_is_on_without_targets() -> None:
    with FunctionSession([]) as session:
        assert _get_current_function_mode_stack() == []
        Steps()(ROWS)
    assert session.values == {}


def test_an_element_that_is_not_there_is_missing() -> None:
    with (
        pytest.raises(ValueMissingError, match="mine"),
        FunctionSession([Target("mine", "add", 0, "in(alpha)")]),
    ):
        Steps()(ROWS)
    assert _get_current_function_mode_stack() == []


def test_a_port_that_only_attention_has_is_missing_elsewhere() -> None:
    with pytest.raises(ValueMissingError), FunctionSession([at("add", port="scores")]):
        Steps()(ROWS)


def test_a_call_that_never_comes_yields_nothing() -> None:
    with FunctionSession([at("add"), at("add", 7)]) as session:
        Steps()(ROWS)
    assert session.values.keys() == {"add@0/out"}
    assert session.stopped_at is None


def test_two_sessions_in_sequence_collect_the_same() -> None:
    model = vision_transformer()
    targets = [at(ATTENTION, 0, "scores"), at("linear", 3), at("gelu", 1)]
    first, second = collected(model, targets, IMAGES), collected(model, targets, IMAGES)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == second.keys() == {target.name for target in targets}
    assert hook_count(model) == 0


def test_a_guard_stops_a_pass_between_two_functions_of_one_module() -> None:
    guard, seen = PassGuard(), []

    class Cancelled(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            x = x + 1
            guard.cancel()
            with suppress(Exception):
                x = x + 1
            seen.append("after")
            return x

    with pytest.raises(PassAborted) as caught, FunctionSession([at("add", 5)], guard=guard):
        Cancelled()(ROWS)
    assert caught.value.reason is ErrorReason.CANCELLED
    assert not seen
    assert _get_current_function_mode_stack() == []
