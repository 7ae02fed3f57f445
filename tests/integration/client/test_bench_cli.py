"""`trocar bench` against a real server: arguments in, table, JSON and pictures out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs

from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main
from trocar_server.config import ModelConfig, PreprocessingConfig

PREPROCESSING = PreprocessingConfig(resize=(), crop=(), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
MODELS = {
    "plain": ModelConfig(
        factory="tests.support.models.tiny_models:Plain",
        weights="random:0",
        input_shape=(3, 8, 8),
        preprocessing=PREPROCESSING,
    ),
    "net": ModelConfig(architecture="resnet18", weights="random:0", input_shape=(3, 32, 32)),
}
SHORT = ("--calls", "3", "--rounds", "2", "--warm-up", "0")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def results(self) -> list[Any]:
        found: list[Any] = json.loads(self.out)["results"]
        return found


Bench = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with capture_logs(), running_server(models=MODELS) as running:  # its log would be in our stdout
        yield running


@pytest.fixture
def bench(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    """Run `trocar bench` with these words, connected to the server."""
    monkeypatch.setenv("TROCAR_SERVER", server.address)

    def run(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *map(str, words)])
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run


def test_every_combination_is_a_row(bench: Bench) -> None:
    out = bench("plain", "--tap", "conv", "--tap", "fc", "--each-tap", "--batch", "1,2", *SHORT).out
    rows = [line.split()[:4] for line in out.splitlines()[2:]]
    assert rows == [["plain", tap, batch, "1"] for tap in ("conv", "fc") for batch in ("1", "2")]
    assert out.split()[:4] == ["model", "taps", "batch", "clients"]


def test_json_counts_every_call_and_orders_latencies(bench: Bench) -> None:
    (case,) = bench("plain", "--clients", 3, "--processes", 2, "--batch", 4, *SHORT, "--json").results
    calls = case["calls"]
    assert case["case"]["taps"] == ["/out"]
    assert calls["call_count"] == 3 * 3 * 2
    assert calls["errors"] == {}
    assert sum(calls["engines"].values()) == 3 * 3 * 2
    assert 0 < calls["compute_p50_s"] <= calls["p50_s"] <= calls["p90_s"] <= calls["p99_s"] <= calls["max_s"]
    assert calls["images_per_s"] == pytest.approx(4 * calls["calls_per_s"])
    assert case["local"] is None


def test_an_open_loop_makes_the_calls_that_are_due(bench: Bench) -> None:
    options = ("--rate", "40", "--arrivals", "fixed", "--duration", "1", "--rounds", "2", "--warm-up", "0")
    (case,) = bench("plain", "--clients", "2", *options, "--json").results
    assert case["rate_per_s"] == 40
    assert case["calls"]["call_count"] + sum(case["calls"]["errors"].values()) == 40


def test_multiples_count_in_what_one_closed_loop_reached(bench: Bench) -> None:
    options = ("--rate", "0.1x,0.2x", "--duration", "0.2", "--rounds", "1", "--warm-up", "0", "--calls", "5")
    low, high = bench("plain", *options, "--json").results
    assert low["capacity_per_s"] == high["capacity_per_s"] > 0
    assert low["rate_per_s"] == pytest.approx(0.1 * low["capacity_per_s"])
    assert high["rate_per_s"] == pytest.approx(0.2 * low["capacity_per_s"])


def test_the_same_passes_without_a_server_are_set_beside(bench: Bench) -> None:
    (case,) = bench("net", "--tap", "layer1", "--local", "--duration", "0.05", *SHORT, "--json").results
    local = case["local"]
    assert local["pass_count"] >= 2
    assert local["latency_ratio"] == pytest.approx(case["calls"]["p50_s"] / local["p50_s"])
    assert local["throughput_ratio"] == pytest.approx(case["calls"]["images_per_s"] * local["p50_s"])


def test_images_of_a_folder_are_sent(bench: Bench, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    (case,) = bench("plain", "--images", tmp_path, "--batch", "2", *SHORT, "--json").results
    assert case["calls"]["call_count"] == 6


def test_results_are_written_as_json_and_as_a_picture(bench: Bench, tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    shown = bench("plain", "--clients", "1,2", *SHORT, "--out", out, "--plot", plot, "--json").out
    assert json.loads(out.read_text()) == json.loads(shown)
    with Image.open(plot) as picture:
        assert picture.size[0] > 300


def test_a_sweep_of_rates_is_drawn(bench: Bench, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    options = ("--duration", "0.2", "--rounds", "1", "--warm-up", "0")
    assert bench("plain", "--rate", "20,40", *options, "--plot", plot).code == 0
    with Image.open(plot) as picture:
        assert picture.size[0] > 300


def test_calls_that_fail_under_load_are_counted_by_reason(
    serve: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = serve(models=MODELS, limits={"max_queue": 1})
    monkeypatch.setenv("TROCAR_SERVER", narrow.address)
    (case,) = bench("net", "--clients", "8", *SHORT, "--json").results
    calls = case["calls"]
    assert set(calls["errors"]) <= {"SERVER_BUSY"}
    assert calls["call_count"] + sum(calls["errors"].values()) == 8 * 3 * 2


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("nobody",), 1, "UNKNOWN_MODEL"),
        (("plain", "--tap", "nothing"), 1, "UNKNOWN_MODULE"),
        (("plain", "--input", "5"), 1, "INPUT_REJECTED"),
        (("plain", "--batch", "0"), 2, "--batch"),
        (("plain", "--clients", "many"), 2, "--clients"),
        (("plain", "--rate", "quick"), 2, "--rate"),
        (("plain", "--numerics", "odd"), 2, "--numerics"),
        (("plain", "--local", *SHORT), 2, "only the server can build"),
        (("net", "--tap", "layer1/in", "--local", *SHORT), 2, "not a module's output"),
        (("plain", "--out", "/nowhere/bench.json"), 2, "no folder"),
        (("plain", "--plot", "bench.txt"), 2, "must end in"),
        (("plain", "--server", "localhost:1"), 3, "is the server running"),
    ],
)
def test_failures_end_with_a_code_and_say_why(
    bench: Bench, words: tuple[str, ...], code: int, text: str
) -> None:
    done = bench(*words)
    assert done.code == code
    assert text in " ".join(done.err.split())
