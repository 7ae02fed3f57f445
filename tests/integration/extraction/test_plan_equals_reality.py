"""Random requests: what a plan tells is what then arrives, and what a call refuses a plan refuses alike."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models import odd_models, tiny_models
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

INPUTS: dict[str, tuple[Any, Any]] = {
    "plain": (tiny_models.Plain, noise(2, 3, 8, 8)),
    "half": (tiny_models.Half, noise(2, 7)),
    "structured": (tiny_models.Structured, noise(2, 3)),
    "recursive": (odd_models.Recursive, noise(2, 3)),
    "dtypes": (odd_models.Dtypes, noise(6, 6)),
    "tokens": (odd_models.TokenModel, np.arange(6).reshape(2, 3)),
    "transformer": (odd_models.Transformer, noise(2, 5, 16)),
    "layers": (odd_models.TorchLayers, noise(2, 4, 6)),
    "many": (odd_models.TakesMany, {"x": noise(2, 3), "scale": noise(2, 2)}),
}
SELECTORS: dict[str, list[str]] = {
    "plain": [
        "conv",
        "relu@*",
        "relu@-1",
        "fc/in",
        "conv*",
        "re:conv.?",
        "#-1",
        "#0:3",
        "**:Conv2d",
        "fx:conv2",
    ],
    "half": ["/out", "/in", "/param(scale)"],
    "structured": ["both", 'both["first"]', "split[0]", "split/in(scale)", "/out", '/out["aux"]', "count/in"],
    "recursive": ["nested@*", "nested@1/in[0]", "nested@-1", "#0"],
    "dtypes": [
        f'/out["{name}"]' for name in (*odd_models.Dtypes.NAMES, "empty", "scalar", "strided", "expanded")
    ],
    "tokens": ["embedding", "/in", "embedding/param(weight)"],
    "transformer": [
        "encoder.layers.*",
        "**:Linear",
        "head/in",
        "fn:scaled_dot_product_attention@*",
        "fn:softmax@0",
    ],
    "layers": ["lstm[0]", "gru", "attention", "norm", "list.*", "**"],
    "many": ["mix", "/in(scale)", "mix/param(weight)", "/out"],
}
ANYWHERE = ["/out", "/in", "**", "nowhere", "fx:add", "fn:linear@0", "fn:relu@*", "@", "#99", "*.*"]
STATS: list[Any] = [
    "mean",
    "std",
    "min",
    "kurtosis",
    "covariance",
    "argmax_channel",
    "count",
    trocar.quantiles(0.5),
]


def reduction(chance: random.Random) -> trocar.Reduction:
    makers: list[Callable[[], trocar.Reduction]] = [
        lambda: trocar.index(np.s_[0:1]),
        lambda: trocar.index(np.s_[..., 0]),
        lambda: trocar.index(np.s_[:, 1:3]),
        lambda: trocar.channels([0, 1]),
        lambda: trocar.channels([0, 99]),
        lambda: trocar.samples([1]),
        lambda: trocar.crop(1, 1, 2, 2),
        lambda: trocar.pool("avg"),
        lambda: trocar.pool("max", 2),
        lambda: trocar.top_k(2),
        trocar.peak,
        trocar.gram,
        lambda: trocar.project(3, seed=1),
        lambda: trocar.pca(noise(2, 4), noise(4)),
        lambda: trocar.pca(noise(2, 16)),
    ]
    return chance.choice(makers)()


def tap(chance: random.Random, model_id: str) -> str | trocar.Tap:
    selector = chance.choice(SELECTORS[model_id] * 3 + ANYWHERE)
    if chance.random() < 0.3:
        return selector
    has_stats = chance.random() < 0.5
    over = chance.choice(["all", "channel", "sample"])
    stats = chance.sample(STATS, chance.randint(1, 3)) if has_stats else []
    values = not has_stats or chance.random() < 0.5
    return trocar.tap(
        selector,
        alias=chance.choice([None, None, None, "mine"]),
        stats=[stat for stat in stats if stat != "covariance" or over == "channel"],
        values=values or stats == ["covariance"],
        over=over,  # type: ignore[arg-type]
        channel_dim=chance.choice([None, None, None, 0, -1, 7]),
        reduce=[reduction(chance) for _ in range(chance.choice([0, 0, 1, 1, 2]))],
        cast=chance.choice([None, None, "float16", "int8"]) if values else None,
    )


@pytest.fixture(scope="module")
def models() -> Iterator[RunningServer]:
    hosted: dict[str, Any] = {
        name: custom(kind, (values["x"] if isinstance(values, dict) else values).shape[1:])
        for name, (kind, values) in INPUTS.items()
    }
    limits = {"max_reply_bytes": 20_000}
    with running_server(models=hosted, device="cpu", limits=limits) as running:
        yield running


@pytest.fixture(scope="module")
def near(models: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(models.address) as connected:
        yield connected


def outcome(call: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except trocar.TrocarError as error:
        return error


@pytest.mark.parametrize("model_id", INPUTS)
def test_a_plan_tells_what_arrives(near: trocar.Client, model_id: str) -> None:
    chance, values, arrived = random.Random(model_id), INPUTS[model_id][1], 0
    for _ in range(120):
        try:
            taps = [tap(chance, model_id) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
        except ValueError:  # the client itself refuses what cannot be
            continue
        planned, found = (outcome(call, model_id, values, taps) for call in (near.plan, near.extract))
        if isinstance(found, trocar.TrocarError):
            assert is_same_refusal(planned, found), (taps, planned, found)
            continue
        assert isinstance(planned, trocar.ExtractionPlan), (taps, planned)
        arrived += 1
        assert_same(planned, found, taps)
    assert arrived > 20


def operand(chance: random.Random) -> Any:
    return chance.choice([0.5, 2, noise(1), noise(4, 1, 1), noise(3), noise(4), noise(6, 6)])


OPERATIONS: dict[str, Callable[[random.Random], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "set": lambda chance: ((operand(chance),), {}),
    "zero": lambda _: ((), {}),
    "add": lambda chance: ((operand(chance),), {}),
    "scale": lambda chance: ((operand(chance),), {}),
    "clamp": lambda _: ((), {"low": 0}),
    "noise": lambda _: ((0.5,), {"seed": 3}),
    "mean_ablate": lambda chance: ((), chance.choice([{}, {"reference": operand(chance)}])),
    "resample": lambda _: ((), {}),
    "swap": lambda chance: (
        (),
        chance.choice(
            [{"source": "clean"}, {"at": "conv"}, {"source": "clean", "at": "/in"}, {"source": "nobody"}]
        ),
    ),
    "add_input": lambda _: ((), {}),
    "steer": lambda chance: ((noise(chance.choice([3, 4, 16])),), {}),
    "project_out": lambda chance: ((noise(2, chance.choice([3, 4, 16])),), {}),
    "top_k": lambda chance: ((chance.choice([1, 3, 50]),), {}),
    "dropout": lambda _: ((0.5,), {}),
    "cast": lambda chance: ((chance.choice(["float16", "int8"]),), {}),
    "skip": lambda _: ((), {}),
    "normalise": lambda chance: ((1.0,), {"scope": chance.choice(["sample", "channel_vector", "all"])}),
    "nan_to_num": lambda _: ((), {}),
}
SCORED: dict[str, list[str]] = {
    "plain": ["fc", "/out", "conv2"],
    "half": ["/out"],
    "structured": ['/out["out"]', 'both["second"]'],
    "recursive": ["/out", "nested@1"],
    "dtypes": ['/out["float32"]', '/out["float16"]', '/out["strided"]'],
    "tokens": ["embedding", "/out"],
    "transformer": ["head", "encoder"],
    "layers": ["norm", '/out["values"]', "lstm[0]"],
    "many": ["mix", "/out"],
}
PARAMETERS = [
    "**/param(*)",
    "conv/param(weight)",
    "head/param(bias)",
    "lstm/param(bias_hh_l0)",
    "norm/param(running_mean)",
]


def an_edit(chance: random.Random, model_id: str, has_gradients: bool) -> trocar.Edit:
    selector = chance.choice([*SELECTORS[model_id] * 3, *ANYWHERE, *PARAMETERS])
    if has_gradients and chance.random() < 0.4:
        selector = as_gradient(selector)
    name: Any = chance.choice(list(OPERATIONS))
    values, options = OPERATIONS[name](chance)
    part: dict[str, Any] = chance.choice(
        [{}, {}, {}, {"channels": [0]}, {"samples": [1]}, {"index": np.s_[:, 0]}]
    )
    order: Any = chance.choice(["before", "before", "after"])
    return trocar.edit(selector, name, *values, **options, **(part if name != "skip" else {}), order=order)


def as_gradient(selector: str) -> str:
    """Return the selector of the gradient with respect to what another one selects."""
    path, slash, port = selector.rpartition("/")
    if not slash:
        head, bracket, rest = selector.partition("[")
        return f"{head}/grad_out{bracket}{rest}"
    return f"{path}/param_grad{port[5:]}" if port.startswith("param") else f"{path}/grad_{port}"


def an_objective(chance: random.Random, model_id: str) -> trocar.Objective:
    selector = chance.choice([*SCORED[model_id] * 6, *SELECTORS[model_id]])
    scores: list[Callable[[], trocar.Objective]] = [
        *[lambda: trocar.value(selector, function="square")] * 4,
        lambda: trocar.value(selector, reduce="norm", function="square"),
        lambda: trocar.logit(chance.choice([0, 2, 99]), at=selector),
        lambda: trocar.loss("mse", noise(2, 5), at=selector),
        lambda: trocar.value(selector) - 2 * trocar.value(SCORED[model_id][0]),
        lambda: trocar.gradient_penalty(trocar.value(selector)),
    ]
    return chance.choice(scores)()


@pytest.mark.parametrize("model_id", INPUTS)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_plan_with_edits_tells_what_arrives(
    near: trocar.Client, model_id: str, has_gradients: bool
) -> None:
    chance, values, arrived = random.Random(f"{model_id} {has_gradients}"), INPUTS[model_id][1], 0
    for _ in range(120 if has_gradients else 150):
        try:
            edits = [an_edit(chance, model_id, has_gradients) for _ in range(chance.choice([0, 0, 1, 1, 2]))]
            objective = an_objective(chance, model_id) if has_gradients else None
            at = as_gradient(chance.choice([*SELECTORS[model_id], "/in", "**", "**", *PARAMETERS]))
            taps = [at, chance.choice(SELECTORS[model_id])] if has_gradients else [tap(chance, model_id)]
        except ValueError:  # the client itself refuses what cannot be
            continue
        options: dict[str, Any] = {"edits": edits, "of": objective, "sources": {"clean": values}}
        planned, found = (
            outcome(call, model_id, values, taps, **options) for call in (near.plan, near.extract)
        )
        if isinstance(found, trocar.TrocarError):
            assert_own_reason(found, (taps, options))
            assert is_same_refusal(planned, found), (taps, options, planned, found)
            continue
        assert isinstance(planned, trocar.ExtractionPlan), (taps, options, planned)
        arrived += 1
        assert_same(planned, found, (taps, options))
        assert planned.edit_expansions == found.edit_expansions, (taps, options)
    assert arrived > (3 if has_gradients else 10)


def assert_own_reason(error: trocar.TrocarError, request: Any) -> None:
    """What is refused because of an edit or objective is never said to be the input's fault."""
    assert not isinstance(error, trocar.errors.InternalServerError | trocar.errors.InputRejectedError), (
        request,
        error,
    )


