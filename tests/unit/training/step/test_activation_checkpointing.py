"""Modules that are computed again in the backward pass."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trocar_server.errors import ServiceError
from trocar_server.training.step.activation_checkpointing import activation_checkpointing


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        self.count += 1
        return torch.relu(self.linear(x)) * scale


def test_a_module_runs_twice_and_with_its_keywords() -> None:
    module, x = Counting(), torch.randn(3, 4)
    other = copy.deepcopy(module)
    other(x, scale=2.0).sum().backward()
    with activation_checkpointing({"m": module}):
        module(x, scale=2.0).sum().backward()
    assert module.count == 2
    assert torch.equal(_gradient(module), _gradient(other))


def test_the_backward_pass_may_come_behind_the_context() -> None:
    module, x = Counting(), torch.randn(3, 4)
    with activation_checkpointing({"m": module}):
        loss = module(x).sum()
    assert "forward" not in vars(module)
    loss.backward()
    assert module.count == 2


def test_it_saves_the_inputs_only() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(4)))
    sizes: dict[bool, int] = {}
    for is_checkpointed in (False, True):
        saved: list[int] = []

        def keep(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                saved.append(tensor.numel())
            return tensor.detach()

        with (
            activation_checkpointing(dict(module.named_children()) if is_checkpointed else {}),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            module(torch.randn(8, 16))
        sizes[is_checkpointed] = sum(saved)
    assert sizes[True] * 2 <= sizes[False]


def test_batch_norm_counts_a_batch_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    other, x = copy.deepcopy(module), torch.randn(6, 4)
    for model, chosen in ((module, {"m": module}), (other, {})):
        torch.manual_seed(0)
        with activation_checkpointing(chosen):
            for _ in range(3):
                model(x).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), other.buffers(), strict=True))
    assert all(
        torch.equal(_some(a.grad), _some(b.grad))
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


class Averaging(nn.Module):
    """Replaces its buffer by a new tensor, of which its output depends."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(x - self.mean)


def test_buffers_that_are_replaced_count_a_batch_once() -> None:
    module = nn.Sequential(Averaging(), Averaging())
    other, x = copy.deepcopy(module), torch.randn(6, 4)
    for model, chosen in ((module, {"m": module}), (other, {})):
        with activation_checkpointing(chosen):
            losses = [model(x + step).square().sum() for step in range(3)]
        for loss in losses:  # each is computed again with the values of its own pass
            loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), other.buffers(), strict=True))
    assert all(
        torch.equal(_some(a.grad), _some(b.grad))
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_without_gradients_nothing_is_different() -> None:
    module = Counting()
    with activation_checkpointing({"m": module}), torch.no_grad():
        module(torch.randn(2, 4))
    assert module.count == 1


def test_a_failure_leaves_the_module_as_it_was() -> None:
    module = Counting()
    with pytest.raises(RuntimeError), activation_checkpointing({"m": module}):
        module(torch.randn(2, 5))
    assert "forward" not in vars(module)


def test_a_forward_of_ones_own_comes_back() -> None:
    module = Counting()
    own = module.forward
    module.forward = own  # type: ignore[method-assign]
    with activation_checkpointing({"m": module}):
        assert module.forward is not own
    assert vars(module)["forward"] is own


def test_a_module_that_writes_to_its_input_is_refused_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardswish(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with activation_checkpointing({"1": model[1]}), pytest.raises(ServiceError, match=r"'1' \(Hardswish\)"):
        model(x)


def test_a_module_inside_another_one_is_computed_again_with_that_one() -> None:
    model = nn.Sequential(Counting(), nn.Hardswish(inplace=True), Counting())
    other, x = copy.deepcopy(model), torch.randn(2, 4)
    with activation_checkpointing({"": model, **dict(model.named_children())}):
        model(x).sum().backward()
    other(x).sum().backward()
    assert [part.count for part in model if isinstance(part, Counting)] == [2, 2]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(_some(mine.grad), _some(theirs.grad))


def _gradient(module: Counting) -> Tensor:
    return _some(module.linear.weight.grad)


def _some(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
