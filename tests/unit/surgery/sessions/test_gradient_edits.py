"""Rules on gradients of parameters and of values, against hooks written by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models.notebook_nets import two_layers
from tests.support.models.tiny_models import Plain
from trocar_server.models import make_meta_replica
from trocar_server.surgery import Recording, Target, parse_selector, record_calls, resolve
from trocar_server.surgery.sessions.gradient_changes import make_change
from trocar_server.surgery.sessions.gradient_edits import GradientEdit, GradientEditSession

CLAMP = make_change("clamp", {"low": -0.01, "high": 0.01})
DOUBLE = make_change("scale", {"factor": 2.0})
ZERO = make_change("zero", {})


def _targets(model: nn.Module, *selectors: str, shape: Sequence[int] = (1, 3, 8, 8)) -> tuple[Target, ...]:
    recording: Recording = record_calls(make_meta_replica(model), (torch.empty(shape, device="meta"),))
    found = resolve([parse_selector(text) for text in selectors], recording)
    return tuple(target for values in found for target, _ in values)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _plain() -> tuple[Plain, Tensor]:
    torch.manual_seed(0)
    return Plain(), torch.randn(4, 3, 8, 8)


def _run(model: nn.Module, rules: Sequence[GradientEdit], x: Tensor) -> GradientEditSession:
    with GradientEditSession(model, rules) as session:
        model(x).square().sum().backward()
    return session


def test_rules_on_parameters_act_in_their_order_before_accumulation() -> None:
    mine, x = _plain()
    theirs, _ = _plain()
    rules = [GradientEdit(CLAMP, ("fc.weight", "fc.bias")), GradientEdit(DOUBLE, ("fc.weight",))]
    _run(mine, rules, x)
    session = _run(mine, rules, x)
    handles = [
        theirs.fc.weight.register_hook(lambda g: g.clamp(-0.01, 0.01) * 2),
        theirs.fc.bias.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    ]
    for _ in range(2):
        theirs(x).square().sum().backward()
    assert handles
    assert _same(_gradients(mine), _gradients(theirs))
    assert float(mine.fc.bias.grad.abs().max()) > 0.01  # type: ignore[union-attr]
    assert session.seen == [25, 20]


def test_changed_elements_are_counted_by_rule() -> None:
    model, x = _plain()
    model(x).square().sum().backward()
    own = torch.cat([p.grad.flatten() for p in model.fc.parameters() if p.grad is not None])
    session = _run(
        model, [GradientEdit(CLAMP, ("fc.weight", "fc.bias")), GradientEdit(CLAMP, ("fc.bias",))], x
    )
    assert session.changed == [int((own.abs() > 0.01).sum()), 0]


def test_nan_passes_through_a_clamp_and_is_not_counted() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with GradientEditSession(layer, [GradientEdit(CLAMP, ("weight",))]) as session:
        (layer(torch.tensor([[1.0, float("nan")]])).sum() * 1.0).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isnan().tolist() == [[False, True], [False, True]]
    assert (session.changed, session.seen) == ([2], [4])


def test_the_notebooks_clamp_makes_every_bias_gradient_one() -> None:
    net, x = two_layers()
    net.requires_grad_()
    rule = GradientEdit(
        make_change("clamp", {"low": -1.0, "high": 1.0}), tuple(n for n, _ in net.named_parameters())
    )
    with GradientEditSession(net, [rule]):
        (net(x).sum() * 5).backward()
    gradients = _gradients(net)
    assert gradients["fc2.bias"].tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("selector", "by_hand"),
    [
        ("conv2/grad_out", lambda m, g: m.conv2.register_forward_hook(lambda *a: _hooked(a[2], g))),
        ("pool/grad_out", lambda m, g: m.pool.register_forward_hook(lambda *a: _hooked(a[2], g))),
        ("fc/grad_out", lambda m, g: m.fc.register_forward_hook(lambda *a: _hooked(a[2], g))),
        ("/grad_out", lambda m, g: m.register_forward_hook(lambda *a: _hooked(a[2], g))),
        ("fc/grad_in", lambda m, g: m.fc.register_forward_pre_hook(lambda *a: _hooked(a[1][0], g))),
    ],
)
@pytest.mark.parametrize("change", [CLAMP, DOUBLE, ZERO])
def test_a_rule_on_a_value_acts_as_a_tensor_hook_there(selector: str, by_hand: Any, change: Any) -> None:
    mine, x = _plain()
    theirs, _ = _plain()
    session = _run(mine, [GradientEdit(change, targets=_targets(mine, selector))], x)
    by_hand(theirs, change)
    theirs(x).square().sum().backward()
    assert _same(_gradients(mine), _gradients(theirs))
    assert session.seen[0] > 0


def _hooked(value: Tensor, change: Any) -> None:
    value.register_hook(change)


def test_an_in_place_module_called_twice_has_a_gradient_at_each_call() -> None:
    """By hand without in-place modules, where each value is a tensor of its own."""
    mine, x = _plain()
    theirs, _ = _plain()
    session = _run(
        mine, [GradientEdit(DOUBLE, targets=_targets(mine, "relu@0/grad_in", "relu@1/grad_out"))], x
    )
    first = theirs.conv(x)
    first.register_hook(lambda g: g * 2)
    second = torch.relu(theirs.conv2(torch.relu(first)))
    second.register_hook(lambda g: g * 2)
    theirs.fc(theirs.pool(second).flatten(1)).square().sum().backward()
    assert _same(_gradients(mine), _gradients(theirs))
    assert session.seen == [2 * 4 * 4 * 64]


class Same(nn.Module):
    """A module that returns its input, between two layers, and one that adds what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.same = nn.Identity()
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.last(self.same(h)) + h.sum()


