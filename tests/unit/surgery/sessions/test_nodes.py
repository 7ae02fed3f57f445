"""Values of graph nodes, against torchvision's extractor and the eager pass."""

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torchvision.models import (
    DenseNet,
    VisionTransformer,
    mobilenet_v3_small,
    resnet18,
    shufflenet_v2_x0_5,
    squeezenet1_1,
)
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.video.swin_transformer import SwinTransformer3d

from tests.support.models.tiny_models import Plain
from tests.support.oracles.extractor import extracted
from tests.support.servers.footprint import hook_count
from tests.unit.surgery.recording.test_graph import MakesConstants
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassAborted, PassGuard, TapSession, Target, ValueMissingError
from trocar_server.surgery.recording.graph import TracedGraph, trace_graph
from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.sessions.nodes import NodeSession, record_nodes
from trocar_server.surgery.sessions.taps import Collector
from trocar_server.surgery.structure import leaves

ROWS = torch.arange(6.0).reshape(2, 3) - 2
IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(7))

Builder = Callable[[], nn.Module]
Built = TypeVar("Built", bound=nn.Module)


def swin() -> Any:
    return SwinTransformer([4, 4], 8, [2, 2], [2, 2], window_size=[4, 4], num_classes=10)


def video_swin() -> Any:
    """Its attention changes a list that is written in the model's code."""
    return SwinTransformer3d([2, 4, 4], 8, [2], [2], window_size=[2, 4, 4], num_classes=10)


def vision_transformer() -> Any:
    return VisionTransformer(64, 16, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=10)


def segmentation() -> Any:
    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)


class DropsResult(nn.Module):
    """Adds in place and uses the tensor itself; torchvision's extractor would lose the sum."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        y.add_(1)
        return y * 3


def seeded(kind: Callable[[], Built]) -> Built:
    torch.manual_seed(7)
    return kind().eval()


def on_meta(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def recorded(model: nn.Module, traced: TracedGraph, *inputs: torch.Tensor) -> dict[str, ModuleRecord]:
    return record_nodes(on_meta(model), traced, [tensor.to("meta") for tensor in inputs])


def targets_of(records: dict[str, ModuleRecord]) -> list[Target]:
    return [
        Target(f"{name}{leaf.picks or ''}", name, 0, "out", leaf.picks, leaf.is_overwritten, "fx")
        for name, record in records.items()
        for leaf in record.calls[0].outputs
        if leaf.shape is not None
    ]


def collected(model: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Collect every node."""
    traced = trace_graph(model)
    session = NodeSession(traced, targets_of(recorded(model, traced, *inputs)))
    with torch.inference_mode():
        session.run(model, [tensor.clone() for tensor in inputs])
    return session.values


def at(node: str, **fields: Any) -> Target:
    return Target(node, node, 0, kind="fx", **fields)


@pytest.mark.parametrize(
    "kind",
    [
        resnet18,
        squeezenet1_1,
        mobilenet_v3_small,
        shufflenet_v2_x0_5,
        lambda: DenseNet(8, (2, 2, 1, 1), 16, num_classes=10),
        swin,
        vision_transformer,
        segmentation,
        Plain,
        MakesConstants,
        DropsResult,
    ],
)
def test_every_node_is_bit_equal_to_torchvisions_extractor(kind: Builder) -> None:
    model = seeded(kind)
    inputs = ROWS if kind in (MakesConstants, DropsResult) else IMAGES
    found = collected(model, inputs)
    names = list(dict.fromkeys(name.partition("(")[0] for name in found))
    expected = next(extracted(model, [names], [inputs]))
    oracle = {
        f"{name}{picks or ''}": leaf
        for name in names
        for picks, leaf in leaves(expected[name])
        if isinstance(leaf, torch.Tensor)
    }
    assert found.keys() == oracle.keys()
    assert [name for name in found if not torch.equal(found[name], oracle[name])] == []


