"""The order in which torch runs hooks, shown by torch alone, and requests whose results hang on that order.

torch 2.14: tensor hooks, then what `retain_grad` keeps, then hooks of nodes, then hooks behind accumulation;
several of one kind as they were registered. Here edits of a gradient are the hooks, taps are what is kept.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models.notebook_nets import affine
from tests.support.oracles.oracle import Array, same_bits

AT = ["/out", "/param(w)"]
LOSS = trocar.value("/out", function="square")
WAYS_BACK: list[str] = []
"""Filled by `Passed` whenever a backward pass comes through it."""


class Passed(torch.autograd.Function):
    """Doubles, and notes each time that its node is executed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not gradients[0].is_meta:  # the server runs a meta pass first
            WAYS_BACK.append("node")
        return gradients[0] * 2


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Passed.apply(x)
        return result


class Watched(nn.Module):
    """x -> doubling, whose node can be watched -> square."""

    def __init__(self) -> None:
        super().__init__()
        self.doubling = Double()
        self.tail = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.tail(self.doubling(x)) ** 2


@pytest.fixture(scope="module")
def hosted() -> Iterator[trocar.Client]:
    models = {
        "affine": {"module": affine()[0], "input_shape": (5,)},
        "watched": {"module": Watched(), "input_shape": (3,)},
    }
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as client:
        yield client


class Reference:
    """y = x @ w + b and its loss, by torch alone; hooks are registered before `backward`."""

    def __init__(self) -> None:
        net, self.x = affine()
        assert isinstance(net.w, nn.Parameter)
        self.w = net.w
        self.y: torch.Tensor = net(self.x)
        assert self.y.grad_fn is not None
        self.node = self.y.grad_fn

    def backward(self) -> None:
        (self.y**2).sum().backward()

    def check(self, grads: trocar.FeatureMaps) -> None:
        """Compare what was kept of y and what came to w with the gradients of a request."""
        assert self.y.grad is not None
        assert self.w.grad is not None
        assert same_bits(grads["/out"], self.y.grad)
        assert same_bits(grads["/param(w)"], self.w.grad)


def gradients(client: trocar.Client, *edits: trocar.Edit, at: list[str] = AT) -> trocar.FeatureMaps:
    return client.gradients("affine", np.ones((3, 5), np.float32), of=LOSS, at=at, edits=edits)


