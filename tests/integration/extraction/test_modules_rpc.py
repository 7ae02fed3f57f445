"""What is inside a model, as `ListModules` tells it."""

import numpy as np
import pytest

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import rebuilt_by_name


def test_modules_come_in_execution_order_with_what_they_return(models_client: trocar.Client) -> None:
    tree = models_client.modules("plain")
    assert [module.path for module in tree] == ["", "conv", "relu", "conv2", "pool", "fc", "unused"]
    assert tree["conv"].output_shape == (1, 4, 8, 8)
    assert (tree["relu"].call_count, tree["unused"].call_count) == (2, 0)
    assert tree["conv"].parameter_count == 4 * 3 * 9 + 4
    assert tree[""].parameter_count == sum(p.numel() for p in Plain().parameters())
    assert "kernel_size=(3, 3)" in tree["conv"].description
    assert tree.is_symbolic


def test_shapes_are_those_of_the_inputs_assumed(models_client: trocar.Client) -> None:
    tree = models_client.modules("plain", (5, 3, 16, 12))
    assert tree["conv"].output_shape == (5, 4, 16, 12)
    assert tree["conv"].outputs[0].byte_count == 5 * 4 * 16 * 12 * 4


def test_structures_are_listed_leaf_by_leaf(models_client: trocar.Client) -> None:
    tree = models_client.modules("structured")
    assert [(leaf.pick, leaf.type) for leaf in tree["split"].outputs] == [
        ("[0]", "Tensor"),
        ("[1]", "NoneType"),
        ("[2]", "int"),
    ]
    assert [leaf.pick for leaf in tree["both"].outputs] == ['["first"]', '["second"]']


@pytest.mark.parametrize("model_id", ["plain", "structured", "dependent"])
def test_dimensions_are_named_as_in_a_reply(models_client: trocar.Client, model_id: str) -> None:
    tree = models_client.modules(model_id)
    size = (2, *models_client.model(model_id).input_shape)
    maps = models_client.extract(model_id, np.zeros(size, np.float32), taps=["**"])
    for name, info in maps.info.items():
        (told,) = (leaf for leaf in tree[info.path].calls[info.call_index] if leaf.pick == info.pick)
        assert told.axes == info.axes, name


def test_a_tree_names_the_dimensions(models_client: trocar.Client) -> None:
    tree = models_client.modules("plain")
    assert tree["conv"].outputs[0].axes == ("batch", "channels", "height", "width")
    assert tree["conv"].output_axes == "batch channels height width"
    assert tree["unused"].output_axes == ""
    assert models_client.modules("plain", (5, 3, 16, 12))["fc"].outputs[0].axes == ("batch", "channels")


def test_a_tree_that_depends_on_data_says_so(models_client: trocar.Client) -> None:
    assert not models_client.modules("dependent").is_symbolic


def test_the_tree_of_a_large_model_arrives(models_client: trocar.Client) -> None:
    tree = models_client.modules("resnet18")
    assert {module.path for module in tree} == {
        path for path, _ in rebuilt_by_name("resnet18").named_modules()
    }
    assert tree["layer4"].output_shape == (1, 512, 7, 7)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3,), (1,) * 8, ()])
def test_inputs_that_the_model_cannot_take_are_rejected(
    models_client: trocar.Client, shape: tuple[int, ...]
) -> None:
    with pytest.raises(trocar.errors.InputRejectedError):
        models_client.modules("plain", shape)


def test_modules_of_an_optical_flow_model_can_be_listed_for_another_size(
    models_client: trocar.Client,
) -> None:
    """It takes two frames; the client names one shape."""
    models_client.load("raft_small", "random:0")
    try:
        assert models_client.modules("raft_small")[""].call_count == 1
        assert models_client.modules("raft_small", (1, 3, 136, 128))[""].call_count == 1
    finally:
        models_client.unload("raft_small")
