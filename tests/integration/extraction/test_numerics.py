"""Numerics, compiled variants and merging through a real server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import DataDependent, Plain, Structured
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.wire.pictures import photo
from trocar_server.engine.compiled.backends import availability
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.compiled.variant import State
from trocar_server.engine.request.numerics import Numerics

IMAGES = noise(2, 3, 8, 8)
TAPS = ["conv", "relu@0", "fc/in", "fc"]
ENGINE = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0}


@pytest.fixture(scope="module")
def fast_server() -> Iterator[RunningServer]:
    """A server that builds at the first call, and takes what is not faster, too."""
    models = {
        "plain": custom(Plain, (3, 8, 8), merge="everybody"),
        "dependent": custom(DataDependent),
        "structured": custom(Structured),
        "loose": custom(Plain, (3, 8, 8), numerics="bf16"),
        "images": custom(Plain, (3, 8, 8), preprocessing={"resize": (8, 8)}),
    }
    with running_server(models=models, device="cpu", engine=ENGINE) as server:
        build_here(server)
        yield server


@pytest.fixture(scope="module")
def fast_client(fast_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(fast_server.address) as client:
        yield client


def settle(server: RunningServer) -> None:
    """Wait for what is built and tried in the background."""
    server.run(server.engine.compiled.settled)


def until_ready(
    server: RunningServer, client: trocar.Client, model_id: str, taps: list[str], numerics: trocar.Numerics
) -> None:
    """Ask as often as it takes: to have it built, and to have it tried."""
    assert asked(server, client, model_id, taps, numerics=numerics).execution.engine != "eager"


def asked(
    server: RunningServer,
    client: trocar.Client,
    model_id: str,
    taps: Any,
    inputs: Any = IMAGES,
    numerics: trocar.Numerics | None = None,
    **arguments: Any,
) -> trocar.FeatureMaps:
    """Ask until nothing changes any more, and return the last answer."""
    how = trocar.options(numerics=numerics)
    for _ in range(7):
        client.extract(model_id, inputs, taps, options=how, **arguments)
        settle(server)
    return client.extract(model_id, inputs, taps, options=how, **arguments)


def is_close(found: Array, expected: Array, numerics: str) -> bool:
    given, wanted = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    if numerics == "fast":
        return bool(np.linalg.norm(given - wanted) <= 1e-5 * np.linalg.norm(wanted))
    return bool(given @ wanted >= 0.9999 * np.linalg.norm(given) * np.linalg.norm(wanted))


@pytest.mark.parametrize("numerics", ["fast", "bf16"])
def test_a_hot_pass_becomes_compiled_and_keeps_its_promise(
    fast_server: RunningServer, fast_client: trocar.Client, numerics: trocar.Numerics
) -> None:
    exact = fast_client.extract("plain", IMAGES, TAPS)
    until_ready(fast_server, fast_client, "plain", TAPS, numerics)
    found = fast_client.extract("plain", IMAGES, TAPS, options=trocar.options(numerics=numerics))
    assert found.execution.engine in ("openvino", "torch")
    assert found.execution.numerics in ("fast", numerics)
    assert found.execution.row_count == 2
    assert list(found) == list(exact)
    assert found.stopped_at == exact.stopped_at
    assert all(is_close(found[name], exact[name], numerics) for name in exact)


def test_exact_calls_beside_it_stay_bit_equal_to_eager(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    before = fast_client.extract("plain", IMAGES, TAPS)
    until_ready(fast_server, fast_client, "plain", TAPS, "bf16")
    after = fast_client.extract("plain", IMAGES, TAPS)
    assert after.execution == trocar.ExecutionInfo("exact", "eager", 2, is_cached=False)
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_another_batch_size_needs_no_other_form(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    until_ready(fast_server, fast_client, "plain", TAPS, "fast")
    images = noise(5, 3, 8, 8)
    found = fast_client.extract("plain", images, TAPS, options=trocar.options(numerics="fast"))
    assert found.execution.engine != "eager"
    exact = fast_client.extract("plain", images, TAPS)
    assert all(is_close(found[name], exact[name], "fast") for name in exact)


def test_images_run_compiled_with_a_part_that_the_example_input_lacks(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    images, part = [photo(), photo(seed=1)], trocar.tap("conv", samples=[1])
    found = asked(fast_server, fast_client, "images", [part], images, numerics="fast")
    assert found.execution.engine != "eager"
    exact = fast_client.extract("images", images, "conv")["conv"]
    assert is_close(found["conv"], exact[[1]], "fast")


def test_statistics_and_reductions_are_of_the_compiled_values(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    until_ready(fast_server, fast_client, "plain", ["conv"], "fast")
    taps = [trocar.tap("conv", stats=["mean", "std"], values=False)]
    found = asked(fast_server, fast_client, "plain", taps, numerics="fast")
    assert found.execution.engine != "eager"
    expected = fast_client.extract("plain", IMAGES, taps).stats["conv"]
    assert found.stats["conv"].mean == pytest.approx(expected.mean, rel=1e-4)
    assert found.stats["conv"].std == pytest.approx(expected.std, rel=1e-4)


def test_rows_of_many_callers_never_mix(fast_server: RunningServer, fast_client: trocar.Client) -> None:
    until_ready(fast_server, fast_client, "plain", ["fc"], "fast")
    batches = [noise(1 + index % 3, 3, 8, 8) * (index + 1) for index in range(60)]
    expected = [fast_client.extract("plain", batch, "fc")["fc"] for batch in batches]

    def ask(index: int) -> trocar.FeatureMaps:
        return fast_client.extract(
            "plain", batches[index], "fc", options=trocar.options(numerics="fast", merge=index % 4 != 0)
        )

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(ask, range(60)))
    for index, maps in enumerate(found):
        assert is_close(maps["fc"], expected[index], "fast")
        if index % 4 == 0:
            assert maps.execution.row_count == len(batches[index])


def test_a_model_may_have_looser_numerics_of_its_own(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    found = asked(fast_server, fast_client, "loose", "fc")
    assert found.execution.engine != "eager"
    assert (
        fast_client.extract("loose", IMAGES, "fc", options=trocar.options(numerics="exact")).execution.engine
        == "eager"
    )


def settled(server: RunningServer, compute: Callable[[], Any]) -> Any:
    """Compute until nothing changes any more, and return the last result."""
    for _ in range(7):
        compute()
        settle(server)
    return compute()


def test_a_comparison_is_exact_where_the_models_default_is_not(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    twice = trocar.edit("fc", "scale", 2.0)
    found = settled(fast_server, lambda: fast_client.compare("loose", IMAGES, edits=twice, taps=TAPS))
    assert [found[name].relative_error for name in TAPS[:-1]] == [0.0, 0.0, 0.0]
    assert found.diff.first_diverging.name == "fc"
    other = settled(fast_server, lambda: fast_client.diff("plain", "loose", IMAGES, TAPS))
    assert [row.relative_error for row in other.rows] == [0.0] * len(TAPS)


@pytest.mark.parametrize(
    ("method", "options"),
    [("occlusion", {"window": 4}), ("integrated_gradients", {"steps": 3, "delta": True})],
)
def test_attributions_are_exact_where_the_models_default_is_not(
    fast_server: RunningServer, fast_client: trocar.Client, method: str, options: dict[str, Any]
) -> None:
    found = settled(fast_server, lambda: fast_client.attribute("loose", IMAGES, method, **options))
    exact = fast_client.attribute("plain", IMAGES, method, **options)
    with torch.inference_mode():
        scores = rebuilt(Plain)(torch.from_numpy(IMAGES)).amax(1)
    assert np.array_equal(found.scores, scores)
    assert np.array_equal(found.values, exact.values)
    assert np.array_equal(np.asarray(found.delta), np.asarray(exact.delta))  # None of occlusion


SURGERY: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "edits": (IMAGES, "fc", {"edits": [trocar.edit("conv", "scale", 0.5)]}),
    "gradients": (IMAGES, "conv/grad_out", {"of": trocar.logit(1)}),
    "start": (noise(2, 4), "fc", {"start_at": "fc/in"}),
    "parameters": (None, "fc/param(weight)", {}),
}


@pytest.mark.parametrize("how", SURGERY)
def test_what_does_more_than_look_is_exact(
    fast_server: RunningServer, fast_client: trocar.Client, how: str
) -> None:
    inputs, taps, options = SURGERY[how]
    found = asked(fast_server, fast_client, "plain", taps, inputs, numerics="fast", **options)
    assert (found.execution.numerics, found.execution.engine) == ("exact", "eager")


def test_a_model_that_decides_on_its_data_stays_eager(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    found = asked(fast_server, fast_client, "dependent", "/out", noise(2, 3), numerics="fast")
    assert found.execution.engine == "eager"


def test_streams_run_on_compiled_forms_too(fast_server: RunningServer, fast_client: trocar.Client) -> None:
    until_ready(fast_server, fast_client, "plain", ["conv"], "fast")
    batches = [noise(2, 3, 8, 8) * scale for scale in (1, 2, 3)]
    with fast_client.extract_stream(
        "plain", batches, ["conv"], options=trocar.options(numerics="fast")
    ) as stream:
        found = [result.unwrap() for result in stream]
    for batch, maps in zip(batches, found, strict=True):
        assert maps.execution.engine != "eager"
        assert is_close(maps["conv"], fast_client.extract("plain", batch, "conv")["conv"], "fast")


def test_a_model_that_is_loaded_again_begins_anew(fast_server: RunningServer) -> None:
    with trocar.connect(fast_server.address) as client:
        until_ready(fast_server, client, "plain", ["fc"], "fast")
        assert any(variant.state is State.READY for variant in fast_server.engine.compiled.variants())
        client.unload("plain")
        assert all(
            variant.deployment.hosted.spec.model_id != "plain"
            for variant in fast_server.engine.compiled.variants()
        )
        client.load("plain")
        assert (
            client.extract("plain", IMAGES, "fc", options=trocar.options(numerics="fast")).execution.engine
            == "eager"
        )
        settle(fast_server)


def test_unknown_numerics_are_refused_before_anything_is_sent(fast_client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="numerics must be one of exact, fast, bf16, not 'fp8'"):
        fast_client.extract("plain", IMAGES, "fc", options=trocar.options(numerics="fp8"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="priority must be one of low, normal, high, not 'urgent'"):
        fast_client.extract("plain", IMAGES, "fc", options=trocar.options(priority="urgent"))  # type: ignore[arg-type]


def test_forms_that_are_too_many_go() -> None:
    models = {"plain": custom(Plain, (3, 8, 8))}
    engine = {**ENGINE, "max_compiled": 2, "openvino": False}
    with running_server(models=models, device="cpu", engine=engine) as server:
        build_here(server)
        with trocar.connect(server.address) as client:
            for tap in ("conv", "conv2", "pool", "fc"):
                client.extract("plain", IMAGES, tap, options=trocar.options(numerics="fast"))
                settle(server)
        assert len(server.engine.compiled.variants()) == 2
        assert server.engine.compiled.evicted_count == 2


def test_who_asked_for_looser_numbers_is_told_why_they_are_exact(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    exact = fast_client.extract("plain", IMAGES, ["fc"]).execution
    edited = fast_client.extract(
        "plain", IMAGES, ["fc"], edits=[trocar.edit("conv", "zero")], options=trocar.options(numerics="bf16")
    ).execution
    dependent = fast_client.extract(
        "dependent", noise(2, 3), ["/out"], options=trocar.options(numerics="fast")
    ).execution
    assert (exact.asked, exact.reason) == ("exact", "")
    assert (edited.asked, edited.numerics) == ("bf16", "exact")
    assert "edits" in edited.reason
    assert (dependent.asked, dependent.numerics) == ("fast", "exact")
    assert "cannot be compiled" in dependent.reason


def test_a_pass_as_loose_as_was_asked_for_has_no_excuse(
    fast_server: RunningServer, fast_client: trocar.Client
) -> None:
    found = asked(fast_server, fast_client, "plain", TAPS, numerics="fast").execution
    assert (found.asked, found.numerics, found.reason) == ("fast", "fast", "")


def test_a_form_that_failed_its_trial_says_why() -> None:
    models = {"plain": custom(Plain, (3, 8, 8))}
    engine = {"compile_after": 1, "min_gain": 1e9}  # nothing is as fast as that
    with running_server(models=models, device="cpu", engine=engine) as server:
        build_here(server)
        with trocar.connect(server.address) as client:
            found = asked(server, client, "plain", TAPS, numerics="bf16").execution
    assert (found.asked, found.numerics) == ("bf16", "exact")
    assert "no compiled pass qualified" in found.reason
    assert "it takes" in found.reason


@pytest.mark.parametrize(
    ("engine", "words"),
    [({"compile_after": 0}, "compile_after = 0"), ({"openvino": False}, "openvino = false")],
)
def test_a_server_without_a_faster_engine_says_so_to_caller_and_operator(
    engine: dict[str, Any], words: str
) -> None:
    models = {"plain": custom(Plain, (3, 8, 8), numerics="bf16")}
    running = running_server(models=models, device="cpu", engine=engine)
    with capture_logs() as lines, running as server, trocar.connect(server.address) as client:
        found = client.extract("plain", IMAGES, TAPS).execution
    assert (found.asked, found.numerics) == ("bf16", "exact")
    assert words in found.reason
    (line,) = (line for line in lines if line["event"] == "numerics")
    assert words in line["bf16"]
    assert (line["log_level"], line["exact"]) == ("warning", "available")


def test_without_openvino_the_reason_is_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    found = available_numerics()
    assert found[Numerics.EXACT] is None
    assert "OpenVINO is not installed" in str(found[Numerics.FAST])
    assert "OpenVINO is not installed" in str(found[Numerics.BF16])


def test_with_openvino_all_numerics_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "is_installed", lambda: True)
    assert set(available_numerics().values()) == {None}
