"""Gradients at any module, against torch's own hooks on a model without in-place modules."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18, squeezenet1_1
from torchvision.models.mobilenetv3 import InvertedResidual
from torchvision.models.resnet import BasicBlock

from tests.support.servers.footprint import hook_count
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    EditTarget,
    GradientPoint,
    GradientSession,
    PassAborted,
    PassGuard,
    Target,
    parse_selector,
    record_calls,
    resolve,
)
from trocar_server.tensors.edits import Add, Clamp, Edit, Scale

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def built(kind: Any) -> Any:
    torch.manual_seed(3)
    model: nn.Module = kind(num_classes=7).eval().requires_grad_(False)
    return model


def without_in_place(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    modules: list[Any] = list(plain.modules())
    for module in modules:
        if hasattr(module, "inplace"):
            module.inplace = False
    return plain


def targets(model: nn.Module, *selectors: str) -> list[Target]:
    recording = record_calls(copy.deepcopy(model).to("meta"), [IMAGES.to("meta")])
    found = resolve(map(parse_selector, selectors), recording)
    return [target for values in found for target, _ in values]


def gradients_by_torch(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient at every output and input of every call, as full backward hooks tell it."""
    found: dict[str, torch.Tensor] = {}
    plain: Any = without_in_place(model)
    counts: dict[str, list[int]] = {}

    def register(path: str, module: nn.Module) -> None:
        def seen(_: nn.Module, grad_in: Any, grad_out: Any) -> None:  # backward sees the last call first
            call = counts[path].pop()
            found[f"{path} {call} out"], found[f"{path} {call} in"] = grad_out[0], grad_in[0]

        def called(*_: object) -> None:
            counts.setdefault(path, []).append(len(counts.get(path, [])))

        module.register_forward_pre_hook(called)
        module.register_full_backward_hook(seen)

    for path, module in plain.named_modules():
        register(path, module)
    plain(IMAGES.clone().requires_grad_()).select(1, 3).sum().backward()
    return found


