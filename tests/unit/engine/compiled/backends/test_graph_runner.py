"""Recorded passes: arguments are copied in, values are the caller's own, and nothing else is replayed."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.oracles.oracle import rebuilt_by_name
from tests.support.oracles.tape_graphs import TapeGraphs
from tests.unit.engine.compiled.backends.nets import batch, folding, into, out, recipe
from tests.unit.engine.compiled.backends.test_odd_passes import CASES
from tests.unit.engine.compiled.backends.test_torch_runner import eager
from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.candidates import candidates
from trocar_server.engine.compiled.backends.folding import find_pairs
from trocar_server.engine.compiled.backends.graph_runner import CannotRecordError, GraphRunner, PlainPass
from trocar_server.engine.compiled.backends.graphs import CudaGraphs, GraphApi, Values, graphs_of
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.request.numerics import Numerics, worst_deviation
from trocar_server.models import make_replica

WANTED = recipe(into("conv"), out("conv"), out("norm"), out("relu", 0), out("fc"))


@pytest.fixture
def graphs() -> TapeGraphs:
    return TapeGraphs()


class Looking(nn.Module):
    """Computes with a number that Python has seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())


def runner_of(graphs: GraphApi, model: nn.Module | None = None, most_graphs: int = 8) -> GraphRunner:
    tree = make_replica(model or folding())
    return GraphRunner(PlainPass(tree, WANTED, Numerics.EXACT), graphs, most_graphs)


def are_same(found: Values, expected: Values) -> bool:
    return found.keys() == expected.keys() and all(
        as_bytes(found[name]) == as_bytes(expected[name]) and found[name].dtype == expected[name].dtype
        for name in expected
    )


def as_bytes(value: torch.Tensor) -> bytes:
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def arguments_of(wanted: Recipe, seed: int, rows: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [_argument(spec, rows, generator) for spec in wanted.arguments]


def _argument(spec: ArgumentSpec, rows: int, generator: torch.Generator) -> torch.Tensor:
    shape = (rows, *spec.row_shape)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    return torch.randint(0, 10, shape, generator=generator).to(spec.dtype)


@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_bits_of_the_eager_pass(graphs: TapeGraphs, case: str) -> None:
    kind, wanted = CASES[case]
    torch.manual_seed(0)
    model = kind().eval()
    runner = GraphRunner(PlainPass(make_replica(model), wanted, Numerics.EXACT), graphs)
    for seed in range(5):
        (argument,) = arguments_of(wanted, seed)
        assert are_same(runner.run([argument.clone()]), eager(model, wanted, argument))
    assert (runner.graph_count, graphs.capture_count) == (1, 1)
    assert graphs.replay_count == 5  # one to check the recording, four calls


@pytest.mark.parametrize(
    ("name", "paths"),
    [("resnet18", ["bn1", "layer2", "layer4.1.conv2"]), ("mobilenet_v3_small", ["features.3", "avgpool"])],
)
def test_replays_of_torchvision_models_end_behind_the_last_tap(
    graphs: TapeGraphs, name: str, paths: Sequence[str]
) -> None:
    model = rebuilt_by_name(name)
    wanted = recipe(*map(out, paths), row=(3, 64, 64))
    runner = GraphRunner(PlainPass(make_replica(model), wanted, Numerics.EXACT), graphs)
    for seed in range(3):
        (argument,) = arguments_of(wanted, seed)
        assert are_same(runner.run([argument]), eager(model, wanted, argument))
    assert graphs.replay_count == 3


def test_a_pass_that_looks_at_a_value_cannot_be_recorded(graphs: TapeGraphs) -> None:
    runner = GraphRunner(PlainPass(Looking(), recipe(out("")), Numerics.EXACT), graphs)
    runner.run([torch.ones(2, 2)])
    with pytest.raises(CannotRecordError, match="not permitted"):
        runner.run([torch.ones(2, 2)])


def test_a_later_replay_leaves_the_values_of_earlier_ones(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs), folding()
    found = [runner.run([batch() * number]) for number in range(6)]
    assert all(are_same(values, eager(model, WANTED, batch() * i)) for i, values in enumerate(found))
    addresses = [value.data_ptr() for values in found for value in values.values()]
    assert len(set(addresses)) == len(addresses)


def test_arguments_are_left_as_they_were(graphs: TapeGraphs) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.relu(x)
            return found

    wanted = recipe(out("relu"))
    runner = GraphRunner(PlainPass(Writing(), wanted, Numerics.EXACT), graphs)
    runner.run([-batch()])
    for _ in range(3):
        argument = -batch()
        found = runner.run([argument])
        assert torch.equal(argument, -batch())
        assert torch.equal(found["relu@0"], (-batch()).relu())


def test_nan_and_infinity_are_bits_like_others(graphs: TapeGraphs) -> None:
    runner, argument = runner_of(graphs), batch()
    argument[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42, 0, 0, 0])
    expected = eager(folding(), WANTED, argument)
    assert all(are_same(runner.run([argument]), expected) for _ in range(3))
    assert runner.graph_count == 1


