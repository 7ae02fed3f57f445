"""The health report against NumPy's norms, through the methods of both clients."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client._analysis.gradient_fake import AsyncFakeGradients, FakeGradients
from trocar import Health, HealthRow
from trocar._async.analysis.analyses import AsyncAnalyses
from trocar._base.tensors import Array
from trocar._sync.analysis.analyses import Analyses

Report = Callable[..., Health]
OF = trocar.loss("cross_entropy", [0, 1])


@pytest.fixture(params=["sync", "aio"])
def report(request: pytest.FixtureRequest) -> Report:
    """Calls `health` of a client on a fake; every test that uses it runs for both clients."""

    def call(fake: FakeGradients, of: trocar.Objective = OF, **options: Any) -> Health:
        if request.param == "sync":
            client: Any = fake
            return Analyses(client, client).health("m", "x.jpg", of, **options)
        other: Any = AsyncFakeGradients(fake)
        return asyncio.run(AsyncAnalyses(other, other).health("m", "x.jpg", of, **options))

    return call


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def norm(*arrays: Array) -> float:
    return float(np.linalg.norm(np.concatenate([array.astype(np.float64).ravel() for array in arrays])))


WEIGHT, BIAS = random(4, 3, seed=1), random(4, seed=2)
WEIGHT_GRADIENT, BIAS_GRADIENT = random(4, 3, scale=0.1, seed=3), random(4, scale=0.1, seed=4)


def healthy(**outputs: Array) -> FakeGradients:
    gradients = {"conv": random(2, 4, 5, 5), "relu@0": random(2, 4, seed=5), "relu@1": random(2, 4, seed=6)}
    return FakeGradients(
        {**gradients, **outputs},
        {
            "conv.weight": (WEIGHT, WEIGHT_GRADIENT),
            "conv.bias": (BIAS, BIAS_GRADIENT),
            "conv.running": (random(7), None),
        },
        types={"conv": "Conv2d", "relu": "ReLU"},
    )


def only(array: Array, parameters: Any = None, report: Any = None, **options: Any) -> HealthRow:
    """Return the row of a model with one value."""
    row: HealthRow = report(FakeGradients({"m": array}, parameters or {}), **options).rows[0]
    return row


def test_rows_are_the_norms_of_gradients_and_parameters(report: Report) -> None:
    health = report(healthy())
    assert [(row.name, row.path, row.type) for row in health.rows] == [
        ("conv", "conv", "Conv2d"),
        ("relu@0", "relu", "ReLU"),
        ("relu@1", "relu", "ReLU"),
    ]
    conv = health["conv"]
    assert conv.gradient_norm == pytest.approx(norm(random(2, 4, 5, 5)), rel=1e-12)
    assert conv.parameter_gradient_norm == pytest.approx(norm(WEIGHT_GRADIENT, BIAS_GRADIENT), rel=1e-12)
    assert conv.weight_norm == pytest.approx(norm(WEIGHT, BIAS), rel=1e-12)  # without the buffer
    assert conv.ratio == pytest.approx(norm(WEIGHT_GRADIENT, BIAS_GRADIENT) / norm(WEIGHT, BIAS), rel=1e-12)
    relu = health["relu@1"]
    assert (relu.parameter_gradient_norm, relu.weight_norm, relu.ratio) == (None, None, None)
    assert (health.objective, health.model_id, health.flagged) == (2.5, "m", ())


def test_one_pass_sends_statistics_only(report: Report) -> None:
    fake = healthy()
    report(fake, edits="ablate-3")
    passes = [options for name, options in fake.calls if name == "gradients"]
    assert len(passes) == 1
    assert (passes[0]["of"], passes[0]["edits"]) == (OF, "ablate-3")
    assert [tap.selector for tap in passes[0]["at"]] == ["**"]
    assert [tap.selector for tap in passes[0]["taps"]] == ["**/param_grad(*)", "**/param(*)"]


def test_the_models_own_parameters_have_a_row_at_the_end(report: Report) -> None:
    token, gradient = random(1, 1, 8), random(1, 1, 8, seed=9)
    fake = healthy()
    fake.parameters = {**fake.parameters, "class_token": (token, gradient)}
    row = report(fake).rows[-1]
    assert (row.name, row.path, row.gradient_norm, row.zero_fraction) == ("/param(*)", "", None, None)
    assert row.ratio == pytest.approx(norm(gradient) / norm(token), rel=1e-12)


def test_parameters_of_a_module_that_is_never_called_stand_before_what_holds_it(report: Report) -> None:
    fake = FakeGradients(
        {name: random(2, 3) for name in ("ln", "attention", "attentions", "block", "head")},
        {"attention.out_proj.weight": (WEIGHT, WEIGHT_GRADIENT), "head.weight": (WEIGHT, WEIGHT_GRADIENT)},
    )
    names = [row.name for row in report(fake).rows]
    assert names == ["ln", "attention.out_proj/param(*)", "attention", "attentions", "block", "head"]


def test_a_model_without_parameters_has_a_report(report: Report) -> None:
    health = report(FakeGradients({"relu": random(2, 3)}))
    assert [(row.name, row.weight_norm) for row in health.rows] == [("relu", None)]


def test_a_model_with_buffers_alone_has_a_report(report: Report) -> None:
    fake = FakeGradients({"norm": random(2, 3)}, {"norm.running_mean": (random(3), None)})
    assert report(fake)["norm"].parameter_gradient_norm is None
    assert [name for name, _ in fake.calls].count("gradients") == 2


def test_what_else_is_unknown_is_raised(report: Report) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError, match="layer9"):
        report(healthy(), at="layer9")


def test_chosen_places_come_in_execution_order_with_their_parameters(report: Report) -> None:
    fake = healthy(**{"relu@1/in": random(2, 4, seed=8)})
    health = report(fake, at=["relu@1", "relu@1/in", trocar.tap("conv", alias="first")])
    assert [row.name for row in health.rows] == ["first", "relu@1/in", "relu@1"]
    assert health["first"].ratio is not None
    asked = next(options["taps"] for name, options in fake.calls if name == "gradients")
    assert [tap.selector for tap in asked] == ["conv/param_grad(*)", "conv/param(*)"]


def test_elements_of_a_structured_output_have_a_row_each(report: Report) -> None:
    fake = FakeGradients({"lstm[0]": random(2, 3), "lstm[1]": random(2, 3), "/out": random(2, 3)})
    assert [row.name for row in report(fake, at=["lstm[0]", "lstm[1]", "/out"]).rows] == [
        "lstm[0]",
        "lstm[1]",
        "/out",
    ]


@pytest.mark.parametrize(
    ("gradient", "flags"),
    [
        ([1.0, -2.0], ()),
        ([0.0, 0.0], ("dead",)),
        ([0.0, 1e-9], ("vanishing",)),
        ([1e-6, 0.0], ()),
        ([1e4, 0.0], ("exploding",)),
        ([1e3, 0.0], ()),
        ([np.nan, 1.0], ("nan",)),
        ([np.inf, 1.0], ("inf", "exploding")),
        ([np.nan, -np.inf], ("nan", "inf")),
        ([1e-300, 0.0], ("vanishing",)),
        ([1e300, 1e300], ("exploding",)),
        ([], ()),
    ],
)
def test_flags_of_a_gradient(report: Report, gradient: list[float], flags: tuple[str, ...]) -> None:
    assert only(np.array(gradient), report=report).flags == flags


@pytest.mark.parametrize(
    ("value", "gradient", "flags"),
    [
        ([1.0], [0.5], ()),
        ([1e9], [1.0], ("vanishing",)),
        ([1e-4], [1.0], ("exploding",)),
        ([1.0], [0.0], ("dead",)),
        ([1.0], [1e-7], ("vanishing",)),
        ([0.0], [1.0], ()),
        ([0.0], [0.0], ("dead",)),
        ([1.0], [np.nan], ("nan",)),
    ],
)
def test_flags_of_parameters(
    report: Report, value: list[float], gradient: list[float], flags: tuple[str, ...]
) -> None:
    parameters = {"m.weight": (np.array(value), np.array(gradient))}
    assert only(random(2, 3), parameters, report).flags == flags


def test_zero_weights_have_no_ratio(report: Report) -> None:
    row = only(random(2, 3), {"m.bias": (np.zeros(3), np.ones(3))}, report)
    assert (row.weight_norm, row.ratio) == (0.0, None)


def test_a_parameter_with_nan_makes_its_module_nan_beside_an_infinite_one(report: Report) -> None:
    parameters = {"m.weight": (np.ones(2), np.array([np.nan, 1])), "m.bias": (np.ones(1), np.array([np.inf]))}
    row = only(random(2, 3), parameters, report)
    assert math.isnan(row.parameter_gradient_norm or 0)
    assert (row.nan_count, row.inf_count, row.flags) == (1, 1, ("nan", "inf"))


def test_thresholds_are_those_of_the_call(report: Report) -> None:
    parameters = {"m.weight": (np.array([10.0]), np.array([1.0]))}
    value = np.array([3.0, 4.0])
    assert only(value, parameters, report, vanishing=5.5).flags == ("vanishing",)
    assert only(value, parameters, report, exploding=4.5).flags == ("exploding",)
    assert only(value, parameters, report, vanishing_ratio=0.2).flags == ("vanishing",)
    assert only(value, parameters, report, exploding_ratio=0.05).flags == ("exploding",)
    assert only(value, parameters, report, vanishing=1, exploding=5, vanishing_ratio=0.1).flags == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vanishing": -1}, "vanishing=-1 must be 0 or a positive number"),
        ({"exploding": math.inf}, "exploding=inf must be"),
        ({"vanishing_ratio": math.nan}, "vanishing_ratio=nan must be"),
        ({"vanishing": 2, "exploding": 1}, "vanishing=2 must be below exploding=1"),
        ({"at": []}, "taps is empty"),
        ({"at": trocar.tap("conv", channels=[1])}, "has reductions"),
        ({"at": "fc/param(weight)"}, "selects parameters, which have no rows"),
        ({"at": ["conv", "**@0/param_grad(*)"]}, "selects parameters, which have no rows"),
    ],
)
def test_wrong_options_are_refused_before_the_pass(
    report: Report, options: dict[str, Any], message: str
) -> None:
    fake = healthy()
    with pytest.raises(ValueError, match=message):
        report(fake, **options)
    assert fake.calls == []


def test_the_report_prints_as_a_table(report: Report) -> None:
    fake = FakeGradients(
        {"fc": np.array([0.0, 3.0, 0.0, 4.0]), "relu": np.zeros(4)},
        {"fc.weight": (np.array([10.0]), np.array([1.0]))},
    )
    health = report(fake)
    line = "1 of 2 flagged: 1 dead (norms 1e-06 to 1000, ratios 1e-06 to 1000); objective 2.5"
    assert [line.split() for line in str(health).splitlines()] == [
        ["module", "type", "gradient", "zeros", "NaN", "Inf", "of", "weights", "weights", "ratio", "flags"],
        ["fc", "M", "5", "50.0%", "1", "10", "0.1"],
        ["relu", "M", "0", "100.0%", "dead"],
        line.split(),
    ]
    assert "<td>50.0%</td>" in health._repr_html_()


def test_the_report_is_plain_data(report: Report) -> None:
    found = json.loads(json.dumps(report(healthy()).to_dict()))
    assert found["rows"][0]["name"] == "conv"
    assert found["thresholds"]["exploding_ratio"] == 1e3
    assert found["rows"][0]["flags"] == []


def test_unknown_names_show_the_nearest(report: Report) -> None:
    with pytest.raises(KeyError, match="nearest: conv"):
        report(healthy())["conb"]


def test_the_plot_shows_every_row_and_names_150_modules(report: Report) -> None:
    pytest.importorskip("matplotlib")
    special = [np.zeros(3), np.full(3, np.nan), np.array([np.inf]), np.full(3, 1e-9), np.full(3, 1e9)]
    arrays = [*special, *(random(3, scale=10.0**-k, seed=k) for k in range(5))] * 15
    fake = FakeGradients(
        {f"features.{index}.conv": array for index, array in enumerate(arrays)},
        {f"features.{index}.conv.weight": (np.ones(1), np.full(1, 0.1)) for index in range(0, 150, 2)},
    )
    figure = report(fake).plot(all_rows=True)
    left, right = figure.axes
    assert left.get_xscale() == right.get_xscale() == "log"
    assert sum(len(np.asarray(points.get_offsets())) for points in left.collections) == 150 + 75
    assert sum(len(np.asarray(points.get_offsets())) for points in right.collections) == 75
    labels = left.get_yticklabels()
    assert len(labels) == 150
    assert labels[5].get_color() == "black"
    assert labels[0].get_color() != "black"


def test_of_many_rows_the_flagged_and_largest_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        HealthRow(f"m{k}", f"m{k}", "M", float(k + 1), 0.0, 0, 0, None, None, None, ()) for k in range(40)
    ]
    rows[3] = replace(rows[3], gradient_norm=1e-9, flags=("vanishing",))
    health = trocar.Health(tuple(rows), None, trocar.HealthThresholds(), "m")
    some, every = health.plot(tmp_path / "health.png"), health.plot(all_rows=True)
    assert (tmp_path / "health.png").read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in some.axes[0].get_yticklabels()]
    assert names == ["m3", *(f"m{k}" for k in range(39, 10, -1))]
    assert "30 of 40 modules, flagged ones first" in some.get_suptitle()
    assert [label.get_text() for label in every.axes[0].get_yticklabels()] == [row.name for row in rows]
    assert every.get_figheight() > some.get_figheight()


def test_a_report_without_rows_or_numbers_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    thresholds = trocar.HealthThresholds()
    assert len(trocar.Health((), None, thresholds, "m").plot().axes) == 2
    row = HealthRow("a", "a", "M", math.nan, 0.0, 1, 0, None, None, None, ("nan",))
    assert len(trocar.Health((row,), math.nan, thresholds, "m").plot().axes) == 2