def is_same_refusal(planned: Any, found: trocar.TrocarError) -> bool:
    """A cast of NaN to int8, and statistics of what has no data, are known only beside the data."""
    if isinstance(planned, trocar.TrocarError):
        return type(planned) is type(found) and words(planned) == words(found)
    return isinstance(found, trocar.errors.ReductionRejectedError) and "NaN" in str(found)


def words(error: trocar.TrocarError) -> str:
    return str(error).partition(" (request ")[0]


def assert_same(plan: trocar.ExtractionPlan, maps: trocar.FeatureMaps, taps: Any) -> None:
    assert list(plan.feature_maps) == list(maps.info), taps
    for name, info in maps.info.items():
        told = plan.feature_maps[name]
        for key in (
            "path",
            "type",
            "call_index",
            "port",
            "pick",
            "shape",
            "dtype",
            "has_values",
            "byte_count",
        ):
            assert getattr(told, key) == getattr(info, key), (taps, name, key)
        assert told.companion_of == info.companion_of
    assert plan.expansions == maps.expansions
    assert plan.reply_bytes == sum(info.byte_count for info in maps.info.values())
    kinds = {name.split(":")[0] if ":" in name[:3] else "" for name in maps.info}
    if len(kinds) == 1:  # modules and functions have clocks of their own
        assert plan.stopped_at == maps.stopped_at, taps