# --- What is not replayed -------------------------------------------------------------------------


def test_each_batch_size_has_its_own_recording_and_comes_first_as_it_is(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs), folding()
    for rows in (1, 2, 3):
        runner.run([batch(rows)])
    assert graphs.capture_count == 0
    for rows in (3, 2, 1, 1, 2, 3):
        assert are_same(runner.run([batch(rows)]), eager(model, WANTED, batch(rows)))
    assert graphs.capture_count == 3


def test_another_dtype_is_another_form(graphs: TapeGraphs) -> None:
    runner = GraphRunner(PlainPass(nn.Identity(), recipe(out("")), Numerics.EXACT), graphs)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64, torch.float64):
        (found,) = runner.run([torch.ones(2, 3, dtype=dtype)]).values()
        assert found.dtype == dtype
    assert runner.graph_count == 2


def test_the_number_of_recordings_is_bounded(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs, most_graphs=2), folding()
    for _ in range(3):
        for rows in range(1, 6):
            assert are_same(runner.run([batch(rows)]), eager(model, WANTED, batch(rows)))
    assert (runner.graph_count, graphs.capture_count) == (2, 2)


def test_forms_that_come_once_are_not_remembered_for_ever(graphs: TapeGraphs) -> None:
    runner = GraphRunner(PlainPass(nn.Identity(), recipe(out("")), Numerics.EXACT), graphs)
    for rows in range(1, 1000):
        runner.run([torch.ones(rows, 1)])
    assert len(runner._seen) <= 64
    assert graphs.capture_count == 0


def test_a_pass_of_which_nothing_can_be_recorded_says_so(graphs: TapeGraphs) -> None:
    graphs.problem = "operation not permitted when stream is capturing"
    runner = runner_of(graphs)
    runner.run([batch()])
    with pytest.raises(CannotRecordError, match="not permitted"):
        runner.run([batch()])


def test_a_size_that_cannot_be_recorded_beside_one_that_is_runs_as_it_is(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs), folding()
    for _ in range(2):
        runner.run([batch(1)])
    graphs.problem = "out of memory"
    for rows in (2, 2, 2, 1):
        assert are_same(runner.run([batch(rows)]), eager(model, WANTED, batch(rows)))
    assert (runner.graph_count, graphs.capture_count) == (1, 2)


def test_a_recording_without_memory_is_tried_again(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs), folding()
    runner.run([batch()])
    graphs.problem = "can't allocate memory"
    with pytest.raises(RuntimeError, match="allocate"):
        runner.run([batch()])
    graphs.problem = ""
    assert all(are_same(runner.run([batch()]), eager(model, WANTED, batch())) for _ in range(3))
    assert (runner.graph_count, graphs.capture_count) == (1, 2)


def test_a_recording_that_lacks_memory_three_times_is_none(graphs: TapeGraphs) -> None:
    runner = runner_of(graphs)
    graphs.problem = "can't allocate memory"
    for error in (RuntimeError, RuntimeError, CannotRecordError):
        runner.run([batch()])
        with pytest.raises(error, match="allocate"):
            runner.run([batch()])


def test_a_recording_with_other_bits_is_not_used(graphs: TapeGraphs) -> None:
    runner, model = runner_of(graphs), folding()
    for _ in range(2):
        runner.run([batch(1)])
    graphs.is_wrong = True
    assert all(are_same(runner.run([batch()]), eager(model, WANTED, batch())) for _ in range(4))
    assert (runner.graph_count, graphs.capture_count) == (1, 2)


