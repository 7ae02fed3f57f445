"""Models with rare habits, through a real server: the right values or a clear error."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models import odd_models
from tests.support.oracles.oracle import Array, hooked_outputs, noise, same_bits
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = noise(2, 3) - 0.5
MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "recursive": (odd_models.Recursive, (3,)),
    "catches": (odd_models.CatchesErrors, (3,)),
    "keys": (odd_models.OddKeys, (3,)),
    "slotted": (odd_models.Slotted, (3,)),
    "nothing": (odd_models.Nothing, (3,)),
    "overwrites": (odd_models.Overwrites, (3,)),
    "numpy": (odd_models.WritesThroughNumpy, (3,)),
    "in-place": (odd_models.InPlaceOnInput, (3,)),
    "dtypes": (odd_models.Dtypes, (6,)),
    "unsendable": (odd_models.Unsendable, (3,)),
    "negative": (odd_models.OnlyNegative, (3,)),
    "names": (odd_models.OddNames, (3,)),
    "shared": (odd_models.Shared, (3,)),
    "transformer": (odd_models.Transformer, (5, 16)),
    "layers": (odd_models.TorchLayers, (4, 6)),
    "grows": (odd_models.Grows, (3,)),
    "moody": (odd_models.Moody, (3,)),
}


@pytest.fixture(scope="module")
def odd() -> Iterator[trocar.Client]:
    models: dict[str, Any] = {name: custom(kind, shape) for name, (kind, shape) in MODELS.items()}
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def test_calls_inside_a_call_of_the_same_module_have_the_values_that_modules_announces(
    odd: trocar.Client,
) -> None:
    maps = odd.extract("recursive", ROWS, taps=["nested@*", "nested@0/in[0]"])
    assert np.allclose(maps["nested@2"], ROWS + 1)
    assert np.allclose(maps["nested@0"], ROWS + 3)
    assert np.array_equal(maps["nested@0/in[0]"], ROWS)


def test_a_call_that_raised_does_not_shift_the_ones_after_it(odd: trocar.Client) -> None:
    maps = odd.extract("catches", ROWS, taps=["step@1", "step@2"])
    assert np.allclose(maps["step@1"], (ROWS + 1) * 2)
    assert np.allclose(maps["step@2"], (ROWS + 1) * 4)


def test_a_call_that_raised_has_no_value(odd: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NotATensorError):
        odd.extract("catches", ROWS, taps="step@0")


@pytest.mark.parametrize("module", ["negative", "truth", "lookalikes", "quoted"])
def test_every_element_of_a_dict_has_its_own_value_whatever_its_key(odd: trocar.Client, module: str) -> None:
    offsets = getattr(odd_models.OddKeys(), module).offsets
    maps = odd.extract("keys", ROWS, taps=[module, "/out"])
    found = [maps[name] for name in maps.expansions[module]]
    assert [
        np.allclose(value, ROWS + offset) for value, offset in zip(found, offsets.values(), strict=True)
    ] == [True] * len(offsets)


def test_a_dataclass_with_slots_is_a_dataclass(odd: trocar.Client) -> None:
    maps = odd.extract("slotted", ROWS, taps="/out")
    assert list(maps) == ['/out["first"]', '/out["second"]']


def test_an_object_that_refers_to_itself_can_be_hosted(serve: Any) -> None:
    running = serve(models={"m": custom(odd_models.Cyclic)})
    with trocar.connect(running.address) as client:
        assert np.array_equal(client.extract("m", ROWS, taps='/out["value"]')['/out["value"]'], ROWS + 1)


@pytest.mark.parametrize("selector", ["tuple", "dict", "none"])
def test_a_module_that_returns_nothing_is_no_tensor(odd: trocar.Client, selector: str) -> None:
    with pytest.raises(trocar.errors.NotATensorError):
        odd.extract("nothing", ROWS, taps=selector)


@pytest.mark.parametrize("index", range(6))
def test_a_value_that_is_written_to_later_comes_as_it_was(odd: trocar.Client, index: int) -> None:
    maps = odd.extract("overwrites", ROWS, taps=[f"ways.{index}", "/out"])
    assert np.array_equal(maps[f"ways.{index}"], ROWS + 1)


def test_a_value_that_is_written_to_outside_of_torch_comes_as_it_was(odd: trocar.Client) -> None:
    maps = odd.extract("numpy", ROWS, taps=["value", "/out"])
    assert np.array_equal(maps["value"], ROWS + 1)
    assert not maps["/out"].any()


def test_an_input_that_the_model_overwrites_comes_as_it_was_sent(odd: trocar.Client) -> None:
    mine = ROWS.copy()
    maps = odd.extract("in-place", mine, taps=["/in", "identity/in", "identity", "/out"])
    assert [np.array_equal(maps[name], ROWS) for name in ("/in", "identity/in", "identity")] == [True] * 3
    assert np.array_equal(maps["/out"], ROWS * 2)
    assert np.array_equal(mine, ROWS)


def test_every_dtype_and_layout_comes_as_it_is(odd: trocar.Client) -> None:
    inputs: Array = noise(2, 6) * 4 - 1
    expected = rebuilt(odd_models.Dtypes)(torch.from_numpy(inputs))
    maps = odd.extract("dtypes", inputs, taps="/out")
    wrong = [
        key
        for key, value in expected.items()
        if not same_bits(
            maps[f'/out["{key}"]'], value.float() if key == "bfloat16" else value.resolve_conj().resolve_neg()
        )
    ]
    assert wrong == []


def test_floats_of_8_bits_are_sent_as_float16(odd: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NotATensorError, match='cast="float16"'):
        odd.extract("unsendable", ROWS, taps="float8")
    maps = odd.extract("unsendable", ROWS, taps=trocar.tap("float8", cast="float16"))
    expected = torch.from_numpy(ROWS).to(torch.float8_e4m3fn).to(torch.float16).numpy()
    np.testing.assert_array_equal(maps["float8"], expected)


@pytest.mark.parametrize("selector", ["uint16", "float8"])
def test_a_dtype_that_the_wire_has_not_is_refused_by_the_server(odd: trocar.Client, selector: str) -> None:
    """Not by a client that cannot make sense of the reply."""
    with pytest.raises(trocar.errors.NotATensorError):
        odd.extract("unsendable", ROWS, taps=selector)


def test_statistics_of_a_dtype_that_the_wire_has_not_can_be_had(odd: trocar.Client) -> None:
    maps = odd.extract(
        "unsendable", np.abs(ROWS) * 10, taps=trocar.tap("uint16", stats=["max"], values=False)
    )
    assert maps.stats["uint16"].max == np.floor(np.abs(ROWS) * 10).max()


def test_a_module_that_only_some_data_reaches_is_found_with_that_data(odd: trocar.Client) -> None:
    """It was recorded on other data; "the pass never calls it" would be wrong for these."""
    maps = odd.extract("negative", -np.ones((2, 3), np.float32), taps="late")
    assert np.array_equal(maps["late"], -np.ones((2, 3), np.float32))


def test_a_module_that_these_data_do_not_reach_is_not_called(odd: trocar.Client) -> None:
    with pytest.raises(trocar.errors.ModuleNotCalledError):
        odd.extract("negative", np.ones((2, 3), np.float32), taps="late")


def test_a_shape_that_depends_on_the_data_is_the_real_one(odd: trocar.Client) -> None:
    maps = odd.extract("negative", np.array([[-1, 2, -3], [4, -5, 6]], np.float32), taps="chosen")
    assert np.array_equal(maps["chosen"], [-1, -3, -5])


@pytest.mark.parametrize("selector", ['/out["sometimes"]', "split/in(other)"])
def test_a_value_that_these_data_do_not_give_is_the_selectors_fault(
    odd: trocar.Client, selector: str
) -> None:
    """And not the inputs': the model takes them, and gives less."""
    assert selector in odd.extract("moody", np.ones((2, 3), np.float32), taps=[selector, "/out"])
    with pytest.raises(trocar.errors.SelectorError, match=r"sometimes|other"):
        odd.extract("moody", -np.ones((2, 3), np.float32), taps=[selector, "/out"])


