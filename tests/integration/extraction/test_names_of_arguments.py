"""Arguments by position and by name are one request: the same plans, passes, masks and numbers."""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.relations.replies import same_bits
from tests.support.oracles.oracle import noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.wire.open_inference import arrays_of, infer, request_of
from tests.support.wire.wire import raw_channel
from trocar_server.engine.request.plan import Plan, TapRequest, TensorInput
from trocar_server.surgery import parse_selector

WIDTH = 4
IDS = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
ENGINE: dict[str, Any] = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0}


class Masked(nn.Module):
    """Takes a mask as values, so that its passes can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * attention_mask[..., None].to(x.dtype)
        value: torch.Tensor = self.second(hidden)
        return value


class MaskedByPosition(Masked):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor, /) -> torch.Tensor:
        return super().forward(x, attention_mask)


class Unnamed(Masked):
    """A forward without names that can be read."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.head(self.body(image).relu())
        return value


class Teaching(Single):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels)


class AnySingle(Single):
    """A forward without names that can be read."""

    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args)


def hooked() -> nn.Module:
    """Return a model with a hook of its own that sees arguments by position alone."""
    module = Masked()
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    return module


INPUTS = {
    "x": {"dtype": "float32", "shape": ("batch", "tokens", WIDTH)},
    "attention_mask": {"dtype": "int64", "shape": ("batch", "tokens"), "below": 2},
}
MASKED = {"masked": Masked, "masked-by-position": MaskedByPosition, "hooked": hooked}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    kinds: dict[str, Any] = {**MASKED, "unnamed": Unnamed}
    models = {name: custom(kind, (5, WIDTH), inputs=INPUTS) for name, kind in kinds.items()}
    for name, kind in {"single": Single, "teaching": Teaching, "any": AnySingle}.items():
        models[name] = custom(kind, (WIDTH,))
    with running_server(models=models, device="cpu", engine=ENGINE) as running:
        build_here(running)
        yield running


X = noise(2, 5, WIDTH)
TAPS = [
    trocar.tap("first", stats=["mean", "count"], values=False),
    trocar.tap("second", alias="values"),
    trocar.tap("second", alias="pooled", reduce=[trocar.pool("avg")]),
]
FORMS: dict[str, Any] = {
    "name": {"x": X, "attention_mask": MASK},
    "other order": {"attention_mask": MASK, "x": X},
    "position": (X, MASK),
    "both": {"": X, "attention_mask": MASK},
}