@pytest.mark.parametrize("kind", [resnet18, vision_transformer, swin, MakesConstants, DropsResult])
def test_the_last_node_is_bit_equal_to_the_eager_pass(kind: Builder) -> None:
    model = seeded(kind)
    inputs = ROWS if kind in (MakesConstants, DropsResult) else IMAGES
    with torch.inference_mode():
        expected = model(inputs.clone())
    found = collected(model, inputs)
    assert torch.equal(found[list(found)[-1]], expected)


def test_a_model_that_changes_a_list_of_its_own_runs() -> None:
    model, clip = seeded(video_swin), torch.rand(1, 3, 4, 16, 16)
    with torch.inference_mode():
        expected = model(clip)
    found = collected(model, clip)
    assert torch.equal(found["head"], expected)


def test_bn1_of_resnet18_keeps_its_true_minimum() -> None:
    """torchvision's extractor returns it after the ReLU, with a minimum of 0."""
    model = seeded(resnet18)
    with torch.inference_mode():
        expected = model.bn1(model.conv1(IMAGES))
    values = collected(model, IMAGES)
    assert expected.min() < -0.5
    assert torch.equal(values["bn1"], expected)


def test_only_what_is_overwritten_later_is_marked() -> None:
    model = seeded(DropsResult)
    records = recorded(model, trace_graph(model), ROWS)
    marks = {name: record.calls[0].outputs[0].is_overwritten for name, record in records.items()}
    assert marks == {"x": False, "mul": True, "add_": False, "mul_1": False}


def test_nodes_are_recorded_in_execution_order_with_their_shapes() -> None:
    model = seeded(Plain)
    traced = trace_graph(model)
    records = recorded(model, traced, torch.zeros(2, 3, 8, 8))
    assert tuple(records) == traced.names
    assert {record.type_name for record in records.values()} == {"node"}
    leaf = records["conv"].calls[0].outputs[0]
    assert (leaf.port, leaf.picks, leaf.shape, leaf.dtype) == ("out", (), (2, 4, 8, 8), torch.float32)
    started = [record.calls[0].started for record in records.values()]
    assert started == sorted(started)


def test_what_is_no_tensor_is_recorded_as_what_it_is() -> None:
    model = seeded(vision_transformer)
    records = recorded(model, trace_graph(model), IMAGES)
    assert [leaf.type_name for leaf in records["getattr_1"].calls[0].outputs] == ["int"] * 3


def test_a_recording_on_data_has_the_same_shapes() -> None:
    model = seeded(Plain)
    traced = trace_graph(model)
    symbolic = recorded(model, traced, IMAGES)
    real = record_nodes(model, traced, [IMAGES], is_symbolic=False)
    assert {n: [leaf.shape for leaf in r.calls[0].outputs] for n, r in symbolic.items()} == {
        n: [leaf.shape for leaf in r.calls[0].outputs] for n, r in real.items()
    }
    assert all(leaf.is_overwritten for record in real.values() for leaf in record.calls[0].outputs)


def test_one_graph_serves_every_replica() -> None:
    first, second = seeded(Plain), seeded(Plain)
    with torch.no_grad():
        second.conv.weight.mul_(2)
    session = NodeSession(trace_graph(first), [at("conv")])
    with torch.inference_mode():
        session.run(second, [IMAGES])
        assert torch.equal(session.values["conv"], second.conv(IMAGES))


def test_the_graph_keeps_no_model_alive() -> None:
    model = seeded(Plain)
    traced = trace_graph(model)
    NodeSession(traced, [at("conv")]).run(model, [IMAGES])
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    assert traced.names


def test_the_run_ends_after_the_last_executed_needed_node() -> None:
    model, called = seeded(Plain), []
    model.fc.register_forward_hook(lambda *_: called.append("fc"))
    session = NodeSession(trace_graph(model), [at("pool"), at("conv")])
    session.run(model, [IMAGES])
    assert session.stopped_at == "pool"
    assert not called


