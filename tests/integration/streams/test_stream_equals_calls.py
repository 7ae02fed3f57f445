"""Random taps: a batch of a stream has what a single call has, or fails for the same reason."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.integration.extraction.test_plan_equals_reality import INPUTS, tap, words
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom


@pytest.fixture(scope="module")
def models() -> Iterator[RunningServer]:
    hosted: dict[str, Any] = {
        name: custom(kind, (values["x"] if isinstance(values, dict) else values).shape[1:])
        for name, (kind, values) in INPUTS.items()
    }
    with running_server(models=hosted, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def near(models: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(models.address) as connected:
        yield connected


def same(one: trocar.FeatureMaps, other: trocar.FeatureMaps) -> bool:
    stats = all(repr(one.stats[name]) == repr(other.stats[name]) for name in other.stats)
    return (
        stats
        and one.stats.keys() == other.stats.keys()
        and one.info == other.info
        and all(one[name].tobytes() == other[name].tobytes() for name in other)
    )


def outcome(call: Any) -> Any:
    try:
        return call()
    except trocar.TrocarError as error:
        return error


@pytest.mark.parametrize("model_id", INPUTS)
def test_batches_equal_single_calls(near: trocar.Client, model_id: str) -> None:
    chance, values = random.Random(f"{model_id}!"), INPUTS[model_id][1]
    for _ in range(60):
        try:
            taps = [tap(chance, model_id) for _ in range(chance.choice([1, 1, 2]))]
        except ValueError:
            continue
        single = outcome(lambda: near.extract(model_id, values, taps))  # noqa: B023 - called at once
        streamed = outcome(lambda: list(near.extract_stream(model_id, [values, values], taps)))  # noqa: B023
        if isinstance(single, trocar.TrocarError):
            errors: list[Any] = (
                [streamed] if isinstance(streamed, Exception) else [result.error for result in streamed]
            )
            assert [(type(error), words(error)) for error in errors] == [(type(single), words(single))] * len(
                errors
            ), taps
        else:
            assert isinstance(streamed, list), (taps, streamed)
            assert all(same(result.unwrap(), single) for result in streamed), taps


@pytest.mark.parametrize("model_id", INPUTS)
def test_running_statistics_of_equal_batches_are_those_of_one(near: trocar.Client, model_id: str) -> None:
    """Of any dtype, rank and size, the empty and the single element included."""
    values = INPUTS[model_id][1]
    names = [name for name, info in near.plan(model_id, values, ["/out", "/in"]).feature_maps.items()]
    wanted: list[Any] = ["mean", "min", "max", "std", "nan_count"]
    for name in names:
        taps = [trocar.tap(name, stats=wanted, values=False)]
        single = outcome(lambda: near.extract(model_id, values, taps))  # noqa: B023 - called at once
        with near.extract_stream(
            model_id, [values] * 3, taps, running_statistics=True, checkpoint_interval=1
        ) as stream:
            errors = [result.error for result in stream]
        if isinstance(single, trocar.TrocarError):
            assert {type(error) for error in errors} == {type(single)}
            continue
        assert errors == [None] * 3
        for statistic in wanted:
            found, expected = (getattr(of[name], statistic) for of in (stream.statistics, single.stats))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
