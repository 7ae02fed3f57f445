"""Edits where hooks are easy to get wrong, against plain torch hooks on a rebuilt model."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models import odd_models, surgical_models, tiny_models
from tests.support.oracles.by_hand import run
from tests.support.oracles.oracle import Array, noise, rebuilt_by_name
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (tiny_models.Plain, (3, 8, 8)),
    "structured": (tiny_models.Structured, (3,)),
    "dependent": (tiny_models.DataDependent, (3,)),
    "moody": (odd_models.Moody, (3,)),
    "tokens": (odd_models.TokenModel, (3,)),
    "dtypes": (odd_models.Dtypes, (6,)),
    "layers": (odd_models.TorchLayers, (4, 6)),
    "odd-keys": (odd_models.OddKeys, (3,)),
    "slotted": (odd_models.Slotted, (3,)),
    "recursive": (odd_models.Recursive, (3,)),
    "half": (tiny_models.Half, (7,)),
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
    return rebuilt_by_name(name) if name == "resnet18" else rebuilt(MODELS[name][0])


def by_hand(name: str, values: Any, changes: Any, keep: Any = ()) -> dict[str, Array]:
    with torch.inference_mode():
        found = run(built(name), [torch.from_numpy(values.copy())], changes, keep)
    return {key: value.numpy() for key, value in found.items()}


def assert_same(found: trocar.FeatureMaps, expected: dict[str, Array], *, atol: float = 0) -> None:
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=atol, err_msg=name)


def halved(value: Any) -> Any:
    return value * 0.5


def raised(value: Any) -> Any:
    return value + 1


@pytest.mark.parametrize(
    "place", ["bn1", "relu", "relu/in", "layer1.0.bn1", "layer1.0.relu@1", "layer1.0.relu@0/in"]
)
def test_edits_beside_modules_that_work_in_place(near: trocar.Client, place: str) -> None:
    images = noise(2, 3, 32, 32)
    expected = by_hand(
        "resnet18", images, {place: raised}, ["bn1", "relu", "layer1.0.bn1", "layer1.0.relu@1"]
    )
    found = near.extract(
        "resnet18",
        images,
        ["bn1", "relu", "layer1.0.bn1", "layer1.0.relu@1", "/out"],
        edits=trocar.edit(place, "add", 1),
    )
    assert_same(found, expected)


@pytest.mark.parametrize("calls", [[0], [1], [5], [0, 1, 2, 3, 4, 5]])
def test_edits_of_one_call_of_several(near: trocar.Client, calls: list[int]) -> None:
    expected = by_hand(
        "blocks",
        ROWS,
        {f"first.act@{call}": halved for call in calls},
        [f"first.act@{call}" for call in range(6)],
    )
    where = "first.act@*" if len(calls) > 1 else f"first.act@{calls[0]}"
    found = near.extract("blocks", ROWS, ["first.act@*", "/out"], edits=trocar.edit(where, "scale", 0.5))
    assert_same(found, expected)


def test_a_container_and_its_last_child_are_edited_one_after_the_other(near: trocar.Client) -> None:
    expected = by_hand("blocks", ROWS, {"head.1": raised, "head": halved}, ["head.1", "head"])
    edits = [trocar.edit("head", "scale", 0.5), trocar.edit("head.1", "add", 1)]
    found = near.extract("blocks", ROWS, ["head.1", "head", "/out"], edits=edits)
    assert_same(found, expected)


def test_edits_of_one_value_run_in_the_order_of_the_list(near: trocar.Client) -> None:
    edits = [
        trocar.edit("first", "add", 1),
        trocar.edit("first", "scale", 0.5),
        trocar.edit("first", "clamp", low=0.4),
    ]
    expected = by_hand("blocks", ROWS, {"first": lambda value: ((value + 1) * 0.5).clamp(min=0.4)}, ["first"])
    assert_same(near.extract("blocks", ROWS, ["first", "/out"], edits=edits), expected)
    expected = by_hand("blocks", ROWS, {"first": lambda value: value.clamp(min=0.4) * 0.5 + 1}, ["first"])
    assert_same(near.extract("blocks", ROWS, ["first", "/out"], edits=edits[::-1]), expected)


@pytest.mark.parametrize("place", ["second", "second/in", "second.linear", "first.act@3/in"])
def test_taps_see_the_original_of_an_edit_after_them(near: trocar.Client, place: str) -> None:
    changed = by_hand("blocks", ROWS, {place: raised})
    original = by_hand("blocks", ROWS, {}, [place])
    edit = trocar.edit(place, "add", 1, order="after")
    found = near.extract("blocks", ROWS, [place, "/out"], edits=edit)
    assert_same(found, {place: original[place], "/out": changed["/out"]})


def test_edits_before_and_after_taps_at_one_value(near: trocar.Client) -> None:
    edits = [
        trocar.edit("second", "scale", 0.5, order="after"),
        trocar.edit("second", "add", 1),
    ]
    expected = by_hand("blocks", ROWS, {"second": lambda value: (value + 1) * 0.5})
    seen = by_hand("blocks", ROWS, {"second": raised}, ["second"])
    found = near.extract("blocks", ROWS, ["second", "/out"], edits=edits)
    assert_same(found, {"second": seen["second"], "/out": expected["/out"]})


def test_taps_see_the_original_of_a_parameter_that_is_edited_after_them(near: trocar.Client) -> None:
    weight = built("blocks").head[0].weight.detach().numpy()
    model = built("blocks")
    model.head[0].weight.data *= 2
    name = "head.0/param(weight)"
    for order, shown in (("before", weight * 2), ("after", weight)):
        found = near.extract("blocks", ROWS, [name, "/out"], edits=trocar.edit(name, "scale", 2, order=order))  # type: ignore[arg-type]
        with torch.inference_mode():
            assert_same(found, {name: shown, "/out": model(torch.from_numpy(ROWS)).numpy()})


def test_the_calls_of_what_is_skipped_are_left_out_of_the_count(near: trocar.Client) -> None:
    """`first.act` is called twice in each block; without the second block `@4` is its third call."""
    expected = run_without_second({"first.act@2": halved})
    edits = [trocar.edit("second", "skip"), trocar.edit("first.act@4", "scale", 0.5)]
    found = near.extract("blocks", ROWS, ["first.act@4", "first.act@5", "second", "/out"], edits=edits)
    assert np.array_equal(found["/out"], expected["/out"])
    assert np.array_equal(found["first.act@4"], expected["first.act@2"])
    assert np.array_equal(found["first.act@5"], expected["first.act@3"])
    assert np.array_equal(found["second"], expected["first.act@1"])
    with pytest.raises(trocar.errors.ModuleNotCalledError, match="inside 'second'"):
        near.extract("blocks", ROWS, ["first.act@2"], edits=edits[:1])


def run_without_second(changes: Any) -> dict[str, Array]:
    model = built("blocks")
    model.second = torch.nn.Identity()
    with torch.inference_mode():
        found = run(model, [torch.from_numpy(ROWS)], changes, [f"first.act@{call}" for call in range(4)])
    return {key: value.numpy() for key, value in found.items()}


def test_a_pattern_leaves_out_what_is_inside_of_what_is_skipped(near: trocar.Client) -> None:
    edits = [trocar.edit("second", "skip"), trocar.edit("*.linear", "scale", 0.5)]
    expected = run_without_second({"first.linear": halved, "third.linear": halved})
    found = near.extract("blocks", ROWS, ["/out"], edits=edits)
    assert np.array_equal(found["/out"], expected["/out"])
    assert found.edit_expansions["*.linear"] == ("first.linear", "third.linear")


def test_edits_at_both_ends_of_what_is_skipped(near: trocar.Client) -> None:
    edits = [
        trocar.edit("second", "skip"),
        trocar.edit("second", "scale", 0.5),
        trocar.edit("second/in", "add", 1),
    ]
    expected = by_hand(
        "blocks", ROWS, {"second/in": raised, "second": lambda _, given: given * 0.5}, ["second"]
    )
    assert_same(near.extract("blocks", ROWS, ["second", "/out"], edits=edits), expected)


@pytest.mark.parametrize(
    ("model_id", "values", "place"),
    [
        ("structured", noise(2, 3), "both"),
        ("structured", noise(2, 3), "split[0]"),
        ("structured", noise(2, 3), "/out"),
        ("recurrent", noise(2, 5, 6), "gru"),
        ("odd-keys", noise(2, 3), "negative"),
        ("structured", noise(2, 3), "split/in"),
    ],
)
def test_only_modules_with_one_tensor_out_are_skipped(
    near: trocar.Client, model_id: str, values: Array, place: str
) -> None:
    with pytest.raises(trocar.errors.EditNotPossibleError, match="skip"):
        near.extract(model_id, values, ["/out"], edits=trocar.edit(place, "skip"))


def test_a_module_that_changes_the_dtype_is_not_skipped(near: trocar.Client) -> None:
    with pytest.raises(trocar.errors.EditDtypeRejectedError):
        near.extract("half", noise(7, 7), ["/out"], edits=trocar.edit("/out", "skip"))


def test_an_edit_of_a_tied_parameter_is_seen_at_both_places(near: trocar.Client) -> None:
    model = built("tied")
    with torch.inference_mode():
        weight = model.embedding.weight * 2
        expected = torch.func.functional_call(model, {"embedding.weight": weight}, (torch.from_numpy(WORDS),))
    for place in ("embedding/param(weight)", "head/param(weight)"):
        found = near.extract(
            "tied", WORDS, ["/out", "head/param(weight)"], edits=trocar.edit(place, "scale", 2)
        )
        assert np.array_equal(found["/out"], expected.numpy())
        assert np.array_equal(found["head/param(weight)"], weight.numpy())


@pytest.mark.parametrize(
    "name",
    [
        "lstm/param(weight_ih_l0)",
        "lstm/param(weight_hh_l0_reverse)",
        "lstm/param(bias_ih_l0)",
        "gru/param(weight_hh_l1)",
        "gru/param(bias_hh_l0)",
        "attention/param(in_proj_weight)",
        "attention/param(in_proj_bias)",
        "attention.out_proj/param(weight)",
        "encoder.self_attn/param(in_proj_weight)",
        "encoder.self_attn.out_proj/param(bias)",
        "encoder.linear1/param(weight)",
        "encoder.norm2/param(weight)",
    ],
)
def test_parameters_that_modules_read_in_ways_of_their_own(near: trocar.Client, name: str) -> None:
    rows = noise(2, 5, 6)
    before = near.extract("recurrent", rows, "/out")["/out"]
    model = built("recurrent")
    path, _, parameter = name.removesuffix(")").partition("/param(")
    with torch.no_grad():
        own = getattr(model.get_submodule(path), parameter)
        own.add_(torch.randn(own.shape, generator=torch.Generator().manual_seed(1)))
    with torch.inference_mode():
        expected = model(torch.from_numpy(rows)).numpy()
    found = near.extract("recurrent", rows, ["/out", "head"], edits=trocar.edit(name, "noise", 1, seed=1))[
        "/out"
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert np.abs(found - before).max() > 1e-4
    assert np.array_equal(near.extract("recurrent", rows, "/out")["/out"], before)


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_edits_of_batch_norms_own(near: trocar.Client, name: str) -> None:
    images = noise(2, 3, 6, 6)
    model = built("normed")
    with torch.inference_mode():
        getattr(model.norm, name).mul_(1.5)
        expected = model(torch.from_numpy(images)).numpy()
    edit = trocar.edit(f"norm/param({name})", "scale", 1.5)
    assert np.array_equal(near.extract("normed", images, "/out", edits=edit)["/out"], expected)


def test_an_edit_of_a_whole_number_buffer_takes_whole_numbers(near: trocar.Client) -> None:
    name = "norm/param(num_batches_tracked)"
    found = near.extract("normed", noise(1, 3, 6, 6), [name, "/out"], edits=trocar.edit(name, "set", 3))
    assert found[name] == 3
    with pytest.raises(trocar.errors.EditDtypeRejectedError):
        near.extract("normed", noise(1, 3, 6, 6), name, edits=trocar.edit(name, "set", 3.5))


def test_a_swap_from_earlier_in_the_same_pass(near: trocar.Client) -> None:
    model = built("blocks")
    seen: dict[str, Any] = {}
    model.first.register_forward_hook(lambda _, __, output: seen.update(first=output.clone()))
    model.third.register_forward_hook(lambda _, __, output: seen["first"])
    with torch.inference_mode():
        expected = model(torch.from_numpy(ROWS)).numpy()
    found = near.extract("blocks", ROWS, ["/out", "third"], edits=trocar.edit("third", "swap", at="first"))
    assert np.array_equal(found["/out"], expected)
    assert np.array_equal(found["third"], seen["first"].numpy())


def test_a_swap_takes_the_edited_value(near: trocar.Client) -> None:
    edits = [trocar.edit("third", "swap", at="first"), trocar.edit("first", "scale", 2)]
    found = near.extract("blocks", ROWS, ["third", "first"], edits=edits)
    assert np.array_equal(found["third"], found["first"])


@pytest.mark.parametrize(
    ("at", "place"), [("third", "first"), ("first", "first"), ("second.linear/in", "first")]
)
def test_a_swap_from_later_is_refused(near: trocar.Client, at: str, place: str) -> None:
    with pytest.raises(trocar.errors.EditNotPossibleError, match=r"later|itself"):
        near.extract("blocks", ROWS, "/out", edits=trocar.edit(place, "swap", at=at))


def test_a_source_of_one_sample_goes_to_all(near: trocar.Client) -> None:
    clean = noise(1, 6, seed=5)
    expected = by_hand("blocks", clean, {}, ["second"])
    edit = trocar.edit("second", "swap", source="clean", samples=[1])
    found = near.extract("blocks", ROWS, ["second", "/out"], edits=edit, sources={"clean": clean})
    plain = by_hand("blocks", ROWS, {}, ["second"])
    np.testing.assert_allclose(found["second"][1], expected["second"][0], atol=1e-6)
    assert np.array_equal(found["second"][0], plain["second"][0])
    whole = trocar.edit("second", "swap", source="clean")
    every = near.extract("blocks", ROWS, ["second"], edits=whole, sources={"clean": clean})["second"]
    assert np.array_equal(every[0], every[1])
    with pytest.raises(trocar.errors.EditShapeMismatchError):
        near.extract("blocks", ROWS, ["second"], edits=whole, sources={"clean": noise(3, 6)})


def test_swaps_from_several_sources_and_places(near: trocar.Client) -> None:
    one, other = noise(2, 6, seed=5), noise(2, 6, seed=6)
    ones, others = (by_hand("blocks", values, {}, ["first", "second"]) for values in (one, other))
    edits = [
        trocar.edit("second", "swap", source="one", at="first", index=np.s_[:, :3]),
        trocar.edit("second", "swap", source="other", index=np.s_[:, 3:]),
    ]
    found = near.extract("blocks", ROWS, ["second"], edits=edits, sources={"one": one, "other": other})[
        "second"
    ]
    assert np.array_equal(found, np.concatenate([ones["first"][:, :3], others["second"][:, 3:]], 1))


def test_a_swap_of_another_dtype_is_refused_before_anything_runs(near: trocar.Client) -> None:
    rows = noise(6, 6)
    edit = trocar.edit('/out["int32"]', "swap", source="a", at='/out["float32"]')
    for call in (near.plan, near.extract):
        with pytest.raises(trocar.errors.EditDtypeRejectedError):
            call("dtypes", rows, '/out["int32"]', edits=edit, sources={"a": rows})


def test_edits_and_a_start_in_the_middle(near: trocar.Client) -> None:
    value = near.extract("blocks", ROWS, "first")["first"]
    edits = trocar.edit("third", "scale", 0.5)
    full = near.extract("blocks", ROWS, ["/out", "second"], edits=edits)
    found = near.extract("blocks", value, ["/out", "second"], edits=edits, start_at="first")
    assert_same(found, dict(full))
    with pytest.raises(trocar.errors.StartNotPossibleError):
        near.extract(
            "blocks", value, "/out", edits=trocar.edit("first.linear", "scale", 0.5), start_at="first"
        )


@pytest.mark.parametrize(
    "place", ["first", "third/in", "second.linear/param(weight)", "first.linear/param(weight)"]
)
def test_edits_at_and_after_a_start(near: trocar.Client, place: str) -> None:
    value = near.extract("blocks", ROWS, "first")["first"]
    edits = trocar.edit(place, "scale", 0.5)
    full = near.extract("blocks", ROWS, "/out", edits=[edits])
    if place.startswith("first.linear"):  # which the pass has left behind
        with pytest.raises(trocar.errors.StartNotPossibleError, match="runs only before it"):
            near.extract("blocks", value, "/out", edits=edits, start_at="first")
        return
    assert_same(near.extract("blocks", value, "/out", edits=edits, start_at="first"), dict(full))


def test_a_skip_after_a_start(near: trocar.Client) -> None:
    value = near.extract("blocks", ROWS, "first")["first"]
    edits = [trocar.edit("second", "skip"), trocar.edit("first.act@4", "scale", 0.5)]
    full = near.extract("blocks", ROWS, ["/out", "first.act@4"], edits=edits)
    assert_same(
        near.extract("blocks", value, ["/out", "first.act@4"], edits=edits, start_at="first"), dict(full)
    )


def test_edits_of_a_stream_are_those_of_calls(near: trocar.Client) -> None:
    edits = [trocar.edit("first", "noise", 0.5, seed=3), trocar.edit("head.0/param(weight)", "scale", 2)]
    batches = [noise(size, 6, seed=size) for size in (1, 2, 3, 2)]
    expected = [near.extract("blocks", batch, ["first", "/out"], edits=edits) for batch in batches]
    with near.extract_stream("blocks", batches, ["first", "/out"], edits=edits) as stream:
        for result, maps in zip(stream, expected, strict=True):
            assert_same(result.unwrap(), dict(maps))


def test_an_edit_of_what_the_data_does_not_reach_is_an_error(near: trocar.Client) -> None:
    """`late` runs for positive sums only; an edit there is never passed over in silence."""
    edit = trocar.edit("late", "scale", 0.5)
    rows = np.ones((2, 3), np.float32)
    model = built("dependent")
    with torch.inference_mode():
        expected = model(torch.from_numpy(rows)) * 0.5
    assert np.array_equal(near.extract("dependent", rows, "/out", edits=edit)["/out"], expected.numpy())
    with pytest.raises(trocar.errors.ModuleNotCalledError, match="late"):
        near.extract("dependent", -rows, "/out", edits=edit)


def test_a_source_whose_data_does_not_reach_the_place_is_an_error(near: trocar.Client) -> None:
    edit = trocar.edit("first", "swap", source="other", at="late")
    rows = np.ones((2, 3), np.float32)
    with torch.inference_mode():
        value = built("dependent")(torch.from_numpy(rows))  # that of `late`
    found = near.extract("dependent", rows, "first", edits=edit, sources={"other": rows})["first"]
    assert np.array_equal(found, value.numpy())
    with pytest.raises(trocar.errors.ModuleNotCalledError, match="source 'other': module 'late'"):
        near.extract("dependent", rows, "first", edits=edit, sources={"other": -rows})


def test_an_edit_of_an_element_that_the_data_leaves_out_is_an_error(near: trocar.Client) -> None:
    edit = trocar.edit("split/in(other)", "scale", 0.5)
    rows = np.ones((2, 3), np.float32)
    assert np.array_equal(
        near.extract("moody", rows, '/out["always"]', edits=edit)['/out["always"]'], rows * 1.5
    )
    with pytest.raises((trocar.errors.ModuleNotCalledError, trocar.errors.UnknownPickError), match="other"):
        near.extract("moody", -rows, '/out["always"]', edits=edit)


def test_a_detector_decides_on_its_edited_data(serve: Serve) -> None:
    """What is found behind an edit is what a detector finds that computes so by itself."""
    name = "ssdlite320_mobilenet_v3_large"
    running = serve(models={name: {"weights": "random:0", "input_shape": (3, 96, 96)}})
    images = noise(2, 3, 96, 96)
    model = rebuilt_by_name(name)
    drawn = torch.Generator().manual_seed(4)
    model.head.classification_head.register_forward_hook(
        lambda _, __, output: output + torch.randn(output.shape, generator=drawn) * 3
    )
    with torch.inference_mode():
        expected = model(list(torch.from_numpy(images)))
    with trocar.connect(running.address, timeout_s=120) as client:
        plain = client.extract(name, images, "/out")
        found = client.extract(
            name, images, "/out", edits=trocar.edit("head.classification_head", "noise", 3, seed=4)
        )
    for index, of_image in enumerate(expected):
        for key, values in of_image.items():
            assert np.array_equal(found[f'/out[{index}]["{key}"]'], values.numpy())
    assert not np.array_equal(found['/out[0]["scores"]'], plain['/out[0]["scores"]'])


def test_values_inside_of_structures(near: trocar.Client) -> None:
    rows = noise(2, 3)
    pair = (rows + 1, rows * 2)
    cases: dict[str, tuple[Array, Array]] = {
        'both["first"]': ((pair[0] * 3) * pair[1] / 2, pair[1]),
        'both["second"]': (pair[0] * (pair[1] * 3) / 2, pair[1] * 3),
        "split[0]": (pair[0] * pair[1] * 3 / 2, pair[1]),
        "split/in[0]": (pair[0] * 3 * pair[1] / 2, pair[1]),
        "split/in(scale)": (pair[0] * (pair[1] * 3) / 2, pair[1]),
        '/out["aux"]': (pair[0] * pair[1] / 2, pair[1] * 3),
        "/in": ((rows * 3 + 1) * (rows * 3 * 2) / 2, rows * 3 * 2),
    }
    for place, (out, aux) in cases.items():
        found = near.extract("structured", rows, ["/out"], edits=trocar.edit(place, "scale", 3))
        np.testing.assert_allclose(found['/out["out"]'], out, rtol=1e-6, err_msg=place)
        np.testing.assert_allclose(found['/out["aux"]'], aux, rtol=1e-6, err_msg=place)


def test_keyword_arguments_of_the_model_itself(near: trocar.Client) -> None:
    rows, bias = noise(2, 3), noise(2, 3, seed=1)
    inputs = {"x": rows, "bias": bias}
    found = near.extract("structured", inputs, ['/out["out"]'], edits=trocar.edit("/in(bias)", "zero"))
    plain = near.extract("structured", rows, ['/out["out"]'])
    assert np.array_equal(found['/out["out"]'], plain['/out["out"]'])


@pytest.mark.parametrize(
    "name", ["uint8", "int8", "int32", "int64", "bool", "float16", "float64", "bfloat16", "complex64"]
)
def test_values_of_every_dtype_are_set(near: trocar.Client, name: str) -> None:
    place = f'/out["{name}"]'
    plain = near.extract("dtypes", noise(6, 6), place)[place]
    found = near.extract("dtypes", noise(6, 6), place, edits=trocar.edit(place, "set", 1, index=np.s_[0]))[
        place
    ]
    assert found.dtype == plain.dtype
    assert (found[0] == 1).all()
    assert np.array_equal(found[1:], plain[1:])


@pytest.mark.parametrize(
    "name", ["strided", "transposed", "expanded", "negated", "conjugated", "scalar", "empty"]
)
def test_values_of_any_layout_are_edited(near: trocar.Client, name: str) -> None:
    place = f'/out["{name}"]'
    plain = near.extract("dtypes", noise(6, 6), place)[place]
    found = near.extract("dtypes", noise(6, 6), place, edits=trocar.edit(place, "scale", 2))[place]
    assert np.array_equal(found, plain * 2)


def test_edits_inside_of_calls_of_itself(near: trocar.Client) -> None:
    """Three calls, each inside the other: x + 3; the middle one's output and the inner one's input change."""
    rows = noise(2, 3)
    edits = [trocar.edit("nested@1", "scale", 2), trocar.edit("nested@2/in[0]", "add", 1)]
    found = near.extract("recursive", rows, "/out", edits=edits)["/out"]
    np.testing.assert_allclose(found, (rows + 1 + 2) * 2 + 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("place", "operation"),
    [
        *(("fx:conv", operation) for operation in ("scale", "skip", "add_input", "swap")),
        *(("fn:relu@0", operation) for operation in ("skip", "add_input", "swap")),
    ],
)
def test_edits_that_nodes_and_functions_do_not_have(near: trocar.Client, place: str, operation: Any) -> None:
    choices: dict[str, dict[str, Any]] = {"scale": {"factor": 2.0}, "swap": {"at": "conv"}}
    options = choices.get(operation, {})
    with pytest.raises(trocar.errors.EditNotPossibleError):
        near.extract("plain", IMAGES, "fc", edits=trocar.edit(place, operation, **options))


def test_a_module_that_never_runs_is_not_edited(near: trocar.Client) -> None:
    with pytest.raises(trocar.errors.ModuleNotCalledError):
        near.extract("plain", IMAGES, "fc", edits=trocar.edit("unused", "scale", 2))
    with pytest.raises(trocar.errors.EditNotReachedError, match="no operation of the pass reads it"):
        near.extract("plain", IMAGES, "fc", edits=trocar.edit("unused/param(weight)", "scale", 2))


def test_parametrised_weights_are_computed_from_what_is_edited(near: trocar.Client) -> None:
    rows = noise(2, 4, 6)
    model = copy.deepcopy(built("layers"))
    original = model.parametrized.parametrizations.weight.original0
    with torch.inference_mode():
        expected = torch.func.functional_call(
            model, {"parametrized.parametrizations.weight.original0": original * 2}, (torch.from_numpy(rows),)
        )
    edit = trocar.edit("parametrized.parametrizations.weight/param(original0)", "scale", 2)
    found = near.extract("layers", rows, ['/out["values"]'], edits=edit)['/out["values"]']
    np.testing.assert_allclose(found, expected["values"].numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("op", ["set", "scale"])
def test_minus_zero_is_another_number_than_zero(near: trocar.Client, op: Any) -> None:
    for zero in (0.0, -0.0):
        found = near.extract("plain", np.abs(IMAGES), ["/in"], edits=[trocar.edit("/in", op, zero)])
        assert np.array_equal(np.signbit(found["/in"]), np.full(IMAGES.shape, np.signbit(zero)))
