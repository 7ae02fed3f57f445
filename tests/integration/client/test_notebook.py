"""Every result of the hooks notebook as one request, exact to its printed digits.

The nets are hosted from modules of this process: the same layers, from the same seeds.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models import notebook_nets as nets
from tests.support.oracles.oracle import Array, noise

INPUTS: dict[str, Array] = {}
BUILDERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "affine": nets.affine,
    "conv": nets.conv_net,
    "linear": nets.linear,
    "two-layers": nets.two_layers,
    "clipped-resnet18": nets.resnet18_in_train_mode,
}
SUM_OF_SQUARES = trocar.value("/out", function="square")
ONE_MINUS_MEAN = 1 - trocar.value("/out", reduce="mean")
ADD_ONE = trocar.edit("/in", "add", 1.0)
RESIDUAL = trocar.edit("/out", "add_input")
PLAIN_OUTPUT = "tensor([[-0.3552,  0.0191,  0.7350],\n        [-0.3277,  0.2751,  0.4299]])"
PLAIN_GRADIENT = "tensor([[ 0.1376,  0.0587, -0.1150],\n        [ 0.1376,  0.0587, -0.1150]])"
Y_GRADIENT = "tensor([-1.8891,  0.5235,  0.4592])"


@pytest.fixture(scope="module")
def hosted() -> Iterator[trocar.Client]:
    """A client of all nets of the notebook; `INPUTS` has what goes in."""
    models: dict[str, object] = {"resnet18": "random:0"}
    for model_id, build in BUILDERS.items():
        net, x = build()
        INPUTS[model_id] = x.numpy()
        models[model_id] = {"module": net, "input_shape": tuple(x.shape[1:])}
    models["pool"] = {"module": nets.PoolNet(), "input_shape": (3, 10, 10)}
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as client:
        yield client


def printed(array: Array) -> str:
    """Return what a notebook prints of a tensor."""
    return str(torch.from_numpy(array))


# --- Gradients of values on the way -----------------------------------------------------------------------


def test_the_gradient_of_an_intermediate_value(hosted: trocar.Client) -> None:
    grads = hosted.gradients("affine", INPUTS["affine"], of=SUM_OF_SQUARES, at=["/out", "/param(w)"])
    assert printed(grads["/out"]) == Y_GRADIENT
    assert printed(grads["/param(w)"]) == "tensor([-0.9064, -0.9064, -0.9064, -0.9064, -0.9064])"


def test_a_doubled_gradient_doubles_the_gradients_before_it(hosted: trocar.Client) -> None:
    double = trocar.edit("/grad_out", "scale", 2.0)
    grads = hosted.gradients(
        "affine", INPUTS["affine"], of=SUM_OF_SQUARES, at=["/out", "/param(w)"], edits=[double]
    )
    assert printed(grads["/out"]) == "tensor([-3.7783,  1.0471,  0.9184])"
    assert printed(grads["/param(w)"]) == "tensor([-1.8128, -1.8128, -1.8128, -1.8128, -1.8128])"


def test_doubling_what_came_back_doubles_nothing_before_it(hosted: trocar.Client) -> None:
    grads = hosted.gradients("affine", INPUTS["affine"], of=SUM_OF_SQUARES, at=["/out", "/param(w)"])
    kept = grads["/out"]
    kept *= 2
    assert printed(kept) == "tensor([-3.7783,  1.0471,  0.9184])"
    assert printed(grads["/param(w)"]) == "tensor([-0.9064, -0.9064, -0.9064, -0.9064, -0.9064])"


def test_the_gradient_of_a_bias_is_minus_one_over_the_number_of_outputs(hosted: trocar.Client) -> None:
    grads = hosted.gradients("conv", INPUTS["conv"], of=ONE_MINUS_MEAN, at="fc/param(bias)", taps=["/out"])
    assert grads["/out"].shape == (5,)
    assert printed(grads["fc/param(bias)"]) == "tensor([-0.2000, -0.2000, -0.2000, -0.2000, -0.2000])"
    assert grads.objective == pytest.approx(1 - grads["/out"].mean(), abs=1e-6)


def test_a_clamped_relu_gradient_beside_a_zeroed_bias_gradient(hosted: trocar.Client) -> None:
    edits = [trocar.edit("relu/grad_out", "clamp", low=0), trocar.edit("fc/param_grad(bias)", "zero")]
    grads = hosted.gradients(
        "conv", INPUTS["conv"], of=ONE_MINUS_MEAN, at=["relu", "conv", "fc/param(bias)"], edits=edits
    )
    assert grads["relu"].shape == (1, 10, 4, 4)
    assert not (grads["relu"] < 0).any()
    assert (grads["relu"] > 0).any()
    assert not (grads["conv"] < 0).any()  # the ReLU lets zeros or what it got through
    assert printed(grads["fc/param(bias)"]) == "tensor([0., 0., 0., 0., 0.])"


def test_clamped_parameter_gradients_of_a_small_net(hosted: trocar.Client) -> None:
    grads = hosted.gradients(
        "two-layers",
        INPUTS["two-layers"],
        of=trocar.value("/out"),
        at="**/param(*)",
        edits=[trocar.edit("**/param_grad(*)", "clamp", -1.0, 1.0)],
    )
    assert printed(grads["fc2/param_grad(bias)"]) == "tensor([1., 1., 1., 1., 1.])"
    assert max(np.abs(gradient).max() for gradient in grads.values()) == 1.0


def test_clamped_parameter_gradients_of_a_resnet(hosted: trocar.Client) -> None:
    grads = hosted.gradients(
        "clipped-resnet18",
        INPUTS["clipped-resnet18"],
        of=trocar.value("/out", function="log", reduce="mean"),
        at="**/param(*)",
        edits=[trocar.edit("**/param_grad(*)", "clamp", -0.1, 0.1)],
    )
    found = printed(grads["fc/param_grad(bias)"][:5])
    assert found == "tensor([ 0.0259,  0.0355,  0.1000, -0.1000,  0.1000])"
    assert np.isnan(grads.objective or 0.0)  # logarithms of negative numbers, whose gradients are finite


# --- Edits of a linear layer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([], PLAIN_OUTPUT),
        ([ADD_ONE], "tensor([[-0.6156, -0.1592,  1.2549],\n        [-0.5881,  0.0968,  0.9498]])"),
        ([ADD_ONE, RESIDUAL], "tensor([[1.0457, 1.1077, 2.3166],\n        [1.0332, 0.6449, 1.7837]])"),
        # An input comes before an output, wherever they are in the list.
        ([RESIDUAL, ADD_ONE], "tensor([[1.0457, 1.1077, 2.3166],\n        [1.0332, 0.6449, 1.7837]])"),
    ],
    ids=["plain", "input", "input-and-output", "output-and-input"],
)
def test_forward_edits_of_a_linear_layer(
    hosted: trocar.Client, edits: list[trocar.Edit], expected: str
) -> None:
    maps = hosted.extract("linear", INPUTS["linear"], "/out", edits=edits)
    assert printed(maps["/out"]) == expected
    assert printed(hosted.extract("linear", INPUTS["linear"], "/out")["/out"]) == PLAIN_OUTPUT


def test_the_output_is_the_input_added_to_it(hosted: trocar.Client) -> None:
    """The notebook registers both; this is the second hook alone."""
    x = INPUTS["linear"]
    plain = hosted.extract("linear", x, "/out")["/out"]
    maps = hosted.extract("linear", x, ["/out", "/in"], edits=[RESIDUAL])
    assert np.array_equal(maps["/out"], plain + x)
    assert np.array_equal(maps["/in"], x)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([], PLAIN_GRADIENT),
        ([trocar.edit("/grad_in", "set", 42.0)], "tensor([[42., 42., 42.],\n        [42., 42., 42.]])"),
    ],
    ids=["plain", "set"],
)
def test_backward_edits_of_a_linear_layer(
    hosted: trocar.Client, edits: list[trocar.Edit], expected: str
) -> None:
    grads = hosted.gradients("linear", INPUTS["linear"], of=trocar.value("/out"), at="/in", edits=edits)
    assert printed(grads["/in"]) == expected
    again = hosted.gradients("linear", INPUTS["linear"], of=trocar.value("/out"), at="/in")
    assert printed(again["/in"]) == PLAIN_GRADIENT


# --- Shapes and features ----------------------------------------------------------------------------------


def test_the_feature_behind_a_pooling_layer(hosted: trocar.Client) -> None:
    maps = hosted.extract("pool", noise(1, 3, 10, 10), "pool")
    assert maps["pool"].shape == (1, 8, 4, 4)


def test_the_output_shape_of_every_child_of_resnet18(hosted: trocar.Client) -> None:
    maps = hosted.extract("resnet18", np.ones((10, 3, 28, 28), np.float32), "*")
    assert [(name, value.shape) for name, value in maps.items()] == [
        ("conv1", (10, 64, 14, 14)),
        ("bn1", (10, 64, 14, 14)),
        ("relu", (10, 64, 14, 14)),
        ("maxpool", (10, 64, 7, 7)),
        ("layer1", (10, 64, 7, 7)),
        ("layer2", (10, 128, 4, 4)),
        ("layer3", (10, 256, 2, 2)),
        ("layer4", (10, 512, 1, 1)),
        ("avgpool", (10, 512, 1, 1)),
        ("fc", (10, 1000)),
    ]


def test_two_features_of_resnet18(hosted: trocar.Client) -> None:
    maps = hosted.extract("resnet18", np.ones((10, 3, 28, 28), np.float32), ["layer4", "avgpool"])
    assert {name: value.shape for name, value in maps.items()} == {
        "layer4": (10, 512, 1, 1),
        "avgpool": (10, 512, 1, 1),
    }
