"""Gradients, and activations beside them, equal captum's and pytorch-grad-cam's.

On models that no other test hosts. Each is one request for a hosted copy of the module that the oracle gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import captum.attr as captum
import numpy as np
import pytest
import torch
from pytorch_grad_cam import GradCAMElementWise, HiResCAM, LayerCAM
from pytorch_grad_cam.activations_and_gradients import ActivationsAndGradients
from torch import nn

import trocar
from tests.support.models.other_models import OTHER_MODELS, OtherModel, without_in_place
from tests.support.oracles.oracle import Array, noise

NAMES = ["densenet121", "convnext_tiny", "efficientnet_lite0", "swin_t"]
CLASSES = [3, 141]
OF = trocar.logit(CLASSES)


@dataclass(frozen=True)
class Pair:
    """A hosted model and the oracle's, with the same weights and inputs."""

    client: trocar.Client
    name: str
    oracle: nn.Module
    places: OtherModel
    x: Array

    @property
    def late(self) -> nn.Module:
        """The oracle's module at the later place."""
        return self.oracle.get_submodule(self.places.late)

    def leaf(self) -> torch.Tensor:
        """The input as a tensor of its own that wants a gradient."""
        return torch.from_numpy(self.x.copy()).requires_grad_()

    def gradients(self, **options: Any) -> trocar.FeatureMaps:
        return self.client.gradients(self.name, self.x, **{"of": OF, **options})


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    places = OTHER_MODELS[request.param]
    model = places.built()
    hosted = {request.param: {"module": model, "input_shape": places.shape}}
    with trocar.connect("local", models=hosted, settings={"device": "cpu"}) as client:
        x = noise(2, *places.shape)
        yield Pair(client, request.param, without_in_place(model), places, x)


