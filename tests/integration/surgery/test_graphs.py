"""Recorded passes through a real server: exact calls stay exact and alone; only the time tells."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import trocar
from tests.integration.extraction.test_numerics import ENGINE, IMAGES, TAPS, asked, settle
from tests.support.models.tiny_models import DataDependent, Plain
from tests.support.oracles.oracle import noise, rebuilt_by_name, same_bits
from tests.support.oracles.tape_graphs import TapeGraphs
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom


class Widening(nn.Module):
    """Returns float64."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.wide = nn.Linear(3, 4), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.wide(self.fc(x).double())
        return found


MODELS = {
    "plain": custom(Plain, (3, 8, 8)),
    "widening": custom(Widening),
    "dependent": custom(DataDependent),
}


@pytest.fixture(scope="module")
def graphs() -> TapeGraphs:
    return TapeGraphs()


@pytest.fixture(scope="module")
def recording(graphs: TapeGraphs) -> Iterator[RunningServer]:
    """A server that records exact passes as on a GPU, whether they are faster or not."""
    with running_server(models=MODELS, device="cpu", engine=ENGINE) as server:
        server.engine.compiled.builder.graphs_of = lambda _: graphs
        build_here(server)
        yield server


@pytest.fixture(scope="module")
def client(recording: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(recording.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def eager() -> Iterator[trocar.Client]:
    """One that records nothing."""
    with running_server(models=MODELS, device="cpu") as server, trocar.connect(server.address) as connected:
        yield connected


def until_recorded(recording: RunningServer, client: trocar.Client, taps: list[str]) -> None:
    found = asked(recording, client, "plain", taps).execution
    assert (found.engine, found.numerics) == ("cuda-graph", "exact")


def test_a_hot_exact_pass_is_replayed_with_the_bits_of_eager(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client, graphs: TapeGraphs
) -> None:
    until_recorded(recording, client, TAPS)
    before = graphs.replay_count
    for scale in range(5):
        found, expected = (one.extract("plain", IMAGES * scale, TAPS) for one in (client, eager))
        assert found.execution == trocar.ExecutionInfo("exact", "cuda-graph", 2, is_cached=False)
        assert found.stopped_at == expected.stopped_at
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert graphs.replay_count == before + 5


def test_exact_calls_at_once_are_never_merged_and_keep_their_rows(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client
) -> None:
    until_recorded(recording, client, ["fc"])
    batches = [noise(1 + index % 4, 3, 8, 8) * (index + 1) for index in range(60)]
    expected = [eager.extract("plain", batch, "fc")["fc"] for batch in batches]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda batch: client.extract("plain", batch, "fc"), batches))
    for maps, batch, values in zip(found, batches, expected, strict=True):
        assert maps.execution == trocar.ExecutionInfo("exact", "cuda-graph", len(batch), is_cached=False)
        assert np.array_equal(maps["fc"], values)


def test_callers_with_other_tensors_in_their_edits_share_a_recording(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client, graphs: TapeGraphs
) -> None:
    def edits(seed: int) -> list[trocar.Edit]:
        vector, mask = noise(4, seed=seed), noise(2, 4, 8, 8, seed=seed) > 0
        return [
            trocar.edit("conv", "steer", vector, alpha=0.5),
            trocar.edit("relu@0", "set", 0.25, mask=mask),
            trocar.edit("fc/in", "scale", 0.5, order="after"),
        ]

    before = graphs.capture_count
    assert asked(recording, client, "plain", TAPS, edits=edits(0)).execution.engine == "cuda-graph"
    with ThreadPoolExecutor(8) as threads:
        calls = threads.map(lambda seed: client.extract("plain", IMAGES, TAPS, edits=edits(seed)), range(32))
        for seed, found in enumerate(calls):
            expected = eager.extract("plain", IMAGES, TAPS, edits=edits(seed))
            assert found.execution == trocar.ExecutionInfo("exact", "cuda-graph", 2, is_cached=False)
            assert found.edit_expansions == expected.edit_expansions
            assert found.stopped_at == expected.stopped_at
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert graphs.capture_count == before + 1
    plain, unedited = (one.extract("plain", IMAGES, TAPS) for one in (client, eager))
    assert all(np.array_equal(plain[name], unedited[name]) for name in unedited)


def test_edited_passes_are_replayed_whatever_numerics_their_callers_accept(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client
) -> None:
    edits = [trocar.edit("conv", "add", noise(2, 4, 8, 8))]
    found = asked(recording, client, "plain", "fc", edits=edits, numerics="fast")
    assert (found.execution.engine, found.execution.numerics) == ("cuda-graph", "exact")
    assert (found.execution.asked, "edits" in found.execution.reason) == ("fast", True)
    assert np.array_equal(found["fc"], eager.extract("plain", IMAGES, "fc", edits=edits)["fc"])


def test_a_replayed_edit_is_checked_like_any_other(recording: RunningServer, client: trocar.Client) -> None:
    vector = noise(4).astype(np.float64)
    asked(recording, client, "plain", "fc", edits=[trocar.edit("conv", "steer", vector)])
    vector[0] = 1e300
    with pytest.raises(trocar.TrocarError, match="conv") as caught:
        client.extract("plain", IMAGES, "fc", edits=[trocar.edit("conv", "steer", vector)])
    assert caught.value.reason == "EDIT_DTYPE_REJECTED"


