"""Everything that autograd allows comes to the same with a spool as with autograd alone, bit by bit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.spool.spool_operations import FailsInBackward, Squared
from tests.unit.spool.steps import files, open_spool
from trocar_server.spool import Spool

Context = AbstractContextManager[Any]
Work = Callable[[Context], list[torch.Tensor]]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=numbers).requires_grad_()


def chain(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2).tanh() * x.exp()).sigmoid().square().sum()


@pytest.fixture(params=[0, 3_000, 1 << 30], ids=["all on disk", "some on disk", "none on disk"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    with open_spool(tmp_path, request.param, min_bytes=16, ahead_bytes=2_000) as opened:
        yield opened


def assert_same(work: Work, spool: Spool) -> None:
    expected = work(nullcontext())
    for _ in range(2):
        found = work(spool)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_retained_runs_backward_again(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            loss = chain(x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        assert x.grad is not None
        return [x.grad]

    assert_same(work, spool)


@pytest.mark.parametrize("is_spooled", [False, True])
def test_gradients_of_gradients(spool: Spool, is_spooled: bool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            loss = chain(x)
        with context if is_spooled else nullcontext():
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.tanh().sum(), x)
        return [first.detach(), second.detach(), third]

    assert_same(work, spool)


def test_some_gradients_alone(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x, y = leaf(20, 30), leaf(30, 20)
        with context:
            product = x @ y
            loss = (product.tanh() * product).sum()
        (of_y,) = torch.autograd.grad(loss, y, retain_graph=True)
        (of_product, of_x) = torch.autograd.grad(loss, [product, x])
        return [of_x, of_y, of_product]

    assert_same(work, spool)


def test_what_a_node_saved_can_be_read_again_and_again(spool: Spool) -> None:
    x, y = leaf(20, 30), leaf(20, 30)
    with spool:
        z = x.exp() * y.tanh()
    node: Any = z.grad_fn
    for _ in range(3):
        assert torch.equal(node._saved_self, x.exp())
        assert torch.equal(node._saved_other, y.tanh())
    z.sum().backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self


def test_several_graphs_end_in_any_order(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        leaves = [leaf(20, 10 + index) for index in range(6)]
        with context:
            losses: list[torch.Tensor | None] = [chain(x) for x in leaves]
        for index in (3, 0, 5):
            loss = losses[index]
            assert loss is not None
            loss.backward()
            losses[index] = None
        losses[1] = None
        with context:
            losses.append(chain(leaves[1]))
        for loss in (losses[6], losses[4], losses[2]):
            assert loss is not None
            loss.backward()
        return [x.grad for x in leaves if x.grad is not None]

    assert_same(work, spool)


def test_graphs_that_share_a_part(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            trunk = (x * x).exp().tanh()
        with context:
            one, other = chain(trunk), trunk.cos().sum()
        other.backward(retain_graph=True)
        del other
        one.backward()
        assert x.grad is not None
        return [x.grad]

    assert_same(work, spool)


def test_backward_in_another_thread(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            loss = chain(x)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert x.grad is not None
        return [x.grad]

    assert_same(work, spool)


def test_functions_of_ones_own(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            loss = Squared.apply(Squared.apply(x.tanh())).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [first.detach(), second]

    assert_same(work, spool)


def test_numerical_gradients_agree_to_the_second_order(tmp_path: Path) -> None:
    x, y = leaf(3, 4, dtype=torch.float64), leaf(4, 3, dtype=torch.float64)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with opened:
            return (x.T.exp() * y).tanh() @ x.sigmoid()

    with open_spool(tmp_path, 0, min_bytes=0) as opened:
        assert torch.autograd.gradcheck(product, (x, y))
        assert torch.autograd.gradgradcheck(product, (x, y))
        assert opened.report().written_bytes > 0


def test_jacobians_of_whole_batches(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(6, 8)
        with context:
            y = (x.exp() * x).tanh().sum(0)
        (batched,) = torch.autograd.grad(y, x, torch.eye(8), is_grads_batched=True, retain_graph=True)
        rows = [torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in torch.eye(8)]
        assert torch.allclose(batched, torch.stack(rows))
        return [batched, *rows]

    assert_same(work, spool)


def test_functions_over_a_batch(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(6, 8, 8)
        with context:
            loss = torch.vmap(lambda matrix: (matrix @ matrix.T).tanh() * matrix.exp())(x).sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    assert_same(work, spool)


def test_hooks_of_tensors_and_nodes_see_what_they_would(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        seen: list[torch.Tensor] = []
        with context:
            middle = x.exp()
            loss = chain(middle)
        middle.register_hook(seen.append)
        assert middle.grad_fn is not None
        middle.grad_fn.register_hook(lambda inputs, outputs: seen.extend([*inputs, *outputs]))
        loss.backward()
        return seen

    assert_same(work, spool)


def test_a_saved_tensor_with_hooks_of_its_own_stays_in_memory(spool: Spool) -> None:
    x = leaf(20, 30)
    y = x.exp()
    node: Any = y.grad_fn
    node._raw_saved_result.register_hooks(lambda t: t + 1, lambda t: t)
    with spool:
        z = y * y
        node = z.grad_fn
        with pytest.raises(RuntimeError, match="hooks have already been set"):
            node._raw_saved_self.register_hooks(lambda t: t, lambda t: t)
    z.sum().backward()
    assert x.grad is not None


def test_forward_that_fails_leaves_nothing(spool: Spool) -> None:
    x = leaf(20, 30)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="invalid for input of size"), spool:
            (x.exp().tanh() * x).view(7, -1)
        assert spool.store.ledger.is_empty
    assert_same(lambda context: [torch.autograd.grad(_within(context, x), x)[0]], spool)


def _within(context: Context, x: torch.Tensor) -> torch.Tensor:
    with context:
        return chain(x)


def test_backward_that_fails_can_go_on(spool: Spool) -> None:
    def work(context: Context) -> list[torch.Tensor]:
        x = leaf(20, 30)
        with context:
            trunk = x.exp().tanh()
            bad = FailsInBackward.apply(trunk).square().sum()
            good = trunk.square().sum()
        with pytest.raises(ArithmeticError):
            bad.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(good, x)
        return [gradient]

    assert_same(work, spool)
    assert spool.store.ledger.is_empty


def test_without_a_backward_pass_nothing_is_left(spool: Spool) -> None:
    for _ in range(3):
        with spool:
            loss = chain(leaf(20, 30))
        del loss
        assert spool.store.ledger.is_empty
        assert spool.store.ledger.held_bytes == spool.store.ledger.pending_bytes


def test_a_graph_outlives_its_spool(tmp_path: Path) -> None:
    x = leaf(20, 30)

    def forward() -> torch.Tensor:
        with Spool(tmp_path, 0, min_bytes=0):
            return chain(x)

    loss = forward()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(chain(x), x)[0])
    del loss
    assert files(tmp_path) == []


def test_the_inner_of_two_contexts_counts(tmp_path: Path) -> None:
    with open_spool(tmp_path / "a", min_bytes=0) as outer, open_spool(tmp_path / "b", min_bytes=0) as inner:
        x = leaf(20, 30)
        with outer:
            y = x.exp()
            with inner:
                z = y.tanh()
            with torch.autograd.graph.save_on_cpu():
                z = z.sin()
            with outer:
                loss = z.exp().sum()
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.autograd.grad(x.exp().tanh().sin().exp().sum(), x)[0])
        assert outer.report().unique_bytes == 2 * x.nbytes
        assert inner.report().unique_bytes == x.nbytes
        assert outer.report().step_count == 1


@pytest.mark.parametrize(
    ("kind", "is_autocast"),
    # oneDNN has no LSTM of bfloat16 for processors without AVX-512.
    [(nn.LSTM, False), (nn.GRU, True)],
)
def test_recurrent_layers_of_several_dtypes(
    spool: Spool, kind: Callable[..., nn.Module], is_autocast: bool
) -> None:
    torch.manual_seed(0)
    layer = kind(12, 20, num_layers=2, bidirectional=True, batch_first=True)

    def work(context: Context) -> list[torch.Tensor]:
        layer.zero_grad()
        x = leaf(3, 9, 12)
        with context, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = layer(x)[0].float().square().sum()
        loss.backward()
        return [p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None]

    assert_same(work, spool)
