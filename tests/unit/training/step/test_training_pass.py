"""Stopping a backward pass from outside."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.surgical_models import Noted
from tests.unit.training.trainers import batches, core_of, run, tiny
from trocar_server.surgery import PassAborted, PassGuard
from trocar_server.training.step.training_pass import BackwardGuard


def chain(trained: set[int]) -> nn.Sequential:
    """Return six linear layers, of which some are trained."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index in trained)
    return model


def stopped_at(model: nn.Sequential, watch: BackwardGuard, place: int) -> list[int]:
    """Cancel when the gradient comes to the output of a layer; return the layers that it came to."""
    guard, seen = PassGuard(), []

    def see(index: int) -> Any:
        def hook(_: Tensor) -> None:
            seen.append(index)
            if index == place:
                guard.cancel()

        return hook

    x = torch.randn(2, 4)
    with watch.asking(guard):
        for index, layer in enumerate(model):
            x = layer(x)
            if x.requires_grad:
                x.register_hook(see(index))
        with pytest.raises(PassAborted):
            x.sum().backward()
    return seen


@pytest.mark.parametrize("trained", [{0}, {0, 5}, {0, 1, 2, 3, 4, 5}, {1, 4}])
@pytest.mark.parametrize("is_first", [True, False])
def test_it_stops_at_the_next_layer(trained: set[int], is_first: bool) -> None:
    model = chain(trained)
    watch = BackwardGuard(model)
    if not is_first:
        with watch.asking(PassGuard()):
            model(torch.randn(2, 4)).sum().backward()
    assert stopped_at(model, watch, place=3)[-1] in (3, 2)


def test_the_first_pass_has_the_bits_of_later_ones_where_torch_fuses_frozen_layers() -> None:
    """As it does with masked encoder layers without gradients: a restarted server begins with one."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 20, 0.0, batch_first=True).eval().requires_grad_(False)
    inputs, padding = torch.randn(4, 7, 16), torch.zeros(4, 7, dtype=torch.bool)
    watch, values = BackwardGuard(model), []
    for _ in range(2):
        with watch.asking(PassGuard()):
            values.append(model(inputs, src_key_padding_mask=padding))
    assert torch.equal(*values)


def test_frozen_layers_that_no_gradient_comes_to_are_left_alone() -> None:
    model = chain({5})
    watch = BackwardGuard(model)
    with watch.asking(PassGuard()):
        model(torch.randn(2, 4)).sum().backward()
    with watch.asking(PassGuard()):
        assert [len(layer._forward_hooks) for layer in model] == [0] * 6
    assert not any(layer._forward_hooks for layer in model)


def test_small_weights_are_asked_where_there_are_no_others() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    guard = PassGuard()
    with BackwardGuard(model).asking(guard):
        loss = model(torch.randn(3, 4)).square().sum()
        guard.cancel()
        with pytest.raises(PassAborted):
            loss.backward()


def test_one_trained_weight_of_a_layer_is_enough() -> None:
    model, guard = nn.Sequential(nn.Linear(4, 4, bias=False)), PassGuard()
    with BackwardGuard(model).asking(guard):
        loss = model(torch.randn(3, 4)).square().sum()
        guard.cancel()
        with pytest.raises(PassAborted):
            loss.backward()


@pytest.mark.parametrize(
    ("trainable", "cudnn"),
    [
        (["conv", "fc"], [False]),  # the gradient of the convolution goes through the frozen layer
        (["fc"], [True]),
        (["lstm", "fc"], [True]),  # in train mode
    ],
)
def test_a_frozen_recurrent_layer_in_the_graph_runs_without_cudnn(
    trainable: list[str], cudnn: list[bool]
) -> None:
    core, data = core_of(tiny(Noted, (4, 3)), trainable=trainable), batches(1, shape=(4, 3))
    Noted.notes()
    run(core, data)
    assert Noted.notes() == {"conv": [True], "lstm": cudnn}
    assert torch.backends.cudnn.enabled


def test_a_recurrent_layer_that_is_recomputed_does_so_without_cudnn() -> None:
    core = core_of(tiny(Noted, (4, 3)), trainable=["conv", "fc"], activation_checkpointing=["lstm"])
    Noted.notes()
    run(core, batches(1, shape=(4, 3)))
    assert Noted.notes()["lstm"] == [False, False]
