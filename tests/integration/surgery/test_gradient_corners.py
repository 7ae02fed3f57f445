"""Gradients where hooks are easy to get wrong, against autograd on a model that never works in place."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trocar
from tests.support.models import odd_models, stateful_models, surgical_models, tiny_models
from tests.support.oracles.by_hand import gradients, plain
from tests.support.oracles.oracle import Array, noise, rebuilt_by_name
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (tiny_models.Plain, (3, 8, 8)),
    "structured": (tiny_models.Structured, (3,)),
    "dependent": (tiny_models.DataDependent, (3,)),
    "many": (odd_models.TakesMany, (3,)),
    "identity": (odd_models.Identity, (3,)),
    "layers": (odd_models.TorchLayers, (4, 6)),
    "recursive": (odd_models.Recursive, (3,)),
    "dtypes": (odd_models.Dtypes, (6,)),
    "keeps-state": (odd_models.KeepsState, (4,)),
    "writes-buffer": (stateful_models.WritesBuffer, (3,)),
    "replaces-buffer": (stateful_models.ReplacesBuffer, (3,)),
    "keeps-last": (stateful_models.KeepsLast, (3,)),
    "keeps-all": (stateful_models.KeepsAll, (3,)),
    "plain-tensor": (stateful_models.PlainTensor, (3,)),
    "makes-tensors": (stateful_models.MakesTensors, (3,)),
    "input-overwritten": (odd_models.InPlaceOnInput, (3,)),
    "overwrites": (odd_models.Overwrites, (3,)),
    "remembers": (surgical_models.Remembers, (3,)),
    "blocks": (surgical_models.Blocks, (6,)),
    "tied": (surgical_models.Tied, (3,)),
    "recurrent": (surgical_models.Recurrent, (5, 6)),
    "normed": (surgical_models.Normed, (3, 6, 6)),
}
ROWS, IMAGES, WORDS = noise(2, 6), noise(2, 3, 8, 8), np.array([[0, 3, 6], [1, 1, 2]])


@pytest.fixture(scope="module")
def hosted() -> Iterator[RunningServer]:
    models: dict[str, Any] = {name: custom(kind, shape) for name, (kind, shape) in MODELS.items()}
    models["resnet18"] = {"weights": "random:0"}
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def near(hosted: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(hosted.address) as connected:
        yield connected


@pytest.fixture(autouse=True)
def _nothing_is_left(hosted: RunningServer) -> Iterator[None]:
    before = hook_counts(hosted)
    yield
    assert hook_counts(hosted) == before


def built(name: str) -> Any:
    return (rebuilt_by_name(name) if name == "resnet18" else rebuilt(MODELS[name][0])).requires_grad_(False)


def logit_of(index: int) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda kept: kept["/out"][:, index].sum()


FIRST = logit_of(1)


def by_hand(
    name: str, values: Array, at: list[str], objective: Any = FIRST, changes: Any = None
) -> dict[str, Array]:
    found = gradients(built(name), [torch.from_numpy(values.copy())], objective, at, changes)
    return {key: value.numpy() for key, value in found.items()}


def of_parameters(name: str, values: Array, names: list[str], objective: Any = FIRST) -> dict[str, Array]:
    """Return gradients with respect to parameters, named as in `named_parameters`."""
    model = plain(built(name))
    tensors = {
        key: value.clone().requires_grad_() for key, value in model.state_dict().items() if key in names
    }
    output = torch.func.functional_call(model, tensors, (torch.from_numpy(values.copy()),))
    return dict(
        zip(
            names,
            [
                g.numpy()
                for g in torch.autograd.grad(objective({"/out": output}), [tensors[n] for n in names])
            ],
            strict=True,
        )
    )


def assert_close(found: Array, expected: Array, tolerance: float = 1e-6) -> None:
    scale = max(float(np.abs(expected).max()), 1e-12)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


RESNET = [
    "/in",
    "conv1",
    "bn1",
    "relu",
    "relu/in",
    "layer1.0.relu@0",
    "layer1.0.relu@1",
    "layer1.0.relu@1/in",
    "layer1.0.bn2",
]


@pytest.mark.parametrize("places", [RESNET, *([place] for place in RESNET)])
def test_gradients_beside_modules_that_work_in_place(near: trocar.Client, places: list[str]) -> None:
    images = noise(2, 3, 32, 32)
    expected = by_hand("resnet18", images, places)
    found = near.gradients("resnet18", images, of=trocar.logit(1), at=places)
    for place in places:
        assert_close(found[place], expected[place], 1e-5)


@pytest.mark.parametrize(
    "places", [["first.act@*"], ["first.act@0"], ["first.act@5"], ["first.act@2/in"], ["first.act@3", "/in"]]
)
def test_gradients_at_one_call_of_several(near: trocar.Client, places: list[str]) -> None:
    named = [f"first.act@{call}" for call in range(6)] if places == ["first.act@*"] else places
    expected = by_hand("blocks", ROWS, named)
    found = near.gradients("blocks", ROWS, of=trocar.logit(1), at=places)
    for place in named:
        assert_close(found[grad_name(place)], expected[place])


def grad_name(place: str) -> str:
    path, _, port = place.partition("/")
    return f"{path}/grad_{port or 'out'}"


def test_a_container_and_its_last_child_have_the_same_gradient(near: trocar.Client) -> None:
    found = near.gradients(
        "blocks", ROWS, of=trocar.logit(1), at=["head", "head.1", "third", "head/in", "head.0/in"]
    )
    expected = by_hand("blocks", ROWS, ["head", "third"])
    for place in ("head", "head.1"):
        assert_close(found[place], expected["head"])
    for place in ("third", "head/in", "head.0/in"):
        assert_close(found[place], expected["third"])


def test_edits_of_the_gradient_of_a_container_and_its_last_child(near: trocar.Client) -> None:
    """They are one tensor: each sees what those before it in the list have made."""
    edits = [trocar.edit("third/grad_out", "add", 1), trocar.edit("third.act@5/grad_out", "scale", 2)]
    edits[1] = trocar.edit("first.act@5/grad_out", "scale", 2)
    plain_gradient = by_hand("blocks", ROWS, ["third"])["third"]
    for order, expected in ((edits, (plain_gradient + 1) * 2), (edits[::-1], plain_gradient * 2 + 1)):
        found = near.gradients("blocks", ROWS, of=trocar.logit(1), at=["third", "first.act@5"], edits=order)
        assert_close(found["third"], expected)
        assert_close(found["first.act@5"], expected)


def hooked(name: str, values: Array, place: str, change: Any, at: list[str]) -> dict[str, Array]:
    """Change the gradient at a place with a tensor hook, on a model that never works in place."""

    def register(value: torch.Tensor) -> torch.Tensor:
        value.register_hook(change)
        return value

    model = plain(built(name))
    x = torch.from_numpy(values.copy()).requires_grad_()
    kept: dict[str, torch.Tensor] = {}

    def watch(path: str) -> None:
        calls = []

        def before(_: Any, args: Any) -> Any:
            calls.append(1)
            key = f"{path}@{len(calls) - 1}/in"
            value = args[0].view_as(args[0])
            if place == key:
                register(value)
            if key in at:
                value.register_hook(lambda g: kept.update({key: g}))
            return (value, *args[1:])

        def after(_: Any, __: Any, output: Any) -> None:
            key = f"{path}@{len(calls) - 1}"
            if place == key:
                register(output)
            if key in at:
                output.register_hook(lambda g: kept.update({key: g}))

        model.get_submodule(path).register_forward_pre_hook(before)
        model.get_submodule(path).register_forward_hook(after)

    for path in {p.partition("@")[0] for p in (*at, place)}:
        watch(path)
    output = model(x)
    output[:, 1].sum().backward()
    return {
        **{key: value.numpy() for key, value in kept.items()},
        "/in": x.grad.numpy() if x.grad is not None else values,
    }


@pytest.mark.parametrize(
    "place", ["second@0", "second@0/in", "first.act@3", "first.act@3/in", "first.act@0/in"]
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_modules_nearer_to_the_input_see_the_changed_gradient(
    near: trocar.Client, place: str, order: Any
) -> None:
    at = [place, "first@0", "third@0"]
    expected = hooked("blocks", ROWS, place, lambda g: g * 3 + 1, at)
    untouched = hooked("blocks", ROWS, place, lambda g: g, at)
    selector = grad_name(place if "act" in place else place.replace("@0", ""))
    edit = trocar.edit(selector, "affine", 3, 1, order=order)
    found = near.gradients(
        "blocks", ROWS, of=trocar.logit(1), at=[selector, "first", "third", "/in"], edits=edit
    )
    assert_close(found[selector], (expected if order == "before" else untouched)[place])
    assert_close(found["first"], expected["first@0"])
    assert_close(found["third"], expected["third@0"])
    assert_close(found["/in"], expected["/in"])


def test_the_gradient_of_an_edited_value_is_that_of_what_it_became(near: trocar.Client) -> None:
    for order, factor in (("before", 1.0), ("after", 3.0)):
        edit = trocar.edit("second", "scale", 3, order=order)  # type: ignore[arg-type]
        found = near.gradients(
            "blocks", ROWS, of=trocar.logit(1), at=["second", "/in"], taps=["second"], edits=edit
        )
        expected = by_hand("blocks", ROWS, ["second", "/in"], changes={"second": lambda value: value * 3})
        assert_close(found["second/grad_out"], expected["second"] * factor)
        assert_close(found["/grad_in"], expected["/in"])


def test_gradients_of_parameters_and_their_edits(near: trocar.Client) -> None:
    names = ["first.linear.weight", "head.0.bias", "head.1.weight"]
    at = ["first.linear/param(weight)", "head.0/param(bias)", "head.1/param(weight)"]
    expected = of_parameters("blocks", ROWS, names)
    found = near.gradients("blocks", ROWS, of=trocar.logit(1), at=at)
    for place, name in zip(at, names, strict=True):
        assert_close(found[place], expected[name])
    for order, factor in (("before", 2.0), ("after", 1.0)):
        edit = trocar.edit("head.0/param_grad(bias)", "scale", 2, order=order)  # type: ignore[arg-type]
        found = near.gradients("blocks", ROWS, of=trocar.logit(1), at=at, edits=edit)
        assert_close(found[at[1]], expected[names[1]] * factor)
        assert_close(found[at[0]], expected[names[0]])


def test_the_gradient_of_an_edited_parameter_is_that_of_what_it_became(near: trocar.Client) -> None:
    model = built("blocks")
    model.head[0].weight.mul_(2).requires_grad_()
    (expected,) = torch.autograd.grad(model(torch.from_numpy(ROWS))[:, 1].sum(), model.head[0].weight)
    edit = trocar.edit("head.0/param(weight)", "scale", 2)
    found = near.gradients("blocks", ROWS, of=trocar.logit(1), at="head.0/param(weight)", edits=edit)
    assert_close(found["head.0/param(weight)"], expected.numpy())


def test_tied_weights_have_one_gradient(near: trocar.Client) -> None:
    objective = trocar.value("/out", reduce="sum", function="square")
    model = built("tied")
    model.head.weight.requires_grad_()
    (expected,) = torch.autograd.grad(model(torch.from_numpy(WORDS)).square().sum(), model.head.weight)
    for at in (
        ["head/param(weight)"],
        ["embedding/param(weight)"],
        ["embedding/param(weight)", "head/param(weight)"],
    ):
        found = near.gradients("tied", WORDS, of=objective, at=at)
        for place in at:
            assert_close(found[place], expected.numpy())


RECURRENT = [
    "lstm.weight_ih_l0",
    "lstm.weight_hh_l0_reverse",
    "gru.weight_hh_l1",
    "gru.bias_hh_l0",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "encoder.self_attn.in_proj_bias",
    "encoder.linear1.weight",
    "encoder.norm2.weight",
]


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_of_parameters_that_modules_read_in_ways_of_their_own(
    near: trocar.Client, name: str
) -> None:
    rows = noise(2, 5, 6)
    model = built("recurrent")
    path, _, own = name.rpartition(".")
    parameter = getattr(model.get_submodule(path), own).requires_grad_()
    (expected,) = torch.autograd.grad(model(torch.from_numpy(rows))[..., 1].sum(), parameter)
    found = near.gradients("recurrent", rows, of=trocar.logit(1), at=f"{path}/param({own})")
    assert_close(found[f"{path}/param({own})"], expected.numpy(), 1e-5)


@pytest.mark.parametrize(
    "place",
    ["lstm[0]", "lstm/in", "gru[0]", "attention[0]", "attention/in[0]", "encoder", "encoder.linear2/in"],
)
def test_gradients_of_values_of_recurrent_layers(near: trocar.Client, place: str) -> None:
    rows = noise(2, 5, 6)
    path, _, _ = place.partition("/in")
    is_in = "/in" in place
    model = built("recurrent")
    x = torch.from_numpy(rows).requires_grad_()
    kept = []

    def before(_: Any, args: Any) -> Any:
        kept.append(args[0].view_as(args[0]))
        return (kept[-1], *args[1:])

    module = model.get_submodule(path.removesuffix("[0]"))
    if is_in:
        module.register_forward_pre_hook(before)
    else:
        module.register_forward_hook(
            lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
    (expected,) = torch.autograd.grad(model(x)[..., 1].sum(), kept[-1:]) if kept else (None,)
    if expected is None:
        out = model(x)
        (expected,) = torch.autograd.grad(out[..., 1].sum(), kept[-1])
    found = near.gradients("recurrent", rows, of=trocar.logit(1), at=place)
    name = next(iter(found))
    assert_close(found[name], expected.numpy(), 1e-5)


@pytest.mark.parametrize(
    ("at", "model_id", "values"),
    [
        ("embedding/in", "tied", WORDS),
        ("/in", "tied", WORDS),
        ("norm/param(num_batches_tracked)", "normed", noise(1, 3, 6, 6)),
        ('/out["int32"]', "dtypes", noise(6, 6)),
        ('/out["bool"]', "dtypes", noise(6, 6)),
    ],
)
def test_whole_numbers_have_no_gradient(near: trocar.Client, at: str, model_id: str, values: Array) -> None:
    objective = trocar.value("/out" if model_id != "dtypes" else '/out["float32"]')
    for call in (near.gradients,):
        with pytest.raises(trocar.errors.NotDifferentiableError):
            call(model_id, values, of=objective, at=at)


@pytest.mark.parametrize("at", ["head", "second.linear"])
def test_what_the_objective_does_not_depend_on(near: trocar.Client, at: str) -> None:
    with pytest.raises(trocar.errors.NotDifferentiableError, match=at):
        near.gradients("blocks", ROWS, of=trocar.value("first"), at=at)


def test_a_pattern_leaves_out_what_has_no_gradient(near: trocar.Client) -> None:
    found = near.gradients("blocks", ROWS, of=trocar.value("second"), at="*.linear")
    assert list(found) == ["first.linear/grad_out", "second.linear/grad_out"]
    assert found.expansions["*.linear"] == ("first.linear/grad_out", "second.linear/grad_out")


def test_an_edit_of_a_gradient_that_never_comes_is_an_error(near: trocar.Client) -> None:
    edit = trocar.edit("third/grad_out", "scale", 2)
    with pytest.raises(trocar.errors.NotDifferentiableError, match="third"):
        near.gradients("blocks", ROWS, of=trocar.value("second"), at="first", edits=edit)


@pytest.mark.parametrize("place", ["fn:relu@0", "fn:linear", "fx:conv"])
def test_functions_and_nodes_have_no_gradients(near: trocar.Client, place: str) -> None:
    with pytest.raises(
        (
            trocar.errors.NotDifferentiableError,
            trocar.errors.InvalidArgumentError,
            trocar.errors.InvalidSelectorError,
        )
    ) as caught:
        near.gradients("plain", IMAGES, of=trocar.logit(1), at=place)
    assert not isinstance(caught.value, trocar.errors.InputRejectedError)
    with pytest.raises(trocar.TrocarError) as refused:
        near.gradients(
            "plain", IMAGES, of=trocar.logit(1), at="conv", edits=trocar.edit(f"{place}/grad_out", "zero")
        )
    assert not isinstance(refused.value, trocar.errors.InputRejectedError)


def test_gradients_inside_of_structures(near: trocar.Client) -> None:
    rows = noise(2, 3)
    objective = trocar.value('/out["out"]', function="square")
    x = torch.from_numpy(rows).requires_grad_()
    first, second = x + 1, x * 2
    out = first * second / 2
    expected = dict(
        zip(
            ['both["first"]', 'both["second"]', "/in", '/out["out"]'],
            torch.autograd.grad(out.square().sum(), [first, second, x, out]),
            strict=True,
        )
    )
    at = [*expected, "split[0]", "split/in[0]", "split/in(scale)"]
    found = near.gradients("structured", rows, of=objective, at=at)
    for place, gradient in expected.items():
        assert_close(found[place], gradient.numpy())
    assert_close(found["split/in[0]"], expected['both["first"]'].numpy())
    assert_close(found["split/in(scale)"], expected['both["second"]'].numpy())


def test_the_model_s_own_inputs_by_name(near: trocar.Client) -> None:
    inputs = {"x": noise(2, 3), "scale": noise(2, 2)}
    model = built("many")
    x, scale = (torch.from_numpy(inputs[key]).requires_grad_() for key in inputs)
    expected = torch.autograd.grad(model(x=x, scale=scale).sum(), [x, scale])
    found = near.gradients("many", inputs, of=trocar.value("/out"), at=["/in(x)", "/in(scale)"])
    assert_close(found["/in(x)"], expected[0].numpy())
    assert_close(found["/in(scale)"], expected[1].numpy())


def test_a_module_that_returns_its_input(near: trocar.Client) -> None:
    rows = noise(2, 3)
    objective = trocar.value("/out", function="square")
    found = near.gradients("identity", rows, of=objective, at=["/in", "identity", "identity/in", "/out"])
    for name in found:
        assert_close(found[name], 2 * rows)


def test_calls_inside_of_calls(near: trocar.Client) -> None:
    rows = noise(2, 3)
    objective = trocar.value("/out", function="square")
    edits = trocar.edit("nested@1/grad_out", "scale", 2)
    found = near.gradients("recursive", rows, of=objective, at=["nested@*", "nested@*/in[0]"], edits=edits)
    outer = 2 * (rows + 3)
    for name, factor in (
        ("nested@0/grad_out", 1),
        ("nested@1/grad_out", 2),
        ("nested@2/grad_out", 2),
        ("nested@2/grad_in", 2),
        ("nested@0/grad_in", 2),
    ):
        assert_close(found[name], factor * outer)


def test_a_model_that_writes_to_its_input(near: trocar.Client) -> None:
    rows = noise(2, 3)
    found = near.gradients("input-overwritten", rows, of=trocar.value("/out", function="square"), at=["/in"])
    assert_close(found["/in"], 8 * rows)


@pytest.mark.parametrize(
    ("place", "expected"),
    [("ways.0", [[-1, -1, -1]] * 2), ("ways.2", [[0, 1, 0], [1, 0, 1]]), ("ways.5", [[0, 0, 0], [1, 1, 1]])],
)
def test_a_model_that_writes_after_its_modules(near: trocar.Client, place: str, expected: Any) -> None:
    found = near.gradients("overwrites", noise(2, 3), of=trocar.value("/out"), at=place)
    assert np.array_equal(found[place], np.array(expected, np.float32))


def test_a_write_that_torch_has_no_derivative_for(near: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NotDifferentiableError, match="out="):
        near.gradients("overwrites", noise(2, 3), of=trocar.value("/out"), at="/in")


STATEFUL = [
    "remembers",
    "keeps-state",
    "writes-buffer",
    "replaces-buffer",
    "keeps-last",
    "keeps-all",
    "plain-tensor",
    "makes-tensors",
]


@pytest.mark.parametrize("name", STATEFUL)
def test_models_that_keep_something_from_pass_to_pass(
    hosted: RunningServer, near: trocar.Client, name: str
) -> None:
    """Passes with and without gradients in turn; nothing that is kept has a graph."""
    rows = noise(2, *MODELS[name][1])
    for _ in range(3):
        near.extract(name, rows, "/out")
        found = near.gradients(name, rows, of=trocar.value("/out"), at=["/in"])
        assert np.isfinite(found["/in"]).all()
    module: Any = hosted.engine.deployment(name).pool.free[0].module
    tensors = [
        *module.buffers(),
        *module.parameters(),
        *(v for v in vars(module).values() if isinstance(v, torch.Tensor)),
    ]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_a_model_that_decides_on_its_data(near: trocar.Client) -> None:
    rows = np.ones((2, 3), np.float32)
    model = built("dependent")
    x = torch.from_numpy(rows).requires_grad_()
    (expected,) = torch.autograd.grad(torch.relu(model.first(x)).sum(), x)
    found = near.gradients("dependent", rows, of=trocar.value("/out"), at=["/in", "late"])
    assert_close(found["/in"], expected.numpy())
    found = near.gradients("dependent", -rows, of=trocar.value("/out"), at=["/in"])
    (expected,) = torch.autograd.grad(model.first(x).sum(), x)
    assert_close(found["/in"], expected.numpy())
    with pytest.raises(trocar.TrocarError) as caught:
        near.gradients("dependent", -rows, of=trocar.value("/out"), at=["late"])
    assert isinstance(caught.value, trocar.errors.NotDifferentiableError | trocar.errors.ModuleNotCalledError)


@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "bce_with_logits", "kl_div"])
def test_losses_are_those_of_torch(near: trocar.Client, kind: Any) -> None:
    labels: Any = {"cross_entropy": np.array([2, 0])}.get(kind, noise(2, 3, seed=9))
    losses: dict[str, Callable[..., torch.Tensor]] = {
        "cross_entropy": F.cross_entropy,
        "mse": F.mse_loss,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
        "kl_div": lambda value, target: F.kl_div(F.log_softmax(value, 1), target, reduction="batchmean"),
    }
    expected = by_hand(
        "blocks", ROWS, ["first", "/in"], lambda kept: losses[kind](kept["/out"], torch.from_numpy(labels))
    )
    found = near.gradients("blocks", ROWS, of=trocar.loss(kind, labels), at=["first", "/in"])
    for place in expected:
        assert_close(found[place], expected[place])


@pytest.mark.parametrize("kind", ["cross_entropy", "nll", "bce_with_logits"])
def test_weights_of_classes_are_those_of_torch(near: trocar.Client, kind: Any) -> None:
    weights = torch.tensor([1, 2, 0.5])
    labels: Any = noise(2, 3, seed=9) if kind == "bce_with_logits" else np.array([2, 0])
    losses: dict[str, Callable[..., torch.Tensor]] = {
        "cross_entropy": F.cross_entropy,
        "nll": F.nll_loss,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
    }
    expected = by_hand(
        "blocks", ROWS, ["first"], lambda kept: losses[kind](kept["/out"], torch.from_numpy(labels), weights)
    )
    of = trocar.loss(kind, labels, class_weights=weights.tolist())
    assert_close(near.gradients("blocks", ROWS, of=of, at=["first"])["first"], expected["first"])


@pytest.mark.parametrize("center", [0.0, 1.0])
@pytest.mark.parametrize("anchor", ["/in", "first"])
def test_a_gradient_penalty_with_an_edited_pass(near: trocar.Client, center: float, anchor: str) -> None:
    model = plain(built("blocks")).requires_grad_(False)
    x = torch.from_numpy(ROWS).requires_grad_()
    weight = model.head[0].weight.requires_grad_()
    kept: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda _, __, out: kept.append(out))
    model.second.register_forward_hook(lambda _, __, out: out * 3)
    score = model(x)[:, 1].sum()
    wanted = x if anchor == "/in" else kept[0]
    (gradient,) = torch.autograd.grad(score, wanted, create_graph=True)
    number = ((torch.linalg.vector_norm(gradient, dim=1) - center) ** 2).mean()
    expected = torch.autograd.grad(number, [x, weight], allow_unused=True)
    penalty = trocar.gradient_penalty(trocar.logit(1), at=anchor, center=center)
    edits = trocar.edit("second", "scale", 3)
    found = near.gradients("blocks", ROWS, of=penalty, at=["/in", "head.0/param(weight)"], edits=edits)
    assert found.objective == pytest.approx(number.item(), rel=1e-5)
    assert expected[1] is not None
    assert_close(found["head.0/param(weight)"], expected[1].numpy(), 1e-5)
    assert expected[0] is not None
    assert_close(found["/in"], expected[0].numpy(), 1e-5)


def test_batch_norms_own_statistics(near: trocar.Client) -> None:
    """torch has no derivative for them."""
    images = noise(2, 3, 6, 6)
    found = near.gradients("normed", images, of=trocar.logit(1), at="**/param(*)")
    assert "norm/param_grad(weight)" in found
    assert "norm/param_grad(running_mean)" not in found
    with pytest.raises(trocar.errors.NotDifferentiableError):
        near.gradients("normed", images, of=trocar.logit(1), at="norm/param(running_mean)")


def test_a_residual_that_is_added_in_place(near: trocar.Client) -> None:
    images = noise(2, 3, 6, 6)
    places = ["/in", "conv", "norm", "relu@0", "relu@0/in", "down", "down/in", "relu@1/in", "relu@1"]
    model = plain(built("normed"))
    x = torch.from_numpy(images).requires_grad_()
    conv = model.conv(x)
    norm = model.norm(conv)
    norm_in = norm.view_as(norm)
    y = F.relu(norm_in)
    y_in = y.view_as(y)
    down = model.down(y_in)
    z = down + y
    z_in = z.view_as(z)
    out = F.relu(z_in)
    wanted = [x, conv, norm, y, norm_in, down, y_in, z_in, out]
    expected = torch.autograd.grad(model.fc(out.mean((2, 3)))[:, 1].sum(), wanted)
    for at in (places, *([place] for place in places)):
        found = near.gradients("normed", images, of=trocar.logit(1), at=at)
        for place in at:
            assert_close(found[grad_name(place)], expected[places.index(place)].numpy())


def test_a_skipped_module_passes_its_gradient_on(near: trocar.Client) -> None:
    model = plain(built("blocks"))
    model.second = nn.Identity()
    x = torch.from_numpy(ROWS).requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    found = near.gradients(
        "blocks",
        ROWS,
        of=trocar.logit(1),
        at=["/in", "second", "second/in", "first"],
        edits=trocar.edit("second", "skip"),
    )
    assert_close(found["/in"], expected.numpy())
    for place in ("second/in", "first"):
        assert_close(found[place], found["second"])
    with pytest.raises(trocar.errors.ModuleNotCalledError):
        near.gradients(
            "blocks", ROWS, of=trocar.logit(1), at="second.linear", edits=trocar.edit("second", "skip")
        )
    found = near.gradients(
        "blocks", ROWS, of=trocar.logit(1), at="first.act@4", edits=trocar.edit("second", "skip")
    )
    assert found["first.act@4"].shape == (2, 6)


def test_gradients_through_a_swap_from_the_same_pass(near: trocar.Client) -> None:
    model = plain(built("blocks"))
    x = torch.from_numpy(ROWS).requires_grad_()
    first = model.first(x)
    (expected,) = torch.autograd.grad(model.head(first)[:, 1].sum(), x)
    found = near.gradients(
        "blocks",
        ROWS,
        of=trocar.logit(1),
        at=["/in", "second"],
        edits=trocar.edit("third", "swap", at="first"),
    )
    assert_close(found["/in"], expected.numpy())
    assert not found["second"].any()


def test_a_running_mean_has_no_gradient_and_the_inputs_are_not_blamed(near: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NotDifferentiableError, match="running_mean"):
        near.gradients("normed", noise(2, 3, 6, 6), of=trocar.logit(1), at="norm/param(running_mean)")