def test_a_pass_whose_first_recording_has_other_bits_says_so(graphs: TapeGraphs) -> None:
    graphs.is_wrong = True
    runner = runner_of(graphs)
    runner.run([batch()])
    with pytest.raises(CannotRecordError, match="other values"):
        runner.run([batch()])


# --- The ways to run a pass -----------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
def test_folded_passes_can_be_replayed(graphs: TapeGraphs, numerics: Numerics) -> None:
    model = folding()
    runner = GraphRunner(TorchRunner(make_replica(model), WANTED, find_pairs(model), numerics), graphs)
    for seed in range(4):
        argument = batch() * (seed + 1)
        assert worst_deviation(numerics, eager(model, WANTED, argument), runner.run([argument])) < 2
    assert graphs.replay_count == 4


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        (Numerics.EXACT, ["cuda-graph exact"]),
        (Numerics.FAST, ["cuda-graph fast", "cuda-graph fast", "torch fast"]),
        (
            Numerics.BF16,
            ["cuda-graph bf16", "torch bf16", "cuda-graph fast", "cuda-graph fast", "torch fast"],
        ),
    ],
)
def test_replays_are_tried_first(graphs: TapeGraphs, numerics: Numerics, expected: Sequence[str]) -> None:
    assert ways(numerics, graphs) == expected


@pytest.mark.parametrize(
    ("numerics", "expected"), [(Numerics.EXACT, []), (Numerics.BF16, ["torch bf16", "torch fast"])]
)
def test_without_graphs_there_are_none(numerics: Numerics, expected: Sequence[str]) -> None:
    assert ways(numerics, graphs_of(torch.device("cpu"))) == expected


def ways(numerics: Numerics, graphs: GraphApi | None) -> list[str]:
    found = candidates(WANTED, numerics, Built(), Path(), lambda: make_replica(folding()), None, graphs)
    runners = [way.make() for way in found]
    return [f"{runner.engine} {runner.numerics}" for runner in runners]


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_replays_the_bits_of_its_eager_pass(case: str) -> None:
    kind, wanted = CASES[case]
    torch.manual_seed(0)
    model = kind().eval().cuda()
    runner = GraphRunner(PlainPass(make_replica(model), wanted, Numerics.EXACT), _cuda())
    for seed in range(5):
        argument = arguments_of(wanted, seed)[0].cuda()
        assert are_same(runner.run([argument.clone()]), eager(model, wanted, argument))
    assert runner.graph_count == 1


class Synchronizing(nn.Module):
    """Waits for the device, which only a recording itself forbids."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x * 2
        if x.is_cuda:
            torch.cuda.synchronize()
        return found


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [Looking, Synchronizing])
def test_a_gpu_goes_on_after_a_pass_that_cannot_be_recorded(kind: type[nn.Module]) -> None:
    """Streams, random numbers and freed memory are as if nothing had been tried."""
    before = torch.cuda.current_stream()
    runner = GraphRunner(PlainPass(kind(), recipe(out("")), Numerics.EXACT), _cuda())
    runner.run([torch.ones(2, 2, device="cuda")])
    torch.cuda.manual_seed(3)
    expected = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.raises(CannotRecordError):
        runner.run([torch.ones(2, 2, device="cuda")])
    assert torch.cuda.current_stream() == before
    assert torch.equal(torch.randn(4, device="cuda"), expected)
    _use_on_another_stream(64 << 20)
    used = torch.cuda.memory_reserved()
    for _ in range(20):
        _use_on_another_stream(64 << 20)
    assert torch.cuda.memory_reserved() <= used + (64 << 20)


@pytest.mark.cuda
def test_a_gpu_records_other_passes_after_one_that_cannot_be_recorded() -> None:
    runner = GraphRunner(PlainPass(Synchronizing(), recipe(out("")), Numerics.EXACT), _cuda())
    runner.run([torch.ones(2, 2, device="cuda")])
    with pytest.raises(CannotRecordError):
        runner.run([torch.ones(2, 2, device="cuda")])
    test_a_gpu_replays_the_bits_of_its_eager_pass("aliases")


def _use_on_another_stream(byte_count: int) -> None:
    """Use memory as a copy does, and free it."""
    value = torch.empty(byte_count, dtype=torch.uint8, device="cuda")
    value.record_stream(torch.cuda.Stream())
    del value
    torch.cuda.synchronize()


def _cuda() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda"))