def add(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 1


def double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def test_torch_runs_hooks_in_this_order() -> None:
    """The reference of this file: who sees what when."""
    w = torch.ones(1, requires_grad=True)
    y = w * 2
    y.retain_grad()
    assert y.grad_fn is not None
    accumulate = y.grad_fn.next_functions[0][0]
    assert accumulate is not None
    seen: list[tuple[str, float | None]] = []

    def note(name: str, value: torch.Tensor | None) -> None:
        seen.append((name, None if value is None else value.item()))

    def first(gradient: torch.Tensor) -> torch.Tensor:
        note("first hook of y", gradient)
        return gradient * 5

    w.register_post_accumulate_grad_hook(lambda leaf: note("accumulated", leaf.grad))
    w.register_hook(lambda _: note("hook of w, nothing accumulated", w.grad))
    accumulate.register_hook(lambda _, __: note("node of w left", w.grad))
    y.grad_fn.register_prehook(lambda _: note("node of y begins, gradient kept", y.grad))
    y.grad_fn.register_hook(lambda inputs, _: note("node of y left", inputs[0]))
    y.register_hook(first)
    y.register_hook(lambda gradient: note("second hook of y", gradient))
    y.sum().backward()
    assert seen == [
        ("first hook of y", 1.0),
        ("second hook of y", 5.0),
        ("node of y begins, gradient kept", 5.0),
        ("node of y left", 10.0),
        ("hook of w, nothing accumulated", None),
        ("accumulated", 10.0),
        ("node of w left", 10.0),
    ]


def test_several_edits_of_one_gradient_run_as_listed(hosted: trocar.Client) -> None:
    edits = {add: trocar.edit("/grad_out", "add", 1.0), double: trocar.edit("/grad_out", "scale", 2.0)}
    results: list[Array] = []
    for order in ([add, double], [double, add]):
        reference = Reference()
        for hook in order:
            reference.y.register_hook(hook)
        reference.y.retain_grad()
        reference.backward()
        found = gradients(hosted, *(edits[hook] for hook in order))
        reference.check(found)
        results.append(found["/param(w)"])
    assert not np.array_equal(results[0], results[1])


def test_what_is_kept_is_the_gradient_after_tensor_hooks(hosted: trocar.Client) -> None:
    reference = Reference()
    reference.y.retain_grad()  # first, and yet it keeps what the hook has made
    reference.y.register_hook(double)
    reference.backward()
    found = gradients(hosted, trocar.edit("/grad_out", "scale", 2.0), at=["/out", "/param(w)"])
    reference.check(found)
    reference.check(gradients(hosted, trocar.edit("/grad_out", "scale", 2.0), at=["/param(w)", "/out"]))


def test_what_is_kept_is_the_gradient_before_node_hooks(hosted: trocar.Client) -> None:
    reference = Reference()
    reference.node.register_prehook(lambda gradients: (gradients[0] * 3,))
    reference.y.register_hook(add)
    reference.y.retain_grad()
    reference.backward()
    after = trocar.edit("/grad_out", "scale", 3.0, order="after")
    reference.check(gradients(hosted, after, trocar.edit("/grad_out", "add", 1.0)))


def test_a_node_comes_before_the_accumulation_of_its_gradients(hosted: trocar.Client) -> None:
    reference = Reference()
    kept: list[torch.Tensor] = []

    def accumulated(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        kept.append(leaf.grad.clone())
        leaf.grad += 1

    reference.w.register_post_accumulate_grad_hook(accumulated)
    reference.node.register_prehook(lambda gradients: (gradients[0] * 3,))
    reference.y.retain_grad()
    reference.backward()
    of_parameter = trocar.edit("/param_grad(w)", "add", 1.0)
    of_node = trocar.edit("/grad_out", "scale", 3.0, order="after")
    reference.check(gradients(hosted, of_parameter, of_node))
    seen = gradients(hosted, trocar.edit("/param_grad(w)", "add", 1.0, order="after"), of_node)
    assert same_bits(seen["/param(w)"], kept[0])


def test_the_gradient_of_an_output_is_edited_before_that_of_an_input(hosted: trocar.Client) -> None:
    """A full backward hook of a module is a hook of its node; the edit of the output is a tensor's."""
    layer: Any = nn.Identity()
    x = torch.ones(2, 3, requires_grad=True)
    layer.register_full_backward_hook(lambda _module, _inputs, outputs: (outputs[0] + 1,))
    y = layer(x * 1)
    y.register_hook(double)
    (y**2).sum().backward()
    assert x.grad is not None
    edits = [trocar.edit("tail/grad_in", "add", 1.0), trocar.edit("tail/grad_out", "scale", 2.0)]
    found = hosted.gradients(
        "watched", np.full((2, 3), 0.5, np.float32), of=trocar.value("/out"), at="doubling", edits=edits
    )
    assert same_bits(found["doubling"], x.grad)


# --- Values that gradients are taken with respect to ------------------------------------------------------


def watched_gradient(*, at_input: bool) -> tuple[torch.Tensor, list[str]]:
    """Return torch's gradient of a doubled value with a hook, or of what comes before it, and who ran."""
    WAYS_BACK.clear()
    x = torch.full((2, 3), 0.5, requires_grad=True)
    y = Double()(x)
    y.register_hook(double)
    (found,) = torch.autograd.grad((y**2).sum(), [x if at_input else y])
    return found, list(WAYS_BACK)


@pytest.mark.parametrize("at_input", [False, True], ids=["of-the-value", "of-what-is-before-it"])
def test_an_edit_runs_where_the_gradient_is_wanted_though_the_node_does_not(
    hosted: trocar.Client, at_input: bool
) -> None:
    expected, nodes = watched_gradient(at_input=at_input)
    assert nodes == (["node"] if at_input else [])
    at, x = "/in" if at_input else "doubling", np.full((2, 3), 0.5, np.float32)
    edit = trocar.edit("doubling/grad_out", "scale", 2.0)
    WAYS_BACK.clear()
    found = hosted.gradients("watched", x, of=trocar.value("/out"), at=at, edits=[edit])
    assert nodes == WAYS_BACK
    assert same_bits(found[at], expected)


def penalty(x: torch.Tensor) -> float:
    """Return the mean squared norm of a hooked value's gradient, taken with `torch.autograd.grad`."""
    y = Double()(x.requires_grad_())
    y.register_hook(double)
    (gradient,) = torch.autograd.grad((y**2).sum(), [y], create_graph=True)
    return gradient.square().sum(1).mean().item()


def test_an_edit_runs_in_the_gradient_inside_an_objective(hosted: trocar.Client) -> None:
    x: Array = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    found = hosted.gradients(
        "watched",
        x,
        of=trocar.gradient_penalty(trocar.value("/out"), at="doubling"),
        at="/in",
        edits=[trocar.edit("doubling/grad_out", "scale", 2.0)],
    )
    assert found.objective == pytest.approx(penalty(torch.from_numpy(x.copy())), rel=1e-6)
