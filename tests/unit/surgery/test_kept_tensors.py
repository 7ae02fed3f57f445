"""Tensors that a model keeps between passes with and without gradients, wherever it keeps them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trocar_server.surgery import graphs_end_here

ROWS = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


class Table:
    """Keeps a tensor, as the rotary embeddings of some models do; called, and of no kind that torch knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._cos = tensor

    def __call__(self) -> torch.Tensor:
        return self._cos


PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "dict": lambda tensor: {3: tensor},
    "list": lambda tensor: [None, tensor],
    "tuple": lambda tensor: (tensor, "cos"),
    "named": lambda tensor: torch.return_types.max((tensor, tensor)),
    "object": Table,
    "object in a list": lambda tensor: [Table(tensor)],
    "nested": lambda tensor: {"a": [(tensor, {"b": tensor})]},
}


def first(value: Any) -> torch.Tensor:
    """Return the first tensor in a structure."""
    while not isinstance(value, torch.Tensor):
        if isinstance(value, Table):
            return value()
        items = list(value.values()) if isinstance(value, dict) else value
        value = next(item for item in items if item is not None)
    return value


class Keeps(nn.Module):
    """Makes a factor in its first pass, and keeps it in one of the places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.cache = place, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = PLACES[self.place](torch.linspace(0.5, 1, x.shape[1]))
        return x * first(self.cache)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_pass_without_gradients_kept_serves_one_with_gradients(place: str) -> None:
    model = Keeps(place)
    with torch.inference_mode():
        model(ROWS)
    leaf = ROWS.clone().requires_grad_()
    with graphs_end_here(model):
        model(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.linspace(0.5, 1, 3).expand(2, 3))


class Remembers(nn.Module):
    """Adds the value of its last pass, kept in one of the places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.cache = PLACES[place](torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x * x + first(self.cache)
        self.cache = PLACES[self.place](value)
        return value


@pytest.mark.parametrize("place", PLACES)
def test_no_graph_of_a_pass_is_kept(place: str) -> None:
    model = Remembers(place)
    for _ in range(2):  # the second backward pass does not go through the graph of the first
        leaf = ROWS.clone().requires_grad_()
        with graphs_end_here(model):
            model(leaf).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * ROWS)
        assert not first(model.cache).requires_grad
    assert torch.equal(first(model.cache), 2 * ROWS * ROWS)


def test_a_tensor_that_is_kept_twice_stays_one_tensor() -> None:
    model = Keeps("itself")
    with torch.inference_mode():
        model(ROWS)
        model.more = [model.cache, {"again": model.cache}]  # type: ignore[assignment]
    with graphs_end_here(model):
        pass
    assert isinstance(model.more, list)
    assert model.more[0] is model.cache
    assert model.more[1]["again"] is model.cache


def test_parameters_in_a_list_keep_their_gradients() -> None:
    model = nn.LSTM(3, 3)
    weights = list(model.parameters())
    with graphs_end_here(model):
        model(ROWS)[0].sum().backward()
    assert all(mine is theirs for mine, theirs in zip(model._flat_weights, weights, strict=True))
    assert all(weight.requires_grad and weight.grad is not None for weight in weights)


def test_a_structure_that_contains_itself_is_no_problem() -> None:
    model = Keeps("list")
    model(ROWS)
    model.cache.append(model.cache)  # type: ignore[attr-defined]
    with graphs_end_here(model):
        pass
