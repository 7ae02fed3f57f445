"""NaN, infinities and huge numbers in compiled passes: replies are those of eager, other replies stay."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.integration.extraction.test_numerics import ENGINE, is_close, settle
from tests.integration.serving.test_merged_callers import at_once, extracts
from tests.support.models.not_finite_models import OVERFLOWING, WIDTH, Hiding
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.wire.open_inference import arrays_of, infer, request_of
from tests.support.wire.wire import raw_channel
from trocar_server.engine.compiled.backends.openvino_runner import is_installed

IMAGES = noise(2, 3, 8, 8)
VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e38, 2e6)
TAPS = ["relu@0", "linear"]


class Linear(Plain):
    """Plain, whose last module has a name that the tests of merged calls know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.fc
        del self.fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv2(self.relu(self.conv(x))))
        found: torch.Tensor = self.linear(self.pool(x).flatten(1))
        return found


@pytest.fixture(scope="module", params=["openvino", "torch"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino" and not is_installed():
        pytest.skip("needs OpenVINO")
    return str(request.param)


@pytest.fixture(scope="module")
def server(engine: str) -> Iterator[RunningServer]:
    hiding: dict[str, Any] = {"merge": "everybody"}
    models = {
        "plain": custom(Linear, (3, 8, 8), merge="everybody"),
        "fresh": custom(Linear, (3, 8, 8)),
        "logarithm": custom(Hiding, (WIDTH,), options={"appearing": "logarithm"}, **hiding),
        **{name: custom(Hiding, (WIDTH,), options={"appearing": name}) for name in OVERFLOWING},
    }
    settings = {**ENGINE, "openvino": engine == "openvino"}
    with running_server(models=models, device="cpu", engine=settings) as running:
        build_here(running)
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


def compiled(server: RunningServer, client: trocar.Client, model_id: str, rows: Array, taps: Any) -> None:
    """Ask until the compiled pass is in use; groups may then have any number of rows."""
    for i in range(7):
        client.extract(model_id, rows[: 1 + i % 2], taps, options=trocar.options(numerics="fast"))
        settle(server)
    assert (
        client.extract(model_id, rows, taps, options=trocar.options(numerics="fast")).execution.engine
        != "eager"
    )
    for variant in server.engine.compiled.variants():
        variant.queue._most_rows = lambda: 64


def with_value(value: float) -> Array:
    images = IMAGES.copy()
    images[1, 0, 2, 3] = value
    return images


@pytest.mark.parametrize("numerics", ["fast", "bf16"])
@pytest.mark.parametrize("value", VALUES)
def test_replies_are_those_of_eager(
    server: RunningServer, client: trocar.Client, value: float, numerics: trocar.Numerics
) -> None:
    compiled(server, client, "plain", IMAGES, TAPS)
    images = with_value(value)
    exact = client.extract("plain", images, TAPS)
    found = client.extract("plain", images, TAPS, options=trocar.options(numerics=numerics))
    assert (found.execution.numerics, found.execution.engine) == ("exact", "eager")
    assert all(found[name].tobytes() == exact[name].tobytes() for name in exact)
    with client.extract_stream("plain", [images], TAPS, options=trocar.options(numerics=numerics)) as stream:
        (streamed,) = (result.unwrap() for result in stream)
    assert all(streamed[name].tobytes() == exact[name].tobytes() for name in exact)
    with raw_channel(server.address) as channel:
        request = request_of("plain", {"x": images}, TAPS)
        request.parameters["numerics"].string_param = numerics
        inferred = arrays_of(infer(channel, request))
    assert all(inferred[name].tobytes() == exact[name].tobytes() for name in exact)
    if numerics == "fast":
        assert "NaN" in found.execution.reason
    after = client.extract("plain", IMAGES, TAPS, options=trocar.options(numerics="fast"))
    assert after.execution.engine != "eager"


@pytest.mark.parametrize("value", [-0.0, 0.0, 1e-40, 9e5, -9e5])
def test_finite_values_run_compiled(server: RunningServer, client: trocar.Client, value: float) -> None:
    compiled(server, client, "plain", IMAGES, TAPS)
    exact = client.extract("plain", with_value(value), TAPS)
    found = client.extract("plain", with_value(value), TAPS, options=trocar.options(numerics="fast"))
    assert found.execution.engine != "eager"
    assert all(is_close(found[name], exact[name], "fast") for name in exact)


def test_statistics_count_what_eager_counts(server: RunningServer, client: trocar.Client) -> None:
    tap = trocar.tap("linear", stats=["nan_count", "mean"])
    compiled(server, client, "plain", IMAGES, "linear")
    for _ in range(3):
        found = client.extract(
            "plain", np.full_like(IMAGES, np.nan), [tap], options=trocar.options(numerics="fast")
        )
        assert found.stats["linear"].nan_count == found["linear"].size


def test_what_a_merged_caller_sends_changes_no_other_reply(
    server: RunningServer, client: trocar.Client
) -> None:
    compiled(server, client, "plain", IMAGES, "linear")
    given = [noise(1, 3, 8, 8, seed=seed) for seed in range(6)]
    given[2][0, 1, 4, 4], given[4][0, 0, 0, 0] = np.nan, 1e38
    with trocar.connect(server.address, token="other") as other:
        asks = [extracts((client, other)[i % 2], "plain") for i in range(6)]
        found = at_once(server, asks, given)
    assert [count for _, count in found] == [1, 3, 1, 3, 1, 3]
    for index, ((values, _), rows) in enumerate(zip(found, given, strict=True)):
        exact = client.extract("plain", rows, "linear")["linear"]
        if index in (2, 4):
            assert values.tobytes() == exact.tobytes()
        else:
            assert is_close(values, exact, "fast")


def test_what_appears_inside_for_one_merged_caller_changes_no_other_reply(
    server: RunningServer, client: trocar.Client, engine: str
) -> None:
    positive = np.abs(noise(2, WIDTH)) + np.float32(0.1)
    compiled(server, client, "logarithm", positive, "last")
    assert (
        client.extract(
            "logarithm", positive, "last", options=trocar.options(numerics="fast")
        ).execution.engine
        == engine
    )
    given = [positive[:1] * (1 + i) * (-1 if i in (2, 3) else 1) for i in range(6)]

    def ask(rows: Array) -> tuple[Array, int]:
        found = client.extract("logarithm", rows, "last", options=trocar.options(numerics="fast"))
        return found["last"], found.execution.row_count

    for (values, _), rows in zip(at_once(server, [ask] * 6, given), given, strict=True):
        with torch.inference_mode():
            wanted = rebuilt(Hiding, appearing="logarithm")(torch.from_numpy(rows)).numpy()
        assert np.array_equal(np.isnan(values), np.isnan(wanted))
        assert np.allclose(values, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (
        client.extract(
            "logarithm", positive, "last", options=trocar.options(numerics="fast")
        ).execution.engine
        != "eager"
    )


def test_calls_that_are_not_finite_spoil_no_trial(server: RunningServer, client: trocar.Client) -> None:
    for _ in range(10):
        client.extract(
            "fresh", np.full_like(IMAGES, np.nan), "linear", options=trocar.options(numerics="fast")
        )
        settle(server)
    compiled(server, client, "fresh", IMAGES, "linear")


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_pass_that_may_overflow_runs_exactly(
    server: RunningServer, client: trocar.Client, name: str
) -> None:
    rows = np.abs(noise(2, WIDTH)) / 8
    for _ in range(7):
        client.extract(name, rows, "last", options=trocar.options(numerics="fast"))
        settle(server)
    large = client.extract(
        name, rows / rows.max() * np.float32(9e5), "last", options=trocar.options(numerics="fast")
    )
    assert large.execution.engine == "eager"
    assert "overflow" in large.execution.reason
    assert np.isnan(large["last"]).any()