def same(found: Array, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare to 1e-5 of the largest element."""
    wanted = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    assert found.shape == wanted.shape
    assert np.abs(wanted).max() > 0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * float(np.abs(wanted).max()))


def targets() -> Any:
    return torch.tensor(CLASSES)


def test_saliency(pair: Pair) -> None:
    found = pair.gradients(at="/in")
    same(np.abs(found["/in"]), captum.Saliency(pair.oracle).attribute(pair.leaf(), target=targets()))


def test_activation(pair: Pair) -> None:
    found = pair.client.extract(pair.name, pair.x, [pair.places.early, pair.places.late])
    same(found[pair.places.late], captum.LayerActivation(pair.oracle, pair.late).attribute(pair.leaf()))


@pytest.mark.parametrize("to_input", [False, True], ids=["output", "input"])
def test_gradient_times_activation(pair: Pair, to_input: bool) -> None:
    at = f"{pair.places.late}/in" if to_input else pair.places.late
    found = pair.gradients(at=trocar.tap(at, alias="gradient"), taps=trocar.tap(at, alias="value"))
    oracle: Any = captum.LayerGradientXActivation(pair.oracle, pair.late)
    expected = oracle.attribute(pair.leaf(), target=targets(), attribute_to_layer_input=to_input)
    same(found["gradient"] * found["value"], expected[0] if isinstance(expected, tuple) else expected)


def test_gradient_of_one_neuron(pair: Pair) -> None:
    """Of the neuron's value, in each sample, with respect to the input."""
    neuron = (2, 1, 3)
    objective = trocar.value(pair.places.late, index=(slice(None), *neuron))
    found = pair.client.gradients(pair.name, pair.x, of=objective)
    oracle = captum.NeuronGradient(pair.oracle, pair.late)
    same(found["/in"], oracle.attribute(pair.leaf(), neuron_selector=neuron))


def test_grad_cam_of_captum(pair: Pair) -> None:
    """Captum takes dimension 1 for the channels, wherever they are."""
    late = pair.places.late
    found = pair.gradients(at=trocar.tap(late, alias="gradient"), taps=trocar.tap(late, alias="value"))
    space = tuple(range(2, found["value"].ndim))
    weights = found["gradient"].mean(axis=space, keepdims=True)
    oracle = captum.LayerGradCam(pair.oracle, pair.late)
    expected = oracle.attribute(pair.leaf(), target=targets())
    same((weights * found["value"]).sum(axis=1, keepdims=True), expected)


@pytest.mark.parametrize("pair", ["densenet121"], indirect=True)  # the others have no `nn.ReLU`
@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU:UserWarning")
def test_guided_backpropagation(pair: Pair) -> None:
    """Captum changes what comes out of a ReLU's backward; so does an edit of the gradient at its input."""
    found = pair.gradients(at="/in", edits=[trocar.edit("**:ReLU/grad_in", "clamp", low=0)])
    plain = pair.gradients(at="/in")
    expected = captum.GuidedBackprop(pair.oracle).attribute(pair.leaf(), target=targets())
    same(found["/in"], expected)
    assert not np.allclose(found["/in"], plain["/in"])


def test_integrated_gradients_as_a_batch(pair: Pair) -> None:
    """The points of the path are one batch of one request; its gradients' mean is taken here."""
    steps = 2  # a batch as large as those of the other tests: another size would be recorded first
    points, weights = np.polynomial.legendre.leggauss(steps)
    one = pair.x[:1]
    path = np.concatenate([one * float((1 + point) / 2) for point in points]).astype(np.float32)
    found = pair.client.gradients(pair.name, path, of=trocar.logit(CLASSES[0]))
    scaled = (weights / 2).astype(np.float32)[:, None, None, None]
    oracle = captum.IntegratedGradients(pair.oracle)
    expected = oracle.attribute(torch.from_numpy(one), target=CLASSES[0], n_steps=steps)
    same((found["/in"] * scaled).sum(axis=0, keepdims=True) * one, expected.float())


# --- pytorch-grad-cam -------------------------------------------------------------------------------------


def test_values_and_gradients_of_grad_cam(pair: Pair) -> None:
    late, early = pair.places.late, pair.places.early
    found = pair.gradients(
        at=[trocar.tap(place, alias=f"{name}'") for name, place in (("early", early), ("late", late))],
        taps=[trocar.tap(place, alias=name) for name, place in (("early", early), ("late", late))],
    )
    modules = [pair.oracle.get_submodule(place) for place in (early, late)]
    kept: Any = ActivationsAndGradients(pair.oracle, modules, None)
    kept(pair.leaf())[[0, 1], CLASSES].sum().backward()
    for place, name in enumerate(("early", "late")):
        same(found[name], kept.activations[place])
        same(found[f"{name}'"], kept.gradients[place])
    kept.release()


@pytest.mark.parametrize("pair", NAMES[:3], indirect=True)  # grad-cam needs channels in dimension 1
@pytest.mark.parametrize("kind", [HiResCAM, LayerCAM, GradCAMElementWise])
def test_other_maps_of_grad_cam(pair: Pair, kind: Any) -> None:
    late = pair.places.late
    found = pair.gradients(at=trocar.tap(late, alias="gradient"), taps=trocar.tap(late, alias="value"))
    gradient, value = found["gradient"], found["value"]
    products: dict[Any, Array] = {
        HiResCAM: gradient * value,
        LayerCAM: np.maximum(gradient, 0) * value,
        GradCAMElementWise: np.maximum(gradient * value, 0),
    }
    product = products[kind]
    with kind(model=pair.oracle, target_layers=[pair.late]) as made:
        made.activations_and_grads(pair.leaf())[[0, 1], CLASSES].sum().backward()
        theirs = made.activations_and_grads
        expected = made.get_cam_image(
            pair.leaf(), pair.late, None, theirs.activations[0].numpy(), theirs.gradients[0].numpy(), False
        )
    scale = float(np.abs(product).sum(axis=1).max())  # positive and negative channels cancel out
    np.testing.assert_allclose(product.sum(axis=1), expected, rtol=1e-5, atol=1e-5 * scale)
    assert np.abs(expected).max() > 1e-3 * scale
