"""Hooks of the backward pass, versions, checkpointing, other ways to differentiate, with a spool in place."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    increment_version,
    register_multi_grad_hook,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.unit.spool.steps import open_spool
from trocar_server.spool import SavedTensorChangedError, Spool

Context = AbstractContextManager[Any]

SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.14's own use of it


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()


def node(tensor: torch.Tensor) -> Any:
    return tensor.grad_fn


@pytest.fixture(params=[0, 1 << 30], ids=["on disk", "in memory"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    with open_spool(tmp_path, request.param, min_bytes=0) as opened:
        yield opened


# --- Hooks of the backward pass -------------------------------------------------------------------


def test_hooks_come_in_the_documented_order(spool: Spool) -> None:
    def work(context: Context) -> list[tuple[str, torch.Tensor]]:
        seen: list[tuple[str, torch.Tensor]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *values: seen.append((name, _first(values).clone()))

        x = leaf()
        with context:
            y = x.exp()
            loss = (y.tanh() * y).sum()
        node(y).register_hook(note("post-hook of the node"))
        node(y).register_prehook(note("pre-hook of the node"))
        y.register_hook(note("hook of the tensor"))
        y.register_hook(note("second hook of the tensor"))
        x.register_hook(note("hook of the leaf"))
        x.register_post_accumulate_grad_hook(note("behind the sum of the leaf"))
        y.retain_grad()
        loss.backward()
        assert y.grad is not None
        return [*seen, ("retained", y.grad)]

    expected, found = work(nullcontext()), work(spool)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))


def _first(values: Any) -> torch.Tensor:
    while not isinstance(values, torch.Tensor):
        values = next(value for value in values if value is not None)
    return values


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks_see_what_they_would(spool: Spool, mode: Any) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x, y = leaf(), leaf()
        seen: list[torch.Tensor] = []

        def see(grads: Any) -> None:
            seen.extend([grads] if isinstance(grads, torch.Tensor) else grads)

        with context:
            products = [x * y, (x * y).exp()]
            loss = products[0].tanh().sum() + products[1].sum()
        with register_multi_grad_hook([x, y, *products], see, mode=mode):
            loss.backward()
        return seen

    expected = work(nullcontext())
    found = work(spool)
    assert expected
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_hook_that_changes_a_gradient_in_backward_changes_it_here_too(spool: Spool) -> None:
    def work(context: Context) -> torch.Tensor:
        x = leaf()
        with context:
            y = x.exp()
            loss = y.tanh().sum()
        y.register_hook(lambda gradient: gradient.clamp(0.1, 0.2))
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(work(spool), work(nullcontext()))


# --- Versions -------------------------------------------------------------------------------------


def test_a_version_that_was_counted_up_by_hand_raises(spool: Spool) -> None:
    x = leaf()
    y = x.exp()
    with spool:
        z = y * y
    increment_version(y)
    with pytest.raises(SavedTensorChangedError, match="at version 1; expected version 0"):
        z.sum().backward()


def test_changes_are_allowed_where_the_inner_context_allows_them(spool: Spool) -> None:
    x = leaf()
    with spool, allow_mutation_on_saved_tensors():
        y = x.exp()
        z = y * y
        y.detach().add_(1)
        z.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x.exp() * x.exp()).sum(), x)[0])
    assert spool.report().saved_bytes == 0


# --- Checkpointing --------------------------------------------------------------------------------


@pytest.mark.parametrize("respects", [False, True])
def test_selective_checkpointing_within(spool: Spool, respects: bool) -> None:
    weight = torch.randn(30, 30, requires_grad=True)

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saves = operator == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().exp()

    def work(context: Context) -> list[torch.Tensor]:
        x = leaf()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        with context:
            y: Any = checkpoint(
                block, x, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=respects
            )
        return list(torch.autograd.grad(y.sum(), [x, weight]))

    assert all(map(torch.equal, work(spool), work(nullcontext())))


# --- Other ways to differentiate ------------------------------------------------------------------


@SCRIPTED
def test_forward_mode_and_inference_mode_within(spool: Spool) -> None:
    x = leaf()
    with spool, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        loss = (dual.exp() * dual).sum()
        tangent = torch.autograd.forward_ad.unpack_dual(loss).tangent
        (gradient,) = torch.autograd.grad(loss, x)
    assert tangent is not None
    assert torch.allclose(tangent, gradient.sum())
    before = spool.report().saved_bytes
    with spool, torch.inference_mode():
        x.exp().tanh()
    with spool, torch.no_grad():
        x.exp().tanh()
    assert spool.report().saved_bytes == before


def test_second_derivatives_of_the_functional_interface(spool: Spool) -> None:
    x = torch.linspace(-1, 1, 6)

    def cubic(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x * x).sum()

    with spool:
        found = torch.autograd.functional.hessian(cubic, x)
    assert torch.equal(found, torch.autograd.functional.hessian(cubic, x))
    assert spool.report().saved_bytes > 0