@pytest.mark.parametrize(
    "edits",
    [
        [trocar.edit("relu@0", "skip")],
        [trocar.edit("conv/param(weight)", "scale", 0.5)],
        [trocar.edit("conv", "noise", 1.0, seed=3)],
    ],
    ids=["a call left out", "a parameter", "draws"],
)
def test_other_edits_stay_right(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client, edits: list[trocar.Edit]
) -> None:
    found = asked(recording, client, "plain", "fc", edits=edits)
    assert np.array_equal(found["fc"], eager.extract("plain", IMAGES, "fc", edits=edits)["fc"])


def test_statistics_alone_are_those_of_eager(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client
) -> None:
    taps = [trocar.tap("**", stats=["mean", "std", "covariance"], over="channel", values=False)]
    assert asked(recording, client, "plain", taps).execution.engine == "cuda-graph"
    for scale in range(3):
        found, expected = (one.extract("plain", IMAGES * scale, taps) for one in (client, eager))
        assert found.stats == expected.stats
        assert list(found) == list(expected)


def test_quantiles_of_a_stream_are_of_its_own_batches(
    recording: RunningServer, client: trocar.Client, eager: trocar.Client
) -> None:
    """A value that is only measured is in memory that the next pass writes; nothing may be kept there."""
    taps = [trocar.tap("wide", stats=["mean", "argmax_channel", trocar.quantiles(0.5)], values=False)]
    batches = [noise(2, 3, seed=number) for number in range(6)]
    assert asked(recording, client, "widening", taps, batches[0]).execution.engine == "cuda-graph"
    found = []
    for one in (client, eager):
        with one.extract_stream("widening", batches, taps, running_statistics=True) as stream:
            engines = {result.unwrap().execution.engine for result in stream}
        found.append((dict(stream.statistics), engines))
    (replayed, engines), (expected, _) = found
    assert engines == {"cuda-graph"}
    assert replayed == expected


def test_models_that_decide_on_their_data_are_not_recorded(
    recording: RunningServer, client: trocar.Client
) -> None:
    assert asked(recording, client, "dependent", "/out", noise(2, 3)).execution.engine == "eager"


@pytest.mark.parametrize(
    "graphs",
    [
        TapeGraphs(problem="operation not permitted when stream is capturing"),
        TapeGraphs(is_wrong=True),
    ],
    ids=["cannot record", "other bits"],
)
def test_what_cannot_be_recorded_stays_right(graphs: TapeGraphs, eager: trocar.Client) -> None:
    with running_server(models=MODELS, device="cpu", engine=ENGINE) as server:
        server.engine.compiled.builder.graphs_of = lambda _: graphs
        with trocar.connect(server.address) as client:
            found = asked(server, client, "plain", TAPS)
            assert found.execution.engine == "eager"
            assert server.engine.compiled.builder.discarded_count == 1
            expected = eager.extract("plain", IMAGES, TAPS)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert graphs.capture_count == 1


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16])
def test_a_gpu_answers_with_the_bits_of_its_own_eager_pass(rows: int) -> None:
    """Large values come through page-locked memory, and hot passes from recordings."""
    model, paths = rebuilt_by_name("resnet18").cuda(), ["layer1", "layer4", "fc"]
    models = {"resnet18": {"weights": "random:0"}}
    hosting = running_server(models=models, device="cuda:0", engine={**ENGINE, "cuda_graphs": True})
    with hosting as server, trocar.connect(server.address) as client:
        for seed in range(10):
            images = noise(rows, 3, 224, 224, seed=seed)
            found = client.extract("resnet18", images, paths, options=trocar.options(numerics="exact"))
            settle(server)
            with torch.inference_mode():
                expected = create_feature_extractor(model, paths)(torch.from_numpy(images).cuda())
            assert all(same_bits(found[path], expected[path].cpu()) for path in paths)
        assert client.extract("resnet18", noise(rows, 3, 224, 224), paths).execution.engine == "cuda-graph"


@pytest.mark.cuda
def test_a_gpu_replays_edits_with_the_bits_of_eager_for_each_caller() -> None:
    """Eight callers at once, each with a vector of its own, and statistics of every block."""
    models = {"resnet18": {"weights": "random:0"}}
    eager = running_server(models=models, device="cuda:0", engine={"cuda_graphs": False})
    graphs = running_server(models=models, device="cuda:0", engine={**ENGINE, "cuda_graphs": True})
    taps: list[str | trocar.Tap] = ["layer4", trocar.tap("layer*.*", stats=["mean", "max"], values=False)]
    vectors = [noise(256, seed=seed) for seed in range(32)]

    def call(
        client: trocar.Client, vector: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
    ) -> trocar.FeatureMaps:
        edits = [trocar.edit("layer3", "steer", vector, alpha=0.5)]
        return client.extract("resnet18", noise(2, 3, 224, 224), taps, edits=edits)

    with (
        eager as one,
        graphs as other,
        trocar.connect(one.address) as slow,
        trocar.connect(other.address) as fast,
    ):
        for _ in range(7):
            call(fast, vectors[0])
            settle(other)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda vector: call(fast, vector), vectors))
        for found, vector in zip(answers, vectors, strict=True):
            expected = call(slow, vector)
            assert (found.execution.engine, expected.execution.engine) == ("cuda-graph", "eager")
            assert np.array_equal(found["layer4"], expected["layer4"])
            assert found.stats == expected.stats


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_operator_can_do_without(is_wanted: bool) -> None:
    with running_server(device="cpu", engine={"cuda_graphs": is_wanted}) as server:
        graphs_of = server.engine.compiled.builder.graphs_of
        assert (graphs_of(torch.device("cuda")) is not None) is is_wanted
        assert graphs_of(torch.device("cpu")) is None
