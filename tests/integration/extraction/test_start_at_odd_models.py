"""Starts in models that keep state, share modules or write in place: the right bits, or a refusal."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models import odd_models, stateful_models, tiny_models
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts, replicas
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

ROWS = noise(2, 3) + 0.25
INPUTS: dict[str, tuple[Any, Any]] = {
    "plain": (tiny_models.Plain, noise(2, 3, 8, 8)),
    "half": (tiny_models.Half, noise(2, 7)),
    "structured": (tiny_models.Structured, ROWS),
    "recursive": (odd_models.Recursive, ROWS),
    "catches": (odd_models.CatchesErrors, ROWS),
    "keys": (odd_models.OddKeys, ROWS),
    "slotted": (odd_models.Slotted, ROWS),
    "nothing": (odd_models.Nothing, ROWS),
    "overwrites": (odd_models.Overwrites, ROWS),
    "in-place": (odd_models.InPlaceOnInput, ROWS),
    "identity": (odd_models.Identity, ROWS),
    "dtypes": (odd_models.Dtypes, noise(6, 6)),
    "shared": (odd_models.Shared, ROWS),
    "deep": (odd_models.Deep, ROWS),
    "many": (odd_models.TakesMany, ROWS),
    "tokens": (odd_models.TokenModel, np.arange(6).reshape(2, 3)),
    "transformer": (odd_models.Transformer, noise(2, 5, 16)),
    "layers": (odd_models.TorchLayers, noise(2, 4, 6)),
    "grows": (odd_models.Grows, ROWS),
    "names": (odd_models.OddNames, ROWS),
    "two": (stateful_models.TwoSteps, ROWS),
    "writes-buffer": (stateful_models.WritesBuffer, ROWS),
    "writes-data": (stateful_models.WritesBufferData, ROWS),
    "replaces-buffer": (stateful_models.ReplacesBuffer, ROWS),
    "keeps-last": (stateful_models.KeepsLast, ROWS),
    "keeps-all": (stateful_models.KeepsAll, ROWS),
    "plain-tensor": (stateful_models.PlainTensor, ROWS),
    "makes-tensors": (stateful_models.MakesTensors, ROWS),
    "writes-across": (stateful_models.WritesAcross, ROWS),
    "looks-later": (stateful_models.LooksLater, ROWS),
    "transposes": (stateful_models.Transposes, ROWS),
    "expands": (stateful_models.Expands, ROWS),
}
NEVER = {"deep", "writes-across"}
"""One returns its input beside the value of every module; the other has no pass without data."""
REFUSED_EVERYWHERE_INSIDE = {"writes-buffer", "writes-data", "replaces-buffer"}


class Bounded(nn.Module):
    """Fails behind its first layer where that returns large values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(x)
        if not found.is_meta and found.max() > 100:
            raise ValueError("out of bounds")
        return found


