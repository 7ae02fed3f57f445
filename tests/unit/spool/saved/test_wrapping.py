"""Only what the calls of some modules save, in whichever thread they are called."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.spool.steps import are_equal, batch, gradients, open_spool, small_model
from trocar_server.spool import Spool


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch()).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def saved_bytes(spool: Spool) -> int:
    return spool.report().saved_bytes


def test_only_what_these_layers_save_is_spooled(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as everything, open_spool(tmp_path) as spool:
        assert are_equal(gradients(model, everything), expected)
        with spool.wrap([model[3], model[5]]):
            assert are_equal(step(model), expected)
        count = saved_bytes(spool)
        assert count == 2 * 16 * 8 * 16 * 16 * 4 < saved_bytes(everything)
        assert are_equal(step(model), expected)
        assert saved_bytes(spool) == count


def test_modules_of_a_spool_count_within_its_context(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, modules=[model[3]]) as spool:
        assert are_equal(gradients(model, spool), expected)
        count = saved_bytes(spool)
        assert count == 16 * 8 * 16 * 16 * 4
        assert are_equal(step(model), expected)
        assert saved_bytes(spool) == count
        with spool, spool:
            assert are_equal(step(model), expected)
        assert saved_bytes(spool) == 2 * count


def test_the_innermost_counts(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as outer, open_spool(tmp_path) as inner, open_spool(tmp_path) as around:
        outer.wrap([model])
        inner.wrap([model[3]])
        with around:
            loss = model(batch()).square().sum()
        model.zero_grad()
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert are_equal(found, expected)
        assert saved_bytes(inner) == 16 * 8 * 16 * 16 * 4
        assert saved_bytes(around) == 16 * 4 * 4  # the loss alone
        assert saved_bytes(outer) > 0


def test_a_module_that_calls_itself_and_shared_modules(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            return self(x.tanh(), depth - 1).exp() if depth else x.sin()

    module = Nested()
    with open_spool(tmp_path) as spool:
        spool.wrap([module, module])
        x = torch.randn(1000, requires_grad=True)
        loss = module(x, 3).sum()
        (x * 2).tanh().sum()
        assert saved_bytes(spool) == 7 * 4000
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(
            found, torch.autograd.grad(x.tanh().tanh().tanh().sin().exp().exp().exp().sum(), x)[0]
        )


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


@pytest.mark.parametrize("where", ["in the module", "in a hook before", "in a hook behind"])
def test_hooks_go_when_the_call_fails(tmp_path: Path, where: str) -> None:
    module: nn.Module = Fails() if where == "in the module" else nn.Tanh()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if where == "in a hook before":
        module.register_forward_pre_hook(fail)
    with open_spool(tmp_path) as spool:
        spool.wrap([nn.Sequential(module), module])
        if where == "in a hook behind":
            module.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                module(torch.randn(1000, requires_grad=True))
        before = saved_bytes(spool)
        torch.randn(1000, requires_grad=True).tanh()
        assert saved_bytes(spool) == before


def test_another_hook_before_it_fails_and_nothing_is_unbalanced(tmp_path: Path) -> None:
    module = nn.Tanh()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with open_spool(tmp_path) as outer, open_spool(tmp_path) as spool:
        spool.wrap([module])
        module.register_forward_pre_hook(fail, prepend=True)
        with outer:
            with pytest.raises(ArithmeticError):
                module(torch.randn(1000, requires_grad=True))
            torch.randn(1000, requires_grad=True).tanh()
        assert (saved_bytes(outer), saved_bytes(spool)) == (4000, 0)


def test_removing_leaves_the_modules_as_they_were(tmp_path: Path) -> None:
    model = small_model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with open_spool(tmp_path) as spool:
        wrapped = spool.wrap(model)
        wrapped.remove()
        wrapped.remove()
    for name, module in model.named_modules():
        for key in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
            assert vars(module)[key] == before[name][key] == {}


def test_a_graph_outlives_the_wrapping(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        with spool.wrap([model]):
            loss = model(batch()).square().sum()
        model.zero_grad()
        loss.backward()
        assert are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)


def test_replicas_in_threads_as_data_parallel_has_them(tmp_path: Path) -> None:
    """Replicas share the hooks of their module, and each is called in a thread of its own."""
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, 100_000) as spool:
        spool.wrap([model])
        replicas = [copy.copy(model) for _ in range(4)]
        losses: dict[int, torch.Tensor] = {}

        def forward(index: int) -> None:
            losses[index] = replicas[index](batch()[4 * index : 4 * index + 4]).square().sum()

        threads = [threading.Thread(target=forward, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model.zero_grad()
        sum(losses[index] for index in range(4)).backward()  # type: ignore[union-attr]
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(
            torch.allclose(one, other, rtol=1e-3, atol=1e-4)
            for one, other in zip(found, expected, strict=True)
        )
        assert spool.store.ledger.is_empty
        assert saved_bytes(spool) > 900_000


def test_hooks_of_a_context_belong_to_its_thread(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        seen: list[int] = []

        def elsewhere() -> None:
            torch.randn(1000, requires_grad=True).tanh()
            seen.append(saved_bytes(spool))
            with spool:
                torch.randn(1000, requires_grad=True).tanh()
            seen.append(saved_bytes(spool))

        with spool:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert seen == [0, 4000]
        assert spool.report().step_count == 2