def test_modules_of_any_name_are_told_apart(odd: trocar.Client) -> None:
    maps = odd.extract("names", ROWS, taps="parts.*")
    names = odd_models.OddNames.NAMES
    assert len(maps) == len(names)
    by_path = {info.path: maps[name] for name, info in maps.info.items()}
    assert all(np.array_equal(by_path[f"parts.{name}"], ROWS + number) for number, name in enumerate(names))


@pytest.mark.parametrize("name", odd_models.OddNames.NAMES)
def test_a_name_of_a_reply_is_a_selector_for_the_same_value(odd: trocar.Client, name: str) -> None:
    whole = odd.extract("names", ROWS, taps="parts.*")
    (known,) = [found for found, info in whole.info.items() if info.path == f"parts.{name}"]
    assert np.array_equal(odd.extract("names", ROWS, taps=known)[known], whole[known])


def test_a_module_under_two_names_has_both_its_calls(odd: trocar.Client) -> None:
    maps = odd.extract("shared", ROWS, taps="first@*")
    assert np.array_equal(maps["first@0"], np.maximum(ROWS, 0))
    assert not maps["first@1"].any()


def test_torchs_own_layers_are_bit_equal_to_hooks_that_clone_at_once(odd: trocar.Client) -> None:
    inputs = noise(3, 4, 6)
    model = rebuilt(odd_models.TorchLayers)
    called = [module.path for module in odd.modules("layers") if module.call_count]
    expected = hooked_outputs(model, [inputs], called)
    maps = odd.extract("layers", inputs, taps=["**", "/out"])
    found = {(info.path, info.call_index, info.pick): maps[name] for name, info in maps.info.items()}
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not same_bits(found[key], value)] == []


def test_a_model_that_grows_in_its_first_pass_can_be_listed(odd: trocar.Client) -> None:
    assert odd.modules("grows")["late"].call_count == 1


@pytest.mark.parametrize("selector", ["head", "encoder", "encoder.layers.0", "encoder.layers.1.linear1"])
def test_torchs_own_encoder_gives_the_bits_of_a_hooked_one(odd: trocar.Client, selector: str) -> None:
    """Its fast path is off where it sees hooks: the oracle has one at the same place."""
    inputs, kept = noise(2, 5, 16), []
    model = rebuilt(odd_models.Transformer)
    model.get_submodule(selector).register_forward_hook(lambda _, args, output: kept.append(output.clone()))
    with torch.inference_mode():
        model(torch.from_numpy(inputs))
    assert same_bits(odd.extract("transformer", inputs, taps=selector)[selector], kept[0])