def added_apart(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As torchvision's forward, without `+=`, beside which a full backward hook fails."""
    result: torch.Tensor = self.block(x)
    return result + x if self.use_res_connect else result


def added_apart_in_resnet(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As torchvision's forward, without `+=`."""
    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    result: torch.Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
    return result


@pytest.mark.parametrize("kind", [resnet18, mobilenet_v3_small, squeezenet1_1])
def test_gradients_at_every_call_are_those_of_full_backward_hooks(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(kind)
    wanted = targets(model, "**/grad_out", "/grad_out", "**/grad_in", "/grad_in")
    before = hook_count(model)
    with GradientSession(model, [GradientPoint(target) for target in wanted]) as session:
        score = model(IMAGES).select(1, 3).sum()
    session.backward(score)
    monkeypatch.setattr(InvertedResidual, "forward", added_apart)
    monkeypatch.setattr(BasicBlock, "forward", added_apart_in_resnet)
    expected = gradients_by_torch(model)
    assert len(wanted) == len(session.values) == len(expected)
    for target in wanted:
        theirs = expected[f"{target.path} {target.call} {target.port}"]
        torch.testing.assert_close(session.values[target.name], theirs, rtol=0, atol=0)
    assert hook_count(model) == before


def test_the_graph_begins_at_the_first_value_that_is_wanted() -> None:
    model = built(resnet18)
    points = [GradientPoint(target) for target in targets(model, "layer4/grad_out")]
    seen: list[bool] = []
    model.layer3.register_forward_hook(lambda *a: seen.append(a[2].requires_grad))
    with GradientSession(model, points) as session:
        score = model(IMAGES).sum()
    assert seen == [False]
    session.backward(score)
    assert session.values["layer4/grad_out"].shape == (2, 512, 1, 1)


def test_gradients_of_parameters_leave_them_as_they_were() -> None:
    model = built(resnet18)
    wanted = targets(model, "**/param_grad(*)")
    tensors = [id(parameter) for parameter in model.parameters()]
    with GradientSession(model, [GradientPoint(target) for target in wanted]) as session:
        score = model(IMAGES).square().sum()
    session.backward(score)
    theirs: Any = without_in_place(model).requires_grad_(True)
    theirs(IMAGES).square().sum().backward()
    assert [id(parameter) for parameter in model.parameters()] == tensors
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    named = dict(theirs.named_parameters())
    assert len(session.values) == len(named)
    for target in wanted:
        expected = named[f"{target.path}.{target.parameter}"].grad
        torch.testing.assert_close(session.values[target.name], expected, rtol=0, atol=0)


def test_modules_before_an_edit_see_the_changed_gradient() -> None:
    """Guided backpropagation, against ReLUs that do the same in their backward."""
    model = built(resnet18)
    edits = [
        GradientPoint(target, EditTarget(target, Edit(Clamp(0.0, None)), position=0))
        for target in targets(model, "**:ReLU/grad_out")
    ]
    (at_input,) = targets(model, "/grad_in")
    with GradientSession(model, [GradientPoint(at_input), *edits]) as session:
        score = model(IMAGES).select(1, 3).sum()
    session.backward(score)
    plain: Any = without_in_place(model)
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.register_full_backward_hook(_clamped)
    leaf = IMAGES.clone().requires_grad_()
    plain(leaf).select(1, 3).sum().backward()
    torch.testing.assert_close(session.values[at_input.name], leaf.grad)


def _clamped(_: nn.Module, grad_in: Any, __: Any) -> tuple[torch.Tensor]:
    return (grad_in[0].clamp(min=0),)


@pytest.mark.parametrize(("is_after", "factor"), [(False, 6.0), (True, 1.0)])
def test_what_is_collected_stands_between_edits(is_after: bool, factor: float) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(False)
    first, second = Target("a", "0", 0, is_gradient=True), Target("in", "", 0, "in", (0,), is_gradient=True)
    steps = [
        GradientPoint(first, EditTarget(first, Edit(Scale(scale)), position=place), is_after)
        for place, scale in enumerate((2.0, 3.0))
    ]
    with GradientSession(model, [GradientPoint(first), GradientPoint(second), *steps]) as session:
        score = model(torch.ones(1, 3)).sum()
    session.backward(score)
    at_first = model[1].weight.sum(dim=0)
    torch.testing.assert_close(session.values["a"][0], factor * at_first)
    torch.testing.assert_close(session.values["in"][0], 6 * at_first @ model[0].weight)


class Aliases(nn.Module):
    """Returns what its last module returned, and reads a tensor after an in-place module wrote to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Identity())
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inner(x)
        y = self.relu(x)
        return x * 2 + y  # both are what the ReLU left


def test_a_tensor_that_an_in_place_module_wrote_to_stays_what_others_read() -> None:
    torch.manual_seed(0)
    model: Any = Aliases().requires_grad_(False)
    rows = torch.randn(4, 3)
    point = Target("relu in", "relu", 0, "in", (0,), is_gradient=True)
    with GradientSession(model, [GradientPoint(point)]) as session:
        output = model(rows)
    session.backward(output.sum())
    hidden = model.inner(rows)
    assert torch.equal(output, 3 * hidden.relu())
    torch.testing.assert_close(session.values["relu in"], 3.0 * (hidden > 0))


def test_one_tensor_under_two_names_has_one_gradient_and_edits_in_list_order() -> None:
    model: Any = Aliases().requires_grad_(False)
    container, child = (Target(n, n, 0, is_gradient=True) for n in ("inner", "inner.1"))
    edit = GradientPoint(child, EditTarget(child, Edit(Scale(2.0))))
    with GradientSession(model, [GradientPoint(container), GradientPoint(child), edit]) as session:
        output = model(torch.ones(1, 3))
    session.backward(output.sum())
    assert torch.equal(session.values["inner"], session.values["inner.1"])


def test_what_the_objective_does_not_depend_on_is_said() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(False)
    with GradientSession(model, [GradientPoint(Target("last", "1", 0, is_gradient=True))]) as session:
        model(torch.ones(1, 3))
    with pytest.raises(ServiceError) as caught:
        session.backward(torch.tensor(1.0))
    assert caught.value.reason is ErrorReason.NOT_DIFFERENTIABLE
    assert "'last'" in caught.value.message


def test_integers_have_no_gradient() -> None:
    model = nn.Embedding(4, 3).requires_grad_(False)
    target = Target("tokens", "", 0, "in", (0,), is_gradient=True)
    with GradientSession(model, [GradientPoint(target)]), pytest.raises(ServiceError) as caught:
        model(torch.tensor([1, 2]))
    assert caught.value.reason is ErrorReason.NOT_DIFFERENTIABLE


def test_a_second_derivative_goes_through_an_anchor() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).requires_grad_(False)
    weight, start = Target("w", "0", 0, "param(weight)"), Target("x", "", 0, "in", (0,))
    rows = torch.randn(5, 3)
    with GradientSession(model, [GradientPoint(weight)], [start]) as session:
        output = model(rows)
    penalty = session.gradient(output.sum(), "x").square().sum()
    session.backward(penalty)
    copied: Any = copy.deepcopy(model).requires_grad_(True)
    leaf = rows.clone().requires_grad_()
    (inner,) = torch.autograd.grad(copied(leaf).sum(), leaf, create_graph=True)
    inner.square().sum().backward()
    torch.testing.assert_close(session.values["w"], copied[0].weight.grad)


def test_the_guard_stops_the_backward_pass() -> None:
    model = built(resnet18)
    guard = PassGuard()
    before = hook_count(model)
    points = [GradientPoint(target) for target in targets(model, "/grad_in")]
    with GradientSession(model, points, guard=guard) as session:
        score = model(IMAGES).sum()
    guard.cancel()
    with pytest.raises(PassAborted):
        session.backward(score)
    assert not session.values
    assert hook_count(model) == before


class Passing(nn.Module):
    """Convolution, something that returns what it gets, then something that may write to that."""

    def __init__(self, passing: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.passing = passing
        self.last = last

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.passing(self.conv(x)))


@pytest.mark.parametrize("last", [nn.ReLU(), nn.ReLU(inplace=True)], ids=["apart", "in-place"])
@pytest.mark.parametrize(
    "passing",
    [nn.Identity(), nn.Dropout(), nn.Sequential(nn.Identity())],
    ids=["identity", "dropout", "nested"],
)
@pytest.mark.parametrize("with_conv", [False, True], ids=["begins-there", "begins-before"])
def test_the_output_of_a_module_that_returns_its_input_is_edited_first(
    passing: nn.Module, last: nn.Module, with_conv: bool
) -> None:
    model = Passing(passing, last).eval().requires_grad_(False)
    before, after = targets(model, "passing/grad_in", "passing/grad_out")
    points = [
        GradientPoint(before, EditTarget(before, Edit(Add(1.0)), position=0)),
        GradientPoint(after, EditTarget(after, Edit(Scale(2.0)), position=1)),
        *(GradientPoint(target) for target in (before, after)),
    ]
    at_conv = targets(model, "conv/grad_out")
    with GradientSession(model, points + [GradientPoint(conv) for conv in at_conv * with_conv]) as session:
        output = model(IMAGES)
    session.backward(output.sum())
    gradient = (model.conv(IMAGES) > 0).float()
    assert torch.equal(session.values[after.name], gradient * 2)
    assert torch.equal(session.values[before.name], gradient * 2 + 1)
    assert torch.equal(output, model.conv(IMAGES).relu())
    if with_conv:
        assert torch.equal(session.values[at_conv[0].name], gradient * 2 + 1)


class Strides(nn.Module):
    """Passes on a value whose strides tell that its channels lie together, though the batch is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.seen = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.seen(y) * 1


@pytest.mark.parametrize("places", [["seen/grad_in"], ["conv/grad_out", "seen/grad_in", "seen/grad_out"]])
def test_a_value_whose_gradient_is_seen_keeps_its_strides(places: list[str]) -> None:
    """torch chooses kernels by strides; `view_as` changes that of a dimension of size 1 (torch 2.14)."""
    model: Any = Strides().requires_grad_(False)
    strides: list[tuple[int, ...]] = []
    model.seen.register_forward_hook(
        lambda _, args, output: strides.append(args[0].stride() + output.stride())
    )
    model(IMAGES[:1])
    with GradientSession(model, [GradientPoint(target) for target in targets(model, *places)]):
        model(IMAGES[:1])
    assert strides[0] == strides[-1]


class Branching(nn.Module):
    """A convolution and a branch that returns what it gets, as an empty shortcut does."""

    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.conv = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        return (self.conv(x) + 2 * self.shortcut(x)).tanh()


SHORTCUTS: Any = {
    "identity": nn.Identity,
    "empty": nn.Sequential,
    "nested": lambda: nn.Sequential(nn.Identity()),
}


@pytest.mark.parametrize("beside", [(), ("/grad_in",), ("stem/grad_out",), ("shortcut/grad_in", "/grad_in")])
@pytest.mark.parametrize("kind", SHORTCUTS)
def test_the_gradient_at_a_module_that_returns_its_input_is_that_of_its_branch(
    kind: str, beside: tuple[str, ...]
) -> None:
    model = Branching(SHORTCUTS[kind]()).eval().requires_grad_(False)
    expected: list[torch.Tensor] = []

    def note(_: nn.Module, __: Any, given: Any) -> None:
        expected.append(given[0])

    handle = model.shortcut.register_full_backward_hook(note)
    model(IMAGES.clone().requires_grad_()).sum().backward()
    handle.remove()
    points = [GradientPoint(target) for target in targets(model, *beside, "shortcut/grad_out")]
    with torch.enable_grad(), GradientSession(model, points) as session:
        output = model(IMAGES)
    session.backward(output.sum())
    assert torch.allclose(session.values["shortcut/grad_out"], expected[0], atol=1e-6)


@pytest.mark.parametrize("kind", SHORTCUTS)
def test_an_edit_at_a_module_that_returns_its_input_leaves_other_branches_alone(kind: str) -> None:
    model = Branching(SHORTCUTS[kind]()).eval().requires_grad_(False)
    leaf = IMAGES.clone().requires_grad_()
    hidden = model.stem(leaf)
    (model.conv(hidden) + 2 * hidden.detach()).tanh().sum().backward()
    at_input, at_shortcut = targets(model, "/grad_in", "shortcut/grad_out")
    cut = GradientPoint(at_shortcut, EditTarget(at_shortcut, Edit(Scale(0.0))))
    with torch.enable_grad(), GradientSession(model, [GradientPoint(at_input), cut]) as session:
        output = model(IMAGES)
    session.backward(output.sum())
    assert leaf.grad is not None
    assert torch.allclose(session.values["/grad_in"], leaf.grad, atol=1e-6)
