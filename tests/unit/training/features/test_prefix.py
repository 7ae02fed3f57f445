import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from trocar_server.training.features.prefix import NoSplitError, Split, split_prefix
from trocar_server.training.features.trial_run import undone
from trocar_server.training.model.modes import set_modes


def ready(module: nn.Module, *trained: str) -> nn.Module:
    """Freeze all but the named parts and set the modes of a trainer."""
    names = [
        name
        for name, _ in module.named_parameters()
        if any(name == part or name.startswith(f"{part}.") for part in trained)
    ]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    set_modes(module, names, ())
    return module


def cut(module: nn.Module, x: Tensor, **fields: Any) -> Split:
    return split_prefix(module, (x,), (x[:-1],), **fields)


def both(module: nn.Module, split: Split, x: Tensor) -> tuple[Any, Any]:
    """Return output, gradients and buffers of the whole and of the tail."""
    results = []
    for is_tail in (False, True):
        with undone(module):
            torch.manual_seed(3)
            if is_tail:
                features = [value.clone() for value in split.prefix(x)]
                with split.in_place_of(module):
                    output = module(*features)
            else:
                output = module(x)
            leaves = list(output.values()) if isinstance(output, dict) else [output]
            leaves = list(leaves[0]) if isinstance(leaves[0], tuple) else leaves
            torch.stack([leaf.square().sum() for leaf in leaves if leaf.requires_grad]).sum().backward()
            results.append(
                [
                    *[leaf.detach() for leaf in leaves],
                    *[p.grad.clone() for p in module.parameters() if p.grad is not None],
                    *[buffer.clone() for buffer in module.buffers()],
                ]
            )
            module.zero_grad()
    return results[0], results[1]


def assert_exact(module: nn.Module, split: Split, x: Tensor) -> None:
    whole, tail = both(module, split, x)
    assert len(whole) == len(tail)
    assert all(torch.equal(a, b) for a, b in zip(whole, tail, strict=True))
    assert "forward" not in vars(module)


MODELS = [
    ("resnet18", ["fc"], 1),
    ("resnet18", ["layer4", "fc"], 1),
    ("resnet18", ["layer4.1.conv2"], 2),
    ("resnet18", ["layer4.0.downsample"], 2),
    ("mobilenet_v3_small", ["classifier"], 1),
    ("densenet121", ["features.denseblock4", "classifier"], 1),
    ("squeezenet1_0", ["classifier"], 1),
    ("shufflenet_v2_x0_5", ["fc"], 1),
    ("vit", ["heads"], 1),
    ("vit", ["encoder.layers.encoder_layer_1", "heads"], 1),
    ("swin_t", ["features.7", "head"], 1),
    ("googlenet", ["fc"], 3),
]


def build(name: str) -> nn.Module:
    if name == "vit":
        vit: nn.Module = torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=5)
        return vit
    options = {"init_weights": False} if name == "googlenet" else {}
    module: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
    return module


@pytest.mark.parametrize(("name", "trained", "count"), MODELS, ids=str)
def test_torchvision_models_are_cut_exactly(name: str, trained: list[str], count: int) -> None:
    torch.manual_seed(0)
    module = ready(build(name), *trained)
    x = torch.rand(3, 3, 64, 64)

    split = cut(module, x)

    assert len(split.names) == count
    assert_exact(module, split, x)


class Chain(nn.Module):
    """Three layers and whatever a test does between them."""

    first: Any
    second: Any
    drop: Any
    norm: Any
    noise: Any
    block: Any

    def __init__(self, between: Callable[["Chain", Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)
        self.gain = nn.Parameter(torch.zeros(6))
        for name, part in parts.items():
            self.add_module(name, part)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self, self.first(x)))
        return result


def chain(between: Callable[[Chain, Tensor], Tensor], *trained: str, **parts: nn.Module) -> Chain:
    torch.manual_seed(0)
    module = Chain(between, **parts)
    ready(module, *(trained or ("last",)))
    return module


X = torch.linspace(-2, 2, 30).reshape(5, 6)


def test_cut_comes_right_before_what_is_trained() -> None:
    module = chain(lambda m, x: m.second(x).relu())
    split = cut(module, X)
    assert split.prefix_modules == ("first", "second")
    assert_exact(module, split, X)


def test_what_is_trained_from_the_first_layer_on_has_no_prefix() -> None:
    with pytest.raises(NoSplitError, match="no frozen module"):
        cut(chain(lambda m, x: x, "first"), X)


def test_dropout_in_train_mode_belongs_to_the_tail() -> None:
    module = chain(lambda m, x: m.second(m.drop(x)), drop=nn.Dropout(0.5))
    assert module.drop.training
    split = cut(module, X)
    assert split.prefix_modules == ("first",)
    assert_exact(module, split, X)


@pytest.mark.parametrize(
    "draw",
    [
        lambda m, x: F.dropout(x, 0.5, training=m.training),
        lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda m, x: torch.normal(x),
        lambda m, x: x + torch.zeros_like(x).exponential_(),
    ],
    ids=["dropout", "bernoulli", "normal", "exponential"],
)
def test_random_functions_belong_to_the_tail(draw: Callable[[Chain, Tensor], Tensor]) -> None:
    module = chain(lambda m, x: m.second(draw(m, x)))
    split = cut(module, X)
    assert split.prefix_modules == ("first",)
    assert_exact(module, split, X)


@pytest.mark.parametrize(
    "draw", [lambda: torch.randn(6), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)
def test_models_that_draw_without_their_input_are_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(NoSplitError, match="random"):
        cut(chain(lambda m, x: m.second(x + draw())), X)


class PythonNoise(nn.Module):
    """Random by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class OwnNoise(nn.Module):
    """Random without a name that says so, in train mode or not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).log_normal_() if x.dim() else x