def test_the_gradient_at_an_input_is_that_of_this_module_alone() -> None:
    torch.manual_seed(0)
    model = Same()
    x = torch.randn(2, 3)
    targets = _targets(model, "same/grad_in", shape=(1, 3))
    with GradientEditSession(model, [GradientEdit(ZERO, targets=targets)]):
        model(x).sum().backward()
    # What is left of the gradient comes by `h.sum()`, twice, once for each row.
    assert torch.allclose(model.first.bias.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]


class _Shortcut(nn.Module):
    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.branch, self.shortcut = nn.Linear(3, 3), nn.Linear(3, 3), shortcut

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        return self.branch(x) + self.shortcut(x)


@pytest.mark.parametrize("shortcut", [nn.Identity(), nn.Sequential(), nn.Sequential(nn.Identity())])
def test_a_rule_at_a_module_that_returns_its_input_leaves_other_branches_alone(shortcut: nn.Module) -> None:
    mine, theirs, x = _Shortcut(shortcut), _Shortcut(nn.Identity()), torch.randn(2, 3)
    target = Target("shortcut/grad_out", "shortcut", 0, is_gradient=True)
    _run(mine, [GradientEdit(ZERO, targets=(target,))], x)
    hidden = theirs.stem(x)
    (theirs.branch(hidden) + hidden.detach()).square().sum().backward()
    assert _same(_gradients(mine), _gradients(theirs))


def test_two_rules_at_one_tensor_under_two_names_act_in_the_order_of_the_list() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), nn.Flatten())
    x = torch.randn(2, 3)
    shift = GradientEdit(lambda g: g + 1, targets=_targets(model, "0/grad_out", shape=(1, 3)))
    double = GradientEdit(DOUBLE, targets=_targets(model, "0.1/grad_out", shape=(1, 3)))
    found = []
    for rules in ([shift, double], [double, shift]):
        model.zero_grad()
        with GradientEditSession(model, rules):
            model(x).sum().backward()
        found.append(_gradients(model)["0.1.bias"].tolist())
    assert found == [[8.0, 8.0], [6.0, 6.0]]  # (1 + 1) * 2 and 1 * 2 + 1 for each of two rows


