"""Passes by OpenVINO: traced, converted, compiled, run."""

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from tests.unit.engine.compiled.backends.nets import batch, folding, into, out, recipe, seeded
from tests.unit.engine.compiled.backends.test_torch_runner import eager
from trocar_server.engine.compiled.backends.conversion import convert
from trocar_server.engine.compiled.backends.graph_tracing import trace
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.request.numerics import Numerics, worst_deviation
from trocar_server.surgery import Target

pytest.importorskip("openvino")

WANTED = recipe(out("conv"), out("norm"), out("relu", 0), out("relu", 1), into("fc"), out("fc"))


def test_the_graph_holds_nothing_behind_the_last_value(tmp_path: Path) -> None:
    import openvino

    convert(folding(), recipe(out("relu", 0)), tmp_path)
    graph = openvino.Core().read_model(tmp_path / "graph.xml")
    kinds = [operation.get_type_name() for operation in graph.get_ops()]
    assert kinds.count("Convolution") == 1
    assert not {"MatMul", "ReduceMean"} & set(kinds)


def test_tracing_leaves_no_hook_behind() -> None:
    model = folding()
    trace(model, WANTED)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
def test_values_are_those_of_the_eager_pass_at_any_batch_size(tmp_path: Path, numerics: Numerics) -> None:
    model = folding()
    convert(model, WANTED, tmp_path)
    runner = OpenVinoRunner(tmp_path, WANTED, numerics, 1)
    limit = 1.0 if numerics is Numerics.FAST else 2.0
    for rows in (1, 2, 7):
        expected = eager(model, WANTED, batch(rows))
        assert worst_deviation(numerics, expected, runner.run([batch(rows)])) < limit


def test_values_belong_to_the_caller(tmp_path: Path) -> None:
    wanted = recipe(out("fc"))
    convert(folding(), wanted, tmp_path)
    runner = OpenVinoRunner(tmp_path, wanted, Numerics.FAST, 1)
    first = runner.run([batch(2)])["fc@0"]
    copy = first.clone()
    runner.run([batch(2) * -3])
    assert torch.equal(first, copy)


def test_files_are_not_needed_once_the_runner_is_there(tmp_path: Path) -> None:
    wanted = recipe(out("fc"))
    convert(folding(), wanted, tmp_path)
    runner = OpenVinoRunner(tmp_path, wanted, Numerics.FAST, 1)
    for file in tmp_path.iterdir():
        file.unlink()
    assert runner.run([batch(3)])["fc@0"].shape == (3, 5)


def test_a_real_model_keeps_the_promise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval().requires_grad_(False)
    paths = ["conv1", "bn1", "layer1.0.conv1", "layer2.1.bn2", "layer4"]
    wanted: Recipe = recipe(
        *(Target(path, path, 0) for path in paths), Target("r", "layer2.0.relu", 1), row=(3, 64, 64)
    )
    convert(model, wanted, tmp_path)
    value = batch(2, (3, 64, 64))
    expected = eager(model, wanted, value)
    assert expected["bn1"].min() < -1  # what the in-place ReLU behind it would have made 0
    for numerics in (Numerics.FAST, Numerics.BF16):
        found = OpenVinoRunner(tmp_path, wanted, numerics, 1).run([value])
        assert worst_deviation(numerics, expected, found) < 1


# --- Indices outside of a table -------------------------------------------------------------------


class Table(nn.Module):
    """Looks up rows for whole numbers, ten at most."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 3)
        self.late = nn.Embedding(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(self.rows(x)), self.late(x)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(x).mean(1)
        return found


class Indexed(Table):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding.weight[x].mean(1)


class IndexedByTuple(Table):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding.weight[x[:, 0], :] + self.embedding.weight[x[:, 1], :]


class Selected(Table):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embedding.weight.index_select(0, x.flatten())
        return found.reshape(x.shape[0], -1, 4).mean(1)


class Gathered(Table):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding.weight.gather(0, x)


IDS = Recipe((ArgumentSpec(torch.int64, (4,)),), (out("fc"),))


@pytest.mark.parametrize("kind", [Table, Indexed, IndexedByTuple, Selected])
def test_an_index_outside_of_a_table_is_an_error_as_in_the_eager_pass(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    model = seeded(kind)
    convert(model, IDS, tmp_path)
    runner = OpenVinoRunner(tmp_path, IDS, Numerics.FAST, 1)
    for ids in ([9, 8, 7, 0], [3, 3, 10, 3], [10, 1, 1, 1], [1, -11, 1, 1], [-1, 1, 1, 1], [2**32 + 3] * 4):
        given = torch.tensor([ids, [1, 2, 3, 4]])
        try:
            expected = eager(model, IDS, given)
        except IndexError:
            with pytest.raises(IndexError):
                runner.run([given])
        else:
            assert worst_deviation(Numerics.FAST, expected, runner.run([given])) < 1


def test_functions_in_which_openvino_fails_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the indices of gather"):
        convert(seeded(Gathered), IDS, tmp_path)
