import threading
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.unit.models.conftest import load, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.replicas import make_hosted_copy, make_meta_replica, make_replica

NAMES = [
    "resnet18",
    "mobilenet_v3_small",
    "squeezenet1_1",
    "lraspp_mobilenet_v3_large",
    "ssdlite320_mobilenet_v3_large",
]


class Tied(nn.Module):
    """Two layers with one weight, a buffer, a cache and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.offsets: dict[str, list[torch.Tensor]] = {"a": [torch.arange(4.0)]}
        self.seen: list[int] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(batch))
        hidden: torch.Tensor = self.two(self.one(batch)) * self.scale + self.offsets["a"][0]
        return hidden


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_is_another_tree_over_the_same_weights(name: str) -> None:
    module = load(f"{name}=random:0").module
    replica = make_replica(module)
    ours, theirs = dict(replica.named_modules()), dict(module.named_modules())
    assert list(ours) == list(theirs)
    assert all(ours[path] is not theirs[path] for path in ours)
    tensors = zip(
        chain(replica.parameters(), replica.buffers()),
        chain(module.parameters(), module.buffers()),
        strict=True,
    )
    assert all(mine is its for mine, its in tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_computes_the_same(name: str) -> None:
    hosted = load(f"{name}=random:0")
    arguments = hosted.example_inputs()
    with torch.inference_mode():
        ours, theirs = make_replica(hosted.module)(*arguments), hosted.module(*arguments)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_hooks_of_one_replica_are_invisible_to_the_others_and_to_later_ones() -> None:
    module = Tied()
    first, second = make_replica(module), make_replica(module)
    calls: list[str] = []
    first.get_submodule("one").register_forward_hook(lambda *_: calls.append("first"))
    for other in (module, second, make_replica(module)):
        other(torch.ones(1, 4))
    assert calls == []
    first(torch.ones(1, 4))
    assert calls == ["first"]


def test_the_models_own_hooks_move_to_the_replica() -> None:
    class Watcher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.seen: list[torch.Tensor] = []
            self.layer.register_forward_hook(self.watch)

        def watch(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self.seen.append(output)

        def forward(self, batch: torch.Tensor) -> Any:
            return self.layer(batch)

    module = Watcher()
    replica = make_replica(module)
    replica(torch.ones(1, 2))
    assert isinstance(replica, Watcher)
    assert (len(replica.seen), len(module.seen)) == (1, 0)


def test_state_that_is_no_tensor_is_the_replicas_own() -> None:
    module = Tied()
    replica = make_replica(module)
    replica(torch.ones(3, 4))
    assert isinstance(replica, Tied)
    assert (replica.seen, module.seen) == ([3], [])


def test_tied_weights_stay_tied() -> None:
    replica = make_replica(Tied())
    assert replica.get_parameter("one.weight") is replica.get_parameter("two.weight")


def test_a_new_weight_in_one_replica_leaves_the_original() -> None:
    module = nn.Linear(2, 2)
    replica = make_replica(module)
    replica.weight = nn.Parameter(torch.zeros(2, 2))
    assert module.weight.abs().sum() > 0


def test_parametrized_modules_are_replicated() -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
    batch = torch.ones(1, 3)
    assert torch.equal(make_replica(module)(batch), module(batch))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_plain_tensor_with_a_graph_is_shared() -> None:
    module = nn.utils.weight_norm(nn.Linear(3, 3))
    batch = torch.ones(1, 3)
    assert torch.equal(make_replica(module)(batch), module(batch))


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()  # type: ignore[assignment]  # what operators do
    with pytest.raises(ServiceError, match="Linear cannot be replicated") as error:
        make_replica(module)
    assert reason_of(error) is ErrorReason.MODEL_INVALID


def test_a_module_whose_copy_has_its_own_weights_is_refused() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def __deepcopy__(self, memo: object) -> "Stubborn":
            return Stubborn()

    with pytest.raises(ServiceError, match="would not share its weights"):
        make_replica(nn.Sequential(Stubborn()))


@pytest.mark.parametrize("name", ["resnet18", "lraspp_mobilenet_v3_large", "vit_b_32"])
def test_a_meta_replica_has_the_shapes_and_no_data(name: str) -> None:
    hosted = load(f"{name}=random:0")
    replica = make_meta_replica(hosted.module)
    assert all(tensor.is_meta for tensor in chain(replica.parameters(), replica.buffers()))
    with torch.inference_mode():
        ours = replica(*(argument.to("meta") for argument in hosted.example_inputs()))  # type: ignore[union-attr]
        theirs = hosted.module(*hosted.example_inputs())
    pairs = zip(ours.values(), theirs.values(), strict=True) if isinstance(ours, dict) else [(ours, theirs)]
    assert all(
        (mine.shape, mine.dtype, mine.stride()) == (its.shape, its.dtype, its.stride()) for mine, its in pairs
    )


def test_a_meta_replica_takes_plain_tensors_along_and_leaves_the_original() -> None:
    module = Tied()
    replica = make_meta_replica(module)
    assert replica(torch.ones(2, 4, device="meta")).shape == (2, 4)
    assert replica.get_parameter("one.weight") is replica.get_parameter("two.weight")
    assert not module.one.weight.is_meta
    assert not module.offsets["a"][0].is_meta


def test_a_hosted_copy_has_other_parameters_over_the_same_memory() -> None:
    module = Tied()
    copy = make_hosted_copy(module)
    pairs = list(zip(_tensors(copy), _tensors(module), strict=True))
    assert all(mine is not its and mine.data_ptr() == its.data_ptr() for mine, its in pairs)
    assert copy.get_parameter("one.weight") is copy.get_parameter("two.weight")
    assert _offset(copy).data_ptr() != _offset(module).data_ptr()


def test_what_is_done_to_a_hosted_copy_does_not_show_at_the_original() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    make_hosted_copy(module).eval().requires_grad_(False).half()
    assert all(part.training for part in module.modules())
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in module.parameters())


def test_a_hosted_copy_follows_weights_that_change_in_place() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()
    copy = make_hosted_copy(module).eval()
    module.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
    batch = torch.rand(4, 3)
    with torch.inference_mode():
        module(batch)  # moves the statistics of batch norm
        assert torch.equal(copy(batch), module.eval()(batch))


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_hosted_copy_of_reparametrised_layers_computes_the_same(wrap: Any) -> None:
    module = wrap(nn.Linear(3, 3))
    module(torch.ones(1, 3))  # leaves a weight that carries a graph
    with torch.no_grad():
        assert torch.equal(make_hosted_copy(module)(torch.ones(1, 3)), module(torch.ones(1, 3)))


def test_a_hosted_copy_of_what_cannot_be_copied_is_refused() -> None:
    module = nn.Identity()
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ServiceError) as caught:
        make_hosted_copy(module)
    assert reason_of(caught) is ErrorReason.MODEL_INVALID


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _offset(module: Any) -> torch.Tensor:
    offset: torch.Tensor = module.offsets["a"][0]
    return offset