@pytest.mark.parametrize("noise", [OwnNoise, PythonNoise])
def test_random_module_that_nobody_knows_is_found_by_running(noise: type[nn.Module]) -> None:
    split = cut(chain(lambda m, x: m.second(m.noise(x)), noise=noise()), X)
    assert split.prefix_modules == ("first",)


def test_batch_norm_in_train_mode_belongs_to_the_tail() -> None:
    module = chain(lambda m, x: m.second(m.norm(x)), norm=nn.BatchNorm1d(6))
    assert cut(module, X).prefix_modules == ("first", "norm", "second")
    set_modes(module, ["last.weight", "last.bias"], ("norm",))
    split = cut(module, X)
    assert split.prefix_modules == ("first",)
    assert_exact(module, split, X)


def test_in_place_write_into_a_crossing_value_is_exact() -> None:
    module = chain(lambda m, x: m.second(x).add_(m.gain), "gain", "last")
    split = cut(module, X)
    assert split.overwrites
    assert_exact(module, split, X)


def writes_first(m: Chain, x: Tensor) -> Tensor:
    x.add_(m.gain)  # zeros now, and something else after the first step
    result: Tensor = m.second(x)
    return result


def test_frozen_part_that_reads_what_the_trained_part_wrote_belongs_to_the_tail() -> None:
    module = chain(writes_first, "gain", "last")
    split = cut(module, X)
    assert split.prefix_modules == ("first",)
    assert_exact(module, split, X)


def test_frozen_part_that_reads_what_the_trained_part_wrote_is_refused_without_gradients() -> None:
    module = chain(writes_first, "gain", "last").requires_grad_(False)
    with torch.no_grad(), pytest.raises(NoSplitError, match="wrote in place"):
        cut(module, X, moving=["", "last"])


def test_frozen_part_that_overwrites_what_the_trained_part_reads_is_refused() -> None:
    def between(m: Chain, x: Tensor) -> Tensor:
        scaled = x * m.gain
        x.relu_()
        result: Tensor = scaled + m.second(x)
        return result

    with pytest.raises(NoSplitError, match="overwrites in place"):
        cut(chain(between, "gain", "last"), X)


def test_two_names_of_one_memory_that_is_written_are_refused() -> None:
    def between(m: Chain, x: Tensor) -> Tensor:
        view = x.view(-1, 6)
        x.add_(m.gain)
        return x + view.mul(2)

    with pytest.raises(NoSplitError):
        cut(chain(between, "gain", "last"), X)


def test_sizes_of_the_batch_are_computed_in_the_tail() -> None:
    module = chain(lambda m, x: m.second(x).reshape(x.shape[0], -1) * m.gain * x.size(0), "gain", "last")
    split = cut(module, X)
    assert_exact(module, split, X)
    assert_exact(module, split, X[:2])


def test_sizes_that_never_change_are_constants() -> None:
    module = chain(lambda m, x: m.second(x) * m.gain * x.shape[-1], "gain", "last")
    split = cut(module, X)
    assert len(split.names) == 1
    assert_exact(module, split, X)


def test_values_without_a_row_for_each_sample_do_not_cross() -> None:
    module = chain(lambda m, x: m.second(x).repeat(2, 1)[: x.shape[0]] * m.gain, "gain", "last")
    split = cut(module, X)
    assert all(value.shape[0] == len(X) for value in split.prefix(X))
    assert_exact(module, split, X)


def test_frozen_weights_in_the_tail_are_the_modules_own() -> None:
    module = chain(lambda m, x: x * m.gain * 2, "last")
    split = cut(module, X)
    module.gain.data.fill_(3.0)
    assert_exact(module, split, X)


def test_hooks_of_modules_that_are_needed_run() -> None:
    module = chain(lambda m, x: m.block(m.second(x)), block=nn.Sequential(nn.ReLU(), nn.Tanh()))
    split = cut(module, X, needed=["block.0"])
    seen: list[Tensor] = []
    hook = module.get_submodule("block.0").register_forward_hook(lambda m, i, out: seen.append(out.clone()))
    with hook, split.in_place_of(module):
        module(*split.prefix(X))
    assert split.prefix_modules == ("first", "second")
    assert torch.equal(seen[0], module.second(module.first(X)).relu())


def test_hooks_of_a_trained_container_run() -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    module = chain(lambda m, x: m.block(m.second(x)), "block.2", "last", block=block)
    calls: list[str] = []
    split = cut(module, X, needed=["block.2"])
    hook = module.get_submodule("block.2").register_forward_hook(lambda *_: calls.append("block.2"))
    with hook, split.in_place_of(module):
        module(*split.prefix(X))
    assert calls == ["block.2"]
    assert "block.0" in split.prefix_modules
    assert_exact(module, split, X)


def test_needed_module_that_is_never_called_is_refused() -> None:
    with pytest.raises(NoSplitError, match="spare"):
        cut(chain(lambda m, x: m.second(x), spare=nn.ReLU()), X, needed=["spare"])


def test_models_that_decide_on_their_data_are_refused() -> None:
    with pytest.raises(NoSplitError, match="traced"):
        cut(chain(lambda m, x: m.second(x) if x.sum() > 0 else x), X)


def test_the_module_is_as_it_was() -> None:
    module = ready(torchvision.models.resnet18(weights=None), "fc")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.rand(3, 3, 64, 64)
    state, attributes = torch.get_rng_state(), [set(vars(part)) for part in module.modules()]
    modes = [part.training for part in module.modules()]
    cut(module, x)

    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(part)) for part in module.modules()] == attributes
    assert [part.training for part in module.modules()] == modes
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())
