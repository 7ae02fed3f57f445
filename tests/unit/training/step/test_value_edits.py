"""Edits of values in training passes, against hooks in plain torch: bit-equal on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, linear

from tests.support.models.checkpointed_nets import KINDS, Layers, Repeated
from tests.unit.training.trainers import (
    assert_same,
    batch_of,
    batches,
    core_of,
    net,
    run,
    tiny,
    value_edit,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard

pytestmark = pytest.mark.filterwarnings(  # of reentrant ones, in passes without gradients
    "ignore:None of the inputs have requires_grad:UserWarning"
)

VECTOR = np.random.default_rng(0).normal(size=8)
UNIT = torch.from_numpy(VECTOR / np.linalg.norm(VECTOR)).float()
TAKEN = np.random.default_rng(1).normal(size=(2, 8))
SGD = {"name": "sgd", "options": {"lr": 0.05, "momentum": 0.9}}
Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two layers, with dropout and a ReLU between them that write to their input, as statements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(0.3, inplace=True)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        self.drop(x)
        self.relu(x)
        return self.fc(x)


def steered(x: Tensor) -> Tensor:
    return x + torch.from_numpy(0.7 * VECTOR).float()


def projected(x: Tensor) -> Tensor:
    rows: Tensor = torch.linalg.qr(torch.from_numpy(TAKEN).T)[0].T.float()
    return x - (x @ rows.T) @ rows


def capped(x: Tensor) -> Tensor:
    component = (x @ UNIT)[..., None]
    return x + (component.clamp(None, 0.1) - component) * UNIT


EDITS: dict[str, tuple[dict[str, Any], Change]] = {
    "steer": ({"vectors": VECTOR, "alpha": 0.7}, steered),
    "project_out": ({"vectors": TAKEN}, projected),
    "cap": ({"vectors": VECTOR, "high": 0.1}, capped),
}


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return batches(count, shape=(6,))


def plain_losses(
    base: HostedModel, hook: Callable[[Any], object], count: int
) -> tuple[nn.Module, list[float]]:
    """Train in plain torch, with hooks that a function registers."""
    torch.manual_seed(0)
    model: Any = type(base.module)()
    model.load_state_dict(base.module.state_dict())
    model.train()
    hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    torch.manual_seed(3)
    for inputs, labels in pairs(count):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("selector", ["first", "fc/in"])
def test_steps_are_those_of_torch_with_a_hook(name: str, selector: str) -> None:
    options, change = EDITS[name]
    base = tiny(Net, (6,))
    core = core_of(base, optimizer=SGD, seed=3, edits=[value_edit(selector, name, **options)])

    def hook(model: Any) -> None:
        if selector == "first":
            model.first.register_forward_hook(lambda _, __, output: change(output))
        else:
            model.fc.register_forward_pre_hook(lambda _, taken: (change(taken[0]),))

    expected, losses = plain_losses(base, hook, 5)
    found = [result.loss for result in run(core, pairs(5))]
    if name == "steer":
        assert found == losses
        assert_same(core.module, expected)
        return
    assert found == pytest.approx(losses, rel=1e-6)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(core.module.state_dict()[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selector", ["relu/in", "relu", "drop/in", "drop"])
def test_what_a_module_writes_in_place_is_edited(selector: str) -> None:
    base = tiny(Net, (6,))
    core = core_of(base, optimizer=SGD, seed=3, edits=[value_edit(selector, "steer", VECTOR, alpha=0.7)])

    def hook(model: Any) -> None:
        path, _, port = selector.partition("/")

        def written(module: nn.Module, plain: Change) -> Change:
            def forward(x: Tensor) -> Tensor:
                result = plain(steered(x)) if port else steered(plain(x.clone()))
                return x.copy_(result)

            return forward

        module = model.get_submodule(path)
        module.forward = written(module, type(module)(*((0.3,) if path == "drop" else ())).forward)

    expected, losses = plain_losses(base, hook, 4)
    assert [result.loss for result in run(core, pairs(4))] == losses
    for key, value in expected.state_dict().items():
        assert torch.equal(core.module.state_dict()[key], value), key


@pytest.mark.parametrize("way", ["spec", *KINDS])
@pytest.mark.parametrize(
    "names", [{"block.1": "steer"}, dict(zip(("block", "block.2", "block.4/in"), EDITS, strict=True))]
)
def test_what_is_computed_again_is_edited_again(names: dict[str, str], way: str) -> None:
    results = []
    edits = [value_edit(selector, name, **EDITS[name][0]) for selector, name in names.items()]
    for is_on in (False, True):
        base = tiny(Layers, (6,))
        fields: dict[str, Any] = {"edits": edits}
        if is_on and way == "spec":
            fields["activation_checkpointing"] = ["block"]
        elif is_on:
            net(base).use_reentrant = KINDS[way]
        core = core_of(base, optimizer=SGD, seed=3, **fields)
        results.append((core, [result.loss for result in run(core, pairs(4))]))
    assert results[0][1] == results[1][1]
    assert_same(results[0][0].module, results[1][0].module)


def test_which_call_is_computed_again_must_be_known() -> None:
    base = tiny(Repeated, (6,))
    fields: dict[str, Any] = {"edits": [value_edit("block.1@1", "steer", VECTOR)]}
    (step,) = run(core_of(base, optimizer=SGD, **fields), pairs(1))
    assert step.is_update
    net(base).use_reentrant = False
    core = core_of(base, optimizer=SGD, **fields)
    before = {name: value.clone() for name, value in core.module.state_dict().items()}
    with pytest.raises(ServiceError, match=r"'block\.1' is called 3 times in a pass") as caught:
        run(core, pairs(1))
    assert caught.value.reason is ErrorReason.NOT_DIFFERENTIABLE
    assert all(torch.equal(before[name], value) for name, value in core.module.state_dict().items())


def test_losses_and_rules_at_an_edited_value_see_the_edit() -> None:
    base = tiny(Net, (6,))
    term = {"name": "l2_norm", "selector": "first"}
    rule = {"selector": "first/grad_out", "name": "scale", "options": {"factor": 0.5}}
    edits = [value_edit("first", "steer", VECTOR, alpha=0.7)]
    core = core_of(base, losses=[term], gradient_edits=[rule], edits=edits)
    inputs = pairs(1)[0][0]
    bias = net(base).first.bias.detach().clone().requires_grad_()
    loss = steered(linear(inputs, net(base).first.weight, bias)).square().mean()
    assert run(core, pairs(1))[0].loss == loss.item()
    (gradient,) = torch.autograd.grad(loss, [bias])
    torch.testing.assert_close(net(core).first.bias.detach(), (bias - 0.01 * 0.5 * gradient).detach())


def test_evaluation_is_not_edited() -> None:
    base, given = tiny(Net, (6,)), batch_of(pairs(1)[0])
    edited = core_of(base, edits=[value_edit("first", "steer", VECTOR, alpha=9.0)])
    plain = core_of(base)
    assert edited.evaluate(given, PassGuard()).loss == plain.evaluate(given, PassGuard()).loss
    assert run(edited, pairs(1))[0].loss != run(plain, pairs(1))[0].loss


@pytest.mark.parametrize("name", EDITS)
def test_a_spool_changes_nothing(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "optimizer": SGD,
        "seed": 3,
        "edits": [value_edit("first", name, **EDITS[name][0])],
    }
    spool: dict[str, Any] = {"saved_tensors": {"store": "spool", "budget_bytes": 0, "min_bytes": 0}}
    cores = [core_of(tiny(Net, (6,)), tmp_path, **fields, **more) for more in ({}, spool)]
    losses = [[result.loss for result in run(core, pairs(3))] for core in cores]
    assert losses[0] == losses[1]
    assert_same(cores[0].module, cores[1].module)
    for core in cores:
        core.close()


@pytest.mark.parametrize("name", EDITS)
def test_autocast_leaves_the_precision_of_edits(name: str) -> None:
    options, change = EDITS[name]
    base = tiny(Net, (6,))
    core = core_of(base, precision="bf16", seed=3, edits=[value_edit("first", name, **options)])
    inputs, labels = pairs(1)[0]
    torch.manual_seed(3)
    model = net(base)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        value = model.first(inputs)
        with torch.autocast("cpu", enabled=False):
            edited = change(value.float()).bfloat16()
        expected = cross_entropy(model.fc(dropout(edited, 0.3).relu()), labels)
    assert run(core, [(inputs, labels)])[0].loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (value_edit("first", "steer", np.ones(3)), "direction of shape"),
        (value_edit("firsst", "steer", VECTOR), "no module 'firsst'; nearest: first"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit: dict[str, Any], words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        core_of(tiny(Net, (6,)), edits=[edit])