def test_values_are_freed_after_their_last_use() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    alive: list[bool] = []
    kept: list[weakref.ref[torch.Tensor]] = []
    model[0].register_forward_hook(lambda *call: kept.append(weakref.ref(call[2])))
    model[2].register_forward_pre_hook(lambda *_: alive.append(kept[0]() is not None))
    with torch.inference_mode():
        NodeSession(trace_graph(model), [at("3")]).run(model, [ROWS])
    assert alive == [False]


def test_a_value_that_nobody_uses_is_freed_at_once() -> None:
    class Wastes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waste, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            self.waste(x)
            return self.out(x)

    model = Wastes()
    alive: list[bool] = []
    kept: list[weakref.ref[torch.Tensor]] = []
    model.waste.register_forward_hook(lambda *call: kept.append(weakref.ref(call[2])))
    model.out.register_forward_pre_hook(lambda *_: alive.append(kept[0]() is not None))
    with torch.inference_mode():
        NodeSession(trace_graph(model), [at("out")]).run(model, [ROWS])
    assert alive == [False]


def test_a_guard_stops_a_run_before_the_next_node() -> None:
    model, guard, called = seeded(Plain), PassGuard(), []
    model.conv.register_forward_hook(lambda *_: guard.cancel())
    model.relu.register_forward_hook(lambda *_: called.append("relu"))
    with pytest.raises(PassAborted) as caught:
        NodeSession(trace_graph(model), [at("fc")]).run(model, [IMAGES], guard=guard)
    assert caught.value.reason is ErrorReason.CANCELLED
    assert not called


def test_hooks_of_called_modules_run_and_taps_can_share_the_run() -> None:
    model, collector = seeded(Plain), Collector()
    session = NodeSession(trace_graph(model), [at("relu")], collector)
    with TapSession(model, [Target("tap", "conv2", 0)], collector):
        session.run(model, [IMAGES])
    assert collector.values.keys() == {"relu", "tap"}
    assert collector.stopped_at == "conv2"
    assert hook_count(model) == 0


class Options(nn.Module):
    """Takes keywords and a default."""

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, bias: torch.Tensor) -> Any:
        return x * scale + bias


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [([ROWS], {"bias": ROWS}), ([ROWS, 3.0], {"bias": ROWS}), ([], {"x": ROWS, "scale": 4.0, "bias": ROWS})],
)
def test_inputs_are_bound_as_python_binds_them(args: list[Any], kwargs: dict[str, Any]) -> None:
    session = NodeSession(trace_graph(Options()), [at("add")])
    session.run(Options(), args, kwargs)
    assert torch.equal(session.values["add"], Options()(*args, **kwargs))


def test_a_pick_leads_into_what_a_node_returns() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.chunk(2)[1]

    session = NodeSession(trace_graph(Halves()), [Target("half", "chunk", 0, picks=(1,), kind="fx")])
    session.run(Halves(), [ROWS])
    assert torch.equal(session.values["half"], ROWS[1:])


def test_an_element_that_is_not_there_is_missing() -> None:
    session = NodeSession(trace_graph(Options()), [Target("mine", "mul", 0, picks=("no",), kind="fx")])
    with pytest.raises(ValueMissingError, match="mine"):
        session.run(Options(), [ROWS], {"bias": ROWS})


def test_a_node_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        NodeSession(trace_graph(Options()), [at("nowhere")])


def test_a_graph_that_does_not_fit_the_inputs_is_refused_without_folders() -> None:
    class TakesNone(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            return x if y is None else x + y

    traced = trace_graph(TakesNone())
    with pytest.raises(ServiceError) as caught:
        record_nodes(TakesNone(), traced, [ROWS.to("meta")])
    assert caught.value.reason is ErrorReason.NOT_TRACEABLE
    assert "select modules instead" in caught.value.message
    assert "\n" not in caught.value.message


def test_two_runs_collect_the_same() -> None:
    model = seeded(swin)
    first, second = collected(model, IMAGES), collected(model, IMAGES)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
