"""What can be asked of `attribute` and `grad_cam`, and what is refused before anything is computed."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import trocar
from tests.support.oracles.torch_client import TorchClient, preprocessed
from tests.unit.client._attribution.conftest import NAMES, Ask, images
from trocar._attribution.attribution_inputs import baseline_array


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("salienzy", {}, ValueError, "nearest: saliency"),
        ("saliency", {"steps": 5}, TypeError, "saliency has no option 'steps'; available: abs"),
        ("input_x_gradient", {"steps": 5}, TypeError, "none is available"),
        ("integrated_gradients", {"steps": 0}, ValueError, "steps"),
        ("integrated_gradients", {"steps": 2.5}, TypeError, "steps"),
        ("integrated_gradients", {"at": "conv"}, ValueError, "is not used"),
        ("integrated_gradients", {"baseline": np.zeros(7)}, ValueError, "cannot be broadcast"),
        ("integrated_gradients", {"baseline": np.nan}, ValueError, "finite"),
        ("integrated_gradients", {"baseline": 1e39}, ValueError, "float32 inputs cannot hold"),
        ("integrated_gradients", {"batch_size": 0}, ValueError, "batch_size"),
        ("integrated_gradients", {"of": trocar.value("/out"), "delta": True}, ValueError, "delta needs"),
        ("occlusion", {"of": trocar.value("/out")}, ValueError, "occlusion needs"),
        ("occlusion", {"window": 99}, ValueError, "larger"),
        ("smoothgrad", {"over": "grad_cam"}, ValueError, "over must be one of"),
        ("smoothgrad", {"samples": 0}, ValueError, "samples"),
        ("smoothgrad", {"sigma": -1.0}, ValueError, "sigma"),
        ("smoothgrad", {"sigma": np.inf}, ValueError, "sigma"),
        ("smoothgrad", {"seed": -1}, ValueError, "seed"),
        ("smoothgrad", {"steps": 5}, TypeError, "saliency has no option"),
        ("smoothgrad", {"over": "integrated_gradients", "delta": True}, ValueError, "delta"),
        ("smoothgrad", {"over": "integrated_gradients", "at": "conv"}, ValueError, "over integrated_gr"),
        ("grad_cam", {"at": "fc"}, ValueError, "no spatial positions"),
        ("saliency", {"of": 3}, TypeError, "is not an objective"),
        ("saliency", {"of": trocar.logit([1, 2])}, ValueError, "names 2 classes for 3 samples"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(
    ask: Ask, model: nn.Module, method: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(model, "attribute", images(), method, **options)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (["the cat sat", "a dog"], TypeError, "token ids are integers; multiply each token's embedding"),
        (trocar.texts("cat.jpg"), TypeError, "token ids are integers"),
        ((images(), images()), TypeError, "one input"),
        ({"x": images()}, TypeError, "one input"),
        (7, TypeError, "int cannot be an input"),
        ([images()[0], "cat.jpg"], TypeError, "str cannot be an input"),
        (images(0), ValueError, "at least one sample"),
        (np.float32(3), ValueError, "at least one sample"),
        (np.zeros((2, 3, 8, 8), np.int64), TypeError, "floating-point"),
        (np.ma.MaskedArray(images()), TypeError, r"array\.filled\(0\)"),
        (np.zeros((2, 3, 8, 8), object), TypeError, "Python objects"),
    ],
)
def test_inputs_that_cannot_be_attributed_to_are_refused(
    model: nn.Module, inputs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TorchClient({"m": model}).attribute("m", inputs, "integrated_gradients", of=trocar.logit(1))


def test_images_are_attributed_to_as_the_model_sees_them(ask: Ask, model: nn.Module) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 10, 3), np.uint8)
    pictures = [Image.fromarray(one) for one in pixels]
    found = ask(model, "attribute", pictures, "integrated_gradients", steps=4)
    expected = ask(model, "attribute", preprocessed(pictures), "integrated_gradients", steps=4)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.inputs, preprocessed(pictures))
    assert found.classes == expected.classes
    chosen = ask(model, "grad_cam", pictures, "conv2", trocar.logit(2))
    assert (chosen.classes, chosen.class_names) == ((2, 2), ("cat", "cat"))


def test_a_list_of_arrays_is_a_batch_and_a_tensor_an_array(ask: Ask, model: nn.Module) -> None:
    x = images()
    expected = ask(model, "attribute", x, "saliency")
    for inputs in (list(x), torch.from_numpy(x)):
        np.testing.assert_array_equal(ask(model, "attribute", inputs, "saliency").values, expected.values)


def test_the_predicted_class_its_name_and_its_score_come_along(ask: Ask, model: nn.Module) -> None:
    x = images(5)
    output = model(torch.from_numpy(x)).detach().numpy()
    for method, options in (
        ("saliency", {}),
        ("integrated_gradients", {"steps": 2}),
        ("occlusion", {"window": 9}),
        ("smoothgrad", {"samples": 2}),
        ("grad_cam", {"at": "conv"}),
    ):
        found = ask(model, "attribute", x, method, **options)
        assert found.classes == tuple(output.argmax(axis=1))
        assert found.class_names == tuple(NAMES[k] for k in output.argmax(axis=1))
        assert found.scores is not None
        np.testing.assert_allclose(found.scores, output.max(axis=1), rtol=1e-6)
        assert found.objective == pytest.approx(output.max(axis=1).sum(), rel=1e-5)


def test_scores_come_with_the_one_pass_where_the_class_is_given(model: nn.Module) -> None:
    x, client = images(), TorchClient({"m": model})
    found: Any = client.attribute("m", x, "saliency", of=trocar.logit(1) + 3)
    assert client.batch_sizes == [3]
    np.testing.assert_allclose(found.scores, model(torch.from_numpy(x))[:, 1].detach(), rtol=1e-6)
    assert found.objective == pytest.approx(found.scores.sum() + 3, rel=1e-6)


def test_nan_in_an_input_stays_with_its_sample(ask: Ask, model: nn.Module) -> None:
    x = images()
    x[1, 0, 0, 0] = np.nan
    found = ask(model, "attribute", x, "integrated_gradients", of=trocar.logit(1), steps=3)
    clean = ask(model, "attribute", x[[0, 2]], "integrated_gradients", of=trocar.logit(1), steps=3)
    assert np.isnan(found.values[1]).any()
    np.testing.assert_allclose(found.values[[0, 2]], clean.values, atol=1e-7)


def test_one_sample_and_a_single_step_are_enough(ask: Ask, model: nn.Module) -> None:
    found = ask(model, "attribute", images(1), "integrated_gradients", steps=1, batch_size=1)
    assert found.values.shape == (1, 3, 12, 10)
    assert ask(model, "attribute", images(1), "layer_conductance", at="conv", steps=1).values.any()


@pytest.mark.parametrize("baseline", [torch.full((3, 1, 1), 1.5).bfloat16(), np.full((3, 1, 1), 1.5)])
def test_a_baseline_is_its_numbers_in_the_dtype_of_the_inputs(baseline: Any) -> None:
    for inputs in (images(), images().astype(np.float16)):
        found = baseline_array(baseline, inputs)
        assert found.dtype == inputs.dtype
        np.testing.assert_array_equal(found, np.full_like(inputs, 1.5))


@pytest.mark.parametrize(
    ("baseline", "dtype"), [(0.5, "int64"), (-1, "uint8"), (300, "uint8"), (1e6, "float16"), (0.5, "bool")]
)
def test_a_baseline_that_the_inputs_cannot_hold_is_refused(baseline: float, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"{dtype} inputs cannot hold"):
        baseline_array(baseline, np.zeros((1, 3), dtype))


@pytest.mark.parametrize(("baseline", "dtype"), [(2.0, "int64"), (255, "uint8"), (0.1, "float16")])
def test_a_baseline_that_fits_is_cast(baseline: float, dtype: str) -> None:
    inputs = np.zeros((1, 3), dtype)
    np.testing.assert_array_equal(baseline_array(baseline, inputs), np.full_like(inputs, baseline))