@pytest.fixture(scope="module")
def odd() -> Iterator[RunningServer]:
    models = {name: custom(kind, values.shape[1:]) for name, (kind, values) in INPUTS.items()}
    models["bounded"] = custom(Bounded, (3,))
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def near(odd: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(odd.address) as connected:
        yield connected


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def starts(client: trocar.Client, name: str, values: Array) -> trocar.FeatureMaps:
    """Return the outputs of a model, and what every call of its modules took and returned."""
    if name == "grows":  # it makes its child in the first pass
        client.extract(name, values, "/out")
    taps = ["/out", "/in"]
    for pattern in ("**", "**/in"):
        with suppress(trocar.errors.NotATensorError, trocar.errors.UnknownModuleError):
            taps.extend(client.plan(name, values, pattern).feature_maps)
    return client.extract(name, values, taps)


@pytest.mark.parametrize("name", INPUTS)
def test_every_start_gives_the_bits_of_the_full_pass_or_is_refused(
    odd: RunningServer, near: trocar.Client, name: str
) -> None:
    values = INPUTS[name][1]
    full, hooks = starts(near, name, values), hook_counts(odd)
    outputs = full.expansions["/out"]
    equal = 0
    for start in full:
        if full[start].shape[:1] in ((), (0,)):  # no batch to tell the inputs by
            continue
        shape = values.shape if values.dtype == np.float32 else None
        try:
            found = near.extract(name, full[start], "/out", start_at=start, start_shape=shape)
        except trocar.errors.StartNotPossibleError:
            continue
        assert [same(found[key], full[key]) for key in outputs] == [True] * len(outputs), start
        equal += 1
    assert equal > 0 or name in NEVER
    again = near.extract(name, values, "/out")
    assert all(same(again[key], full[key]) for key in outputs)
    assert hook_counts(odd) == hooks


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@pytest.mark.parametrize(
    "name", ["keeps-last", "keeps-all", "writes-buffer", "replaces-buffer", "plain-tensor"]
)
def test_no_replica_keeps_a_tensor_without_data(odd: RunningServer, near: trocar.Client, name: str) -> None:
    full = near.extract(name, ROWS, ["first", "second", "/out"])
    for start in ("first", "second"):
        with suppress(trocar.errors.StartNotPossibleError):
            near.extract(name, full[start], "/out", start_at=start)
    for replica in replicas(odd, name):
        held = [tensor for module in replica.modules() for tensor in _tensors(vars(module))]
        assert not any(tensor.is_meta for tensor in held)


@pytest.mark.parametrize("name", sorted(REFUSED_EVERYWHERE_INSIDE))
def test_a_buffer_written_before_the_start_and_read_after_it_is_missed(
    near: trocar.Client, name: str
) -> None:
    value = near.extract(name, ROWS, "second")["second"]
    with pytest.raises(trocar.errors.StartNotPossibleError, match="needs a value from before it"):
        near.extract(name, value, "/out", start_at="second")


def test_modules_before_the_start_that_cannot_run_without_data_are_told(near: trocar.Client) -> None:
    full = near.extract("looks-later", ROWS, ["first", "second", "/out"])
    for _ in range(stateful_models.LooksLater.FIRST):
        near.extract("looks-later", ROWS, "/out")
    found = near.extract("looks-later", full["first"], "/out", start_at="first")
    assert same(found["/out"], full["/out"])
    with pytest.raises(trocar.errors.StartNotPossibleError, match="before it cannot run without data"):
        near.extract("looks-later", full["second"], "/out", start_at="second")


def test_an_error_behind_the_start_is_that_of_the_model(near: trocar.Client) -> None:
    with pytest.raises(trocar.errors.InputRejectedError, match="out of bounds"):
        near.extract("bounded", ROWS + 1000, "/out", start_at="first")
    assert same(near.extract("bounded", ROWS, "/out", start_at="first")["/out"], ROWS)


def test_parameters_can_be_collected_beside_a_start(near: trocar.Client) -> None:
    value = near.extract("two", ROWS, "first")["first"]
    maps = near.extract("two", value, ["second", "first/param(weight)"], start_at="first")
    module = rebuilt(stateful_models.TwoSteps)
    assert same(maps["first/param(weight)"], module.first.weight.detach().numpy())
    with torch.inference_mode():
        assert same(maps["second"], module.second(torch.from_numpy(value)).numpy())


@pytest.mark.parametrize("start", ["fx:first", "fn:linear@0", "first/param(weight)", "fx:first@0"])
def test_a_start_that_is_no_value_of_a_module_is_refused(near: trocar.Client, start: str) -> None:
    with pytest.raises(trocar.TrocarError) as refused:
        near.extract("two", ROWS, "/out", start_at=start)
    assert isinstance(refused.value, trocar.errors.StartNotPossibleError | trocar.errors.SelectorError)
    with pytest.raises(type(refused.value)):
        near.plan("two", ROWS, "/out", start_at=start)


def test_an_element_of_an_argument_is_no_start(near: trocar.Client) -> None:
    """A densely connected layer takes a list of tensors; the rest of them would be missing."""
    value = near.extract("keys", ROWS, "/in[0]")["/in[0]"]
    with pytest.raises(trocar.errors.SelectorError):
        near.extract("keys", value, "/out", start_at="/in[0][0]")
