"""What PyTorch documents of saved-tensor hooks and of what lies near them holds with a spool in place.

`torch.autograd.graph` of 2.14: saved_tensors_hooks, save_on_cpu, disable_saved_tensors_hooks, hooks of nodes,
multi-grad hooks, allow_mutation_on_saved_tensors, increment_version, node_creation_hook.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    node_creation_hook,
    save_on_cpu,
    saved_tensors_hooks,
)

from tests.unit.spool.steps import open_spool, wait_until_written
from trocar_server.spool import Spool

Context = AbstractContextManager[Any]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]

SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.14's own use of it


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()


def node(tensor: torch.Tensor) -> Any:
    return tensor.grad_fn


@pytest.fixture(params=[0, 1 << 30], ids=["on disk", "in memory"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    with open_spool(tmp_path, request.param, min_bytes=0) as opened:
        yield opened


# --- saved_tensors_hooks --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_back_is_equal_in_value_size_dtype_and_device(spool: Spool, dtype: torch.dtype) -> None:
    a, b = torch.randn(20, 30).to(dtype).requires_grad_(), torch.randn(30, 20).to(dtype).T.requires_grad_()
    one, other = a * 1, b * 1
    with spool:
        y = one * other
    wait_until_written(spool)
    for found, expected in ((node(y)._saved_self, one), (node(y)._saved_other, other)):
        assert torch.equal(found, expected)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
        assert found.grad_fn is expected.grad_fn


@pytest.mark.parametrize("make", [lambda x: x.exp(), lambda x: x.exp()[:2], lambda x: x, lambda x: x.T])
def test_packing_leaves_its_input_as_it_was(
    spool: Spool, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = make(leaf())
    before = (tensor._version, tensor.data_ptr(), tensor.requires_grad, tensor.grad_fn, tensor.is_leaf)
    values = tensor.detach().clone()
    packed = spool.packer.pack(tensor)
    wait_until_written(spool)
    unpacked = packed.unpack()
    assert before == (
        tensor._version,
        tensor.data_ptr(),
        tensor.requires_grad,
        tensor.grad_fn,
        tensor.is_leaf,
    )
    assert torch.equal(tensor, values)
    assert torch.equal(unpacked, values)
    assert unpacked._version == tensor._version


def test_the_inner_of_two_pairs_of_hooks_wins(spool: Spool) -> None:
    x, seen = leaf(), []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.detach()

    with spool:
        y = x.exp()
        with saved_tensors_hooks(see, lambda tensor: tensor):
            z = y.tanh()
    with saved_tensors_hooks(see, lambda tensor: tensor), spool:
        loss = z.sin().sum()
    loss.backward()
    assert len(seen) == 1
    assert spool.report().saved_bytes == 2 * x.nbytes
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(leaf_chain(x), x)[0])


def leaf_chain(x: torch.Tensor) -> torch.Tensor:
    return x.exp().tanh().sin().sum()


def test_save_on_cpu_within_as_its_documentation_has_it(spool: Spool) -> None:
    def step(outer: Context, inner: Context) -> list[torch.Tensor]:
        a, b, c = leaf(), leaf(), leaf()
        with outer:
            product = a * b
            with inner:
                second = product * c
            y = second * a
        y.sum().backward()
        return [each.grad for each in (a, b, c) if each.grad is not None]

    expected = step(nullcontext(), nullcontext())
    for contexts in ((spool, save_on_cpu()), (save_on_cpu(), spool)):
        assert all(map(torch.equal, step(*contexts), expected))


def test_a_pair_of_hooks_that_fails_within_leaves_the_spool_in_place(spool: Spool) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("the pack hook fails")

    x = leaf()
    with spool:
        with pytest.raises(ArithmeticError, match="the pack hook fails"):
            _exp_with(saved_tensors_hooks(fail, lambda _: x), x)
        y = x.exp()
    assert spool.report().saved_bytes == x.nbytes
    y.sum().backward()


def _exp_with(context: Context, x: torch.Tensor) -> torch.Tensor:
    with context:
        return x.exp()


# --- disable_saved_tensors_hooks ------------------------------------------------------------------


def test_where_hooks_are_disabled_entering_says_so_and_works_afterwards(spool: Spool) -> None:
    x = leaf()
    for _ in range(2):
        with disable_saved_tensors_hooks("no hooks in here"):
            with pytest.raises(RuntimeError, match="no hooks in here"), spool:
                pass
            x.exp().sum().backward()
    assert spool.report().saved_bytes == 0
    with spool:
        y = x.exp().sum()
    assert spool.report().saved_bytes == x.nbytes
    y.backward()


def test_hooks_cannot_be_disabled_within(spool: Spool) -> None:
    with spool, pytest.raises(RuntimeError, match="no hooks in here"):
        _exp_with(disable_saved_tensors_hooks("no hooks in here"), leaf())
    with spool:
        leaf().exp()
    assert spool.report().saved_bytes == leaf().nbytes


def test_wrapped_modules_say_so_where_hooks_are_disabled(spool: Spool) -> None:
    layer = nn.Sequential(nn.Linear(30, 30), nn.Tanh())
    with spool.wrap([layer]):
        with (
            disable_saved_tensors_hooks("no hooks in here"),
            pytest.raises(RuntimeError, match="no hooks in here"),
        ):
            layer(leaf())
        assert spool.report().saved_bytes == 0
        leaf().exp()
        assert spool.report().saved_bytes == 0
        layer(leaf()).sum().backward()
    assert spool.report().saved_bytes > 0


@SCRIPTED
@pytest.mark.parametrize("is_inside", [False, True])
def test_torch_func_says_that_it_takes_no_hooks(spool: Spool, is_inside: bool) -> None:
    inner, outer = (spool, nullcontext()) if is_inside else (nullcontext(), spool)

    def work(x: torch.Tensor) -> torch.Tensor:
        with inner:
            return leaf_chain(x)

    x = leaf().detach()
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"), outer:
        torch.func.grad(work)(x)
    with spool:
        assert torch.equal(torch.func.jvp(leaf_chain, (x,), (x,))[0], leaf_chain(x))


# --- What a node has saved ------------------------------------------------------------------------


def test_raw_saved_tensors_are_what_the_spool_gave(spool: Spool) -> None:
    y = leaf().exp()
    with spool:
        z = y * y
    wait_until_written(spool)
    raw = node(z)._raw_saved_self
    for _ in range(2):
        assert torch.equal(raw.unpack(), y)
    assert torch.equal(raw.data.unpack(), y)
    assert torch.equal(raw.unpack_hook(raw.data), y)
    with pytest.raises(RuntimeError, match="hooks have already been set"):
        raw.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    z.sum().backward()
    with pytest.raises(RuntimeError, match="after it has been freed"):
        raw.register_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_hooks_registered_by_hand_and_a_spool_share_a_graph(spool: Spool) -> None:
    x = leaf()
    y = x.exp()
    packed = []
    raw = node(y)._raw_saved_result
    raw.register_hooks(lambda tensor: packed.append(tensor.detach().clone()), lambda _: packed[0] * 2)
    with spool:
        z = y.tanh()
    z.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.autograd.grad(x.exp().tanh().sum(), x)[0])


def test_a_hook_of_new_nodes_sees_what_they_have_saved(spool: Spool) -> None:
    x = leaf()
    seen: list[torch.Tensor] = []

    def see(created: Any) -> None:
        if created.name() == "ExpBackward0":
            seen.append(created._saved_result.detach().clone())

    with spool, node_creation_hook(see):
        y = x.exp().sum()
    assert torch.equal(seen[0], x.exp())
    y.backward()