def results(maps: trocar.FeatureMaps) -> dict[str, Any]:
    return {
        "count": maps.stats["first"].count,
        "mean": maps.stats["first"].mean,
        "values": maps["values"],
        "pooled": maps["pooled"],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert same_bits(np.asarray(found[name]), np.asarray(value)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MASKED)
def test_a_mask_counts_however_it_is_sent(client: trocar.Client, model: str, form: str) -> None:
    maps = client.extract(model, FORMS[form], TAPS, options=trocar.options(cache=False))
    assert maps.stats["first"].count == int(MASK.sum()) * WIDTH
    assert_same(results(maps), results(client.extract(model, FORMS["name"], TAPS)))


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_counts_in_streams_and_prepared_calls(client: trocar.Client, form: str) -> None:
    expected = results(client.extract("masked", FORMS["name"], TAPS))
    with client.extract_stream("masked", [FORMS[form]], TAPS) as stream:
        assert_same(results(next(iter(stream)).unwrap()), expected)
    with client.prepare("masked", FORMS[form], TAPS) as call:
        assert_same(results(call(FORMS[form])), expected)


def test_a_mask_counts_in_open_inference(server: RunningServer, client: trocar.Client) -> None:
    expected = client.extract("masked", FORMS["position"], TAPS).stats["first"]
    with raw_channel(server.address) as channel:
        for form in ("name", "other order"):
            request = request_of("masked", FORMS[form], {"first:count": ("first", "count")})
            assert arrays_of(infer(channel, request))["first:count"] == [expected.count]


def test_forms_share_their_plan_their_recording_and_their_signature(server: RunningServer) -> None:
    def plan(*names: str) -> Plan:
        shapes = ((torch.float32, (2, 7, WIDTH)), (torch.int64, (2, 7)))
        inputs = tuple(TensorInput(name, *shape) for name, shape in zip(names, shapes, strict=True))
        return Plan("masked", (TapRequest(parse_selector("second")),), inputs, 1 << 20)

    forms = (plan("", ""), plan("x", "attention_mask"), plan("", "attention_mask"))
    checked = [server.run(partial(server.engine.checks.check, form)) for form in forms]
    assert all(each.plan == checked[0].plan for each in checked)
    assert all(each.signature == checked[0].signature for each in checked)
    assert all(each.recording is checked[0].recording for each in checked)


@pytest.mark.parametrize("model", MASKED)
def test_forms_share_a_compiled_pass_in_which_the_mask_counts(
    server: RunningServer, client: trocar.Client, model: str
) -> None:
    for form in ("position", "name", "both") * 3:
        client.extract(model, FORMS[form], TAPS, options=trocar.options(numerics="fast", cache=False))
        server.run(server.engine.compiled.settled)
    own = [v for v in server.engine.compiled.variants() if v.deployment.hosted.spec.model_id == model]
    assert len(own) == 1
    assert own[0].is_ready, own[0].problems
    exact = results(client.extract(model, FORMS["name"], TAPS))
    for form in ("position", "name", "both"):
        maps = client.extract(model, FORMS[form], TAPS, options=trocar.options(numerics="fast", cache=False))
        assert maps.execution.engine != "eager"
        assert maps.stats["first"].count == exact["count"]
        assert np.allclose(maps["values"], exact["values"], atol=1e-5)
        assert np.allclose(maps["pooled"], exact["pooled"], atol=1e-5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((X[:, 0], X[:, 0]), "takes 1 arguments by position, and 2 are given; it takes image"),
        ({"picture": X[:, 0]}, "no argument 'picture'; it takes image"),
        ({"": X[:, 0], "image": X[:, 0]}, "'image' is given by position and by name"),
    ],
)
def test_what_no_parameter_takes_is_refused_with_their_names(
    client: trocar.Client, given: Any, text: str
) -> None:
    for ask in (client.extract, client.plan):
        with pytest.raises(trocar.TrocarError, match=text):
            ask("single", given, ["head"])


@pytest.mark.parametrize("form", ["position", "name"])
def test_a_model_without_names_takes_arguments_as_before(client: trocar.Client, form: str) -> None:
    found = client.extract("unnamed", FORMS[form], ["second", "first/in"])
    expected = client.extract("masked", FORMS[form], ["second", "first/in"])
    assert found["first/in"].shape == expected["first/in"].shape
    assert same_bits(found["first/in"], X)
    with client.extract_stream("unnamed", [FORMS[form]], ["second"]) as stream:
        assert same_bits(next(iter(stream)).unwrap()["second"], found["second"])
    edited = client.extract(
        "unnamed", FORMS[form], ["first/in"], edits=[trocar.edit("first/in", "scale", 2.0)]
    )
    assert same_bits(edited["first/in"], X * 2)


@pytest.mark.parametrize("model", ["single", "any"])
def test_trainers_take_batches_in_both_forms(client: trocar.Client, model: str) -> None:
    x, labels = X[:, 0], np.array([0, 2])
    losses = []
    forms: list[Any] = [x, (x,)] if model == "any" else [x, {"image": x}, (x,)]
    for batch in forms:
        with client.train(model, trainable=["head"]) as trainer:
            losses.append([trainer.step(batch, labels).loss for _ in range(2)])
    assert losses == [losses[0]] * len(losses)


def test_a_teacher_with_other_names_gets_the_arguments_in_their_order(client: trocar.Client) -> None:
    x = X[:, 0]
    loss = trocar.training.loss_term("mse", teacher="teaching")
    forms: list[Any] = [x, {"image": x}]
    for batch in forms:
        with client.train("single", trainable=["head"], losses=[loss]) as trainer:
            found = trainer.step(batch).loss
        student, teacher = (client.extract(model, x, ["/out"])["/out"] for model in ("single", "teaching"))
        assert np.isclose(found, np.mean((student - teacher) ** 2))