def test_at_a_value_that_nothing_trained_influences_a_rule_does_nothing() -> None:
    model, x = _plain()
    model.conv.requires_grad_(False)
    session = _run(model, [GradientEdit(ZERO, targets=_targets(model, "conv/grad_out", "conv2/grad_in"))], x)
    assert (session.changed, session.seen) == ([0], [0])
    assert "conv.weight" not in _gradients(model)
    assert _gradients(model)["conv2.weight"].any()


def _hook_count(model: nn.Module) -> int:
    count = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return count + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_gone_after_the_session_and_after_a_failure() -> None:
    model, x = _plain()
    model.fc.register_forward_hook(lambda *_: None)
    rules = [GradientEdit(CLAMP, ("fc.weight",), _targets(model, "conv2/grad_out"))]
    before = _hook_count(model)
    _run(model, rules, x)
    with pytest.raises(RuntimeError), GradientEditSession(model, rules):
        model(torch.zeros(1, 5, 8, 8))
    with pytest.raises(KeyError), GradientEditSession(model, [*rules, GradientEdit(CLAMP, ("nothing",))]):
        raise AssertionError
    assert _hook_count(model) == before


def test_a_session_is_fit_for_one_pass_and_leaves_others_alone() -> None:
    model, x = _plain()
    model(x).square().sum().backward()
    plain = _gradients(model)
    _run(model, [GradientEdit(ZERO, targets=_targets(model, "fc/grad_out"))], x)
    model.zero_grad()
    model(x).square().sum().backward()
    assert _same(_gradients(model), plain)


def test_noise_on_gradients_is_repeated_by_its_seed() -> None:
    found = []
    for _ in range(2):
        model, x = _plain()
        torch.manual_seed(7)
        _run(model, [GradientEdit(make_change("noise", {"scale": 0.1}), ("fc.bias", "conv.weight"))], x)
        found.append(_gradients(model))
    assert _same(*found)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x))


@pytest.mark.parametrize(
    "selector", ["block.0/grad_out", "block.1/grad_in", "block.2/grad_in", "block/grad_out"]
)
def test_a_rule_inside_a_checkpointed_block_acts_once(selector: str) -> None:
    found, counts = [], []
    for mode in (True, False):
        torch.manual_seed(0)
        model, x = Checkpointed().eval(), torch.randn(5, 3)
        rule = GradientEdit(DOUBLE, targets=_targets(model, selector, shape=(1, 3)))
        session = _run(model.train(mode), [rule], x)
        found.append(_gradients(model))
        counts.append(session.changed)
    assert _same(*found)
    assert counts[0] == counts[1]


def test_on_a_resnet_rules_are_those_of_hooks_on_parameters() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torchvision.models.resnet18(num_classes=5))
    x = torch.rand(2, 3, 64, 64)
    change = make_change("clamp", {"low": -0.1, "high": 0.1})
    names = tuple(name for name, _ in models[0].named_parameters())
    session = _run(models[0], [GradientEdit(change, names)], x)
    for parameter in models[1].parameters():
        parameter.register_hook(lambda g: g.clamp(-0.1, 0.1))
    models[1](x).square().sum().backward()
    assert _same(_gradients(models[0]), _gradients(models[1]))
    assert session.seen == [sum(p.numel() for p in models[0].parameters())]
    assert session.changed[0] > 0


@pytest.mark.parametrize("selector", ["1/grad_in", "0/grad_out", "1/grad_out"])
def test_a_dropout_that_works_in_place_in_train_mode_only_keeps_no_rule_from_acting(selector: str) -> None:
    """The pass that selectors are looked up in is one in eval mode, where nothing is written in place."""
    found = []
    for change in (ZERO, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(3, 2)).eval()
        targets = _targets(model, selector, shape=(1, 3))
        x = torch.randn(4, 3, requires_grad=True)
        rules = [] if change is None else [GradientEdit(change, targets=targets)]
        with GradientEditSession(model.train(), rules):
            torch.manual_seed(1)
            model(x * 2).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert not found[0].any()
    assert found[1].any()
