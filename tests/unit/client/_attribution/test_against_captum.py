"""Every method equals captum's on the same module."""

import warnings
from typing import Any

import captum.attr as captum
import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.oracles.torch_client import TorchClient
from tests.unit.client._attribution.conftest import Ask, images, predicted, same, tensor
from trocar._attribution.noise import NoisyBatches
from trocar._base.tensors import Array

BATCH_SIZES = [1, 2, 7, 64]
"""Smaller than, beside and larger than the three samples."""


def test_saliency(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "attribute", x, "saliency")
    same(found.values, captum.Saliency(model).attribute(tensor(x), target=predicted(model, x)))
    signed = ask(model, "attribute", x, "saliency", abs=False)
    expected = captum.Saliency(model).attribute(tensor(x), target=predicted(model, x), abs=False)
    same(signed.values, expected)
    assert (expected < 0).any()


def test_input_x_gradient(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "attribute", x, "input_x_gradient", of=trocar.logit(3))
    same(found.values, captum.InputXGradient(model).attribute(tensor(x), target=3))


def test_input_x_gradient_of_a_module(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "attribute", x, "input_x_gradient", at="conv2", of=trocar.logit(3))
    oracle = captum.LayerGradientXActivation(model, model.get_submodule("conv2"))
    same(found.values, oracle.attribute(tensor(x), target=3))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_integrated_gradients_with_delta(ask: Ask, model: nn.Module, batch_size: int) -> None:
    x = images()
    found = ask(model, "attribute", x, "integrated_gradients", steps=13, delta=True, batch_size=batch_size)
    values, delta = captum.IntegratedGradients(model).attribute(
        tensor(x), target=predicted(model, x), n_steps=13, return_convergence_delta=True
    )
    same(found.values, values)
    assert found.delta is not None
    np.testing.assert_allclose(found.delta, delta.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1, 3, 12, 10), (3, 12, 10), (3, 3, 12, 10)])
def test_integrated_gradients_from_a_baseline(ask: Ask, model: nn.Module, shape: tuple[int, ...]) -> None:
    x, baseline = images(), np.random.default_rng(9).standard_normal(shape).astype(np.float32)
    full = np.broadcast_to(baseline, x.shape)
    found = ask(model, "attribute", x, "integrated_gradients", baseline=baseline, of=trocar.logit([0, 4, 2]))
    oracle = captum.IntegratedGradients(model)
    same(found.values, oracle.attribute(tensor(x), tensor(full), target=torch.tensor([0, 4, 2])))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("at", ["conv", "conv2", "fc"])
def test_layer_conductance_with_delta(ask: Ask, model: nn.Module, at: str, batch_size: int) -> None:
    x = images()
    found = ask(model, "attribute", x, "layer_conductance", at=at, steps=9, delta=True, batch_size=batch_size)
    oracle = captum.LayerConductance(model, model.get_submodule(at))
    values, delta = oracle.attribute(
        tensor(x), target=predicted(model, x), n_steps=9, return_convergence_delta=True
    )
    same(found.values, values)
    assert found.delta is not None
    np.testing.assert_allclose(found.delta, delta.detach().numpy(), atol=1e-6)