@pytest.mark.parametrize(
    "start", ["conv2", "relu@0", "relu@1", "pool", "fc/in", "/in", "fc", "unused", "nope"]
)
def test_a_plan_of_a_start_tells_what_arrives(near: trocar.Client, start: str) -> None:
    images = INPUTS["plain"][1]
    full = near.extract("plain", images, ["conv2", "relu@*", "pool", "fc/in", "/in", "fc"])
    name = {"/in": "/in[0]", "fc/in": "fc/in[0]"}.get(start, start)
    value = full[name] if name in full else full["conv2"]
    for taps in (["fc"], ["conv"], ["relu@*"], ["fc", "pool", "/out"], [trocar.tap("fc", stats=["mean"])]):
        planned = outcome(near.plan, "plain", value, taps, start_at=start)
        found = outcome(near.extract, "plain", value, taps, start_at=start)
        if isinstance(found, trocar.TrocarError):
            assert type(planned) is type(found)
            assert words(planned) == words(found)
        else:
            assert_same(planned, found, taps)


def test_a_model_that_takes_tokens_has_an_example_input(near: trocar.Client) -> None:
    plan = near.plan("tokens", None, ["embedding", "/in"])
    assert plan.feature_maps["embedding"].shape == (1, 3, 4)
    assert plan.feature_maps["/in"].dtype == "int64"
    assert near.extract("tokens", None, "embedding/param(weight)")["embedding/param(weight)"].shape == (10, 4)


def test_the_bytes_of_a_request_are_told(near: trocar.Client) -> None:
    images: Array = INPUTS["plain"][1]
    components = noise(2, 4)
    taps = [trocar.tap("conv", reduce=[trocar.pca(components)])]
    assert near.plan("plain", images, taps).request_bytes == images.nbytes + components.nbytes