def test_guided_backprop(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(model, "attribute", x, "guided_backprop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # captum says that it sets hooks
        expected = captum.GuidedBackprop(model).attribute(tensor(x), target=predicted(model, x))
    same(found.values, expected)
    plain = ask(model, "attribute", x, "saliency", abs=False)
    assert not np.allclose(found.values, plain.values)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize(
    ("window", "stride"),
    [((3, 4, 3), (3, 4, 3)), ((3, 5, 4), (1, 3, 3)), ((1, 12, 10), (1, 1, 1)), ((2, 7, 5), (2, 7, 5))],
)
def test_occlusion(
    ask: Ask, model: nn.Module, window: tuple[int, ...], stride: tuple[int, ...], batch_size: int
) -> None:
    x = images()
    options: Any = {"window": window, "stride": stride, "baseline": 0.3, "batch_size": batch_size}
    found = ask(model, "attribute", x, "occlusion", **options)
    expected = captum.Occlusion(model).attribute(
        tensor(x),
        target=predicted(model, x),
        sliding_window_shapes=window,
        strides=stride,
        baselines=0.3,
    )
    same(found.values, expected)


@pytest.mark.parametrize("over", ["saliency", "input_x_gradient", "integrated_gradients"])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_smoothgrad_is_the_mean_over_its_noisy_copies(
    ask: Ask, model: nn.Module, over: str, batch_size: int
) -> None:
    x = images()
    own: dict[str, Any] = {"steps": 5} if over == "integrated_gradients" else {}
    found = ask(
        model,
        "attribute",
        x,
        "smoothgrad",
        over=over,
        samples=4,
        sigma=0.4,
        seed=7,
        batch_size=batch_size,
        **own,
    )
    noisy = NoisyBatches(x, 4, 0.4, 7, 0, 1)
    expected = torch.stack([_captum(over, model, copy, predicted(model, x)) for copy in noisy]).mean(0)
    same(found.values, expected)


def _captum(method: str, model: nn.Module, x: Array, target: torch.Tensor) -> torch.Tensor:
    oracles: dict[str, Any] = {
        "saliency": lambda: captum.Saliency(model).attribute(tensor(x), target=target),
        "input_x_gradient": lambda: captum.InputXGradient(model).attribute(tensor(x), target=target),
        "integrated_gradients": lambda: captum.IntegratedGradients(model).attribute(
            tensor(x), target=target, n_steps=5
        ),
    }
    result: torch.Tensor = oracles[method]().detach()
    return result


def test_a_probability_is_attributed_like_a_softmax_in_the_model(ask: Ask, model: nn.Module) -> None:
    x = images()
    with_softmax = nn.Sequential(model, nn.Softmax(dim=1))
    found = ask(model, "attribute", x, "integrated_gradients", of=trocar.probability(2), delta=True)
    values, delta = captum.IntegratedGradients(with_softmax).attribute(
        tensor(x), target=2, return_convergence_delta=True
    )
    same(found.values, values)
    assert found.delta is not None
    np.testing.assert_allclose(found.delta, delta.detach().numpy(), atol=1e-6)
    assert found.scores is not None
    same(found.scores.astype(np.float32), with_softmax(torch.from_numpy(x))[:, 2])


def test_a_weighted_sum_is_attributed_term_by_term(ask: Ask, model: nn.Module) -> None:
    x = images()
    found = ask(
        model, "attribute", x, "integrated_gradients", of=trocar.logit([0, 1, 2]) - 0.5 * trocar.logit(4)
    )
    oracle = captum.IntegratedGradients(model)
    first, second = (oracle.attribute(tensor(x), target=k) for k in (torch.tensor([0, 1, 2]), 4))
    same(found.values, first - 0.5 * second)
    assert found.classes is None


def test_an_objective_over_the_batch_keeps_the_batch_whole(model: nn.Module) -> None:
    """The norm of all outputs together: its gradient for a sample depends on the others."""
    x, client = images(4), TorchClient({"m": model})
    objective: Any = trocar.value("/out", reduce="norm")
    found = client.attribute("m", x, "integrated_gradients", of=objective, batch_size=2, steps=6)
    assert set(client.batch_sizes) == {4}
    parts = []
    for alpha in oracle_points(6):
        leaf = tensor((alpha * x).astype(np.float32))
        parts.append(torch.autograd.grad(model(leaf).norm(), leaf)[0])
    weights = np.polynomial.legendre.leggauss(6)[1] / 2
    expected = sum(weight * part.numpy() for weight, part in zip(weights, parts, strict=True)) * x
    same(found.values, expected)
    assert found.scores is None


def oracle_points(steps: int) -> Any:
    return 0.5 * (1 + np.polynomial.legendre.leggauss(steps)[0])


def test_a_batch_holds_no_more_samples_than_asked_for(model: nn.Module) -> None:
    for method, options in (("integrated_gradients", {}), ("smoothgrad", {}), ("occlusion", {"window": 4})):
        client: Any = TorchClient({"m": model})
        client.attribute("m", images(3), method, of=trocar.logit(1), batch_size=8, **options)
        assert max(client.batch_sizes) <= 8
        assert len(client.batch_sizes) > 2
