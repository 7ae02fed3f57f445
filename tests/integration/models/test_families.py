"""Families of transformers against plain hooks in this process: all values, edits, gradients."""

import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.text_models import minilm_folder, save_tokenizer
from tests.support.models.transformers_folders import FAMILIES, family_inputs, save_family
from tests.support.oracles.oracle import Key, flat, same_bits
from tests.support.servers.running_server import running_server
from trocar import FeatureMapInfo

MINI = "minilm"
EVERY = (*FAMILIES, MINI)
PADDED = ("bert", "roberta", "distilbert", "deberta", "modernbert", "gpt2", "llama", "gemma3", "mixtral")
STATES = {"bert": "encoder.layer.0", "gpt2": "transformer.h.0", "llama": "model.layers.0"}
"""The first block; these are also hosted with all hidden states in their output."""
EDITS_EACH, GRADIENTS_EACH = 6, 12
_EDITS: dict[str, tuple[dict[str, Any], Any]] = {
    "zero": ({}, torch.zeros_like),
    "scale": ({"factor": 0.5}, lambda value: value * 0.5),
    "add": ({"value": 0.25}, lambda value: value + 0.25),
    "clamp": ({"low": -0.1, "high": 0.1}, lambda value: value.clamp(-0.1, 0.1)),
}
every_family = pytest.mark.parametrize("family", EVERY)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder and the model in this process, by family."""
    from transformers import BertModel

    root = tmp_path_factory.mktemp("folders")
    found: dict[str, tuple[Path, Any]] = {
        name: (root / name, save_family(name, root / name)) for name in FAMILIES
    }
    for name in PADDED:
        save_tokenizer(root / name, model_max_length=128, model_input_names=["input_ids", "attention_mask"])
    found[MINI] = minilm_folder(), BertModel.from_pretrained(str(minilm_folder())).eval()
    for _, model in found.values():
        model.requires_grad_(False)  # as hosted: nn.MultiheadAttention computes otherwise with gradients
    return found


@pytest.fixture(scope="module")
def client(models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, (folder, _) in models.items()}
    tables[MINI]["source"] += "#BertModel"
    for name in STATES:
        tables[f"{name}-states"] = {**tables[name], "options": {"output_hidden_states": True}}
    data_dir = tmp_path_factory.mktemp("data")
    with (
        running_server(models=tables, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


class _Pass:
    """One pass in this process: the tensors of every call of every module, with a change at one of them.

    With gradients, the graph begins at `starts`: parameters do not require any, as on a server. torch 2.14
    takes other kernels in linear layers whose weights do, and T5's forward values then differ by 1e-7.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Any],
        change: tuple[Key, Any] | None = None,
        starts: Collection[Key] = (),
    ) -> None:
        self._starts = starts
        self.values: dict[Key, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._change = change
        handles = [
            # First: transformers keeps hidden states by hooks of its own, which stay after the first pass.
            module.register_forward_hook(self._keeping(path), prepend=True)
            for path, module in model.named_modules()
        ]
        try:
            model(**{name: torch.from_numpy(np.asarray(value)) for name, value in inputs.items()})
        finally:
            for handle in handles:
                handle.remove()

    def _keeping(self, path: str) -> Any:
        def keep(_: Any, arguments: Any, output: Any) -> Any:
            index = self._calls[path] = self._calls.get(path, -1) + 1
            if self._change and self._change[0] == (path, index, ""):
                output = self._change[1](output)
            if (path, index, "") in self._starts and not output.requires_grad:
                output = output.detach().requires_grad_()
            elif self._starts and any(output is argument for argument in arguments):
                output = output.view_as(
                    output
                )  # dropout: the gradient at its output is not that at its input
            for pick, tensor in flat(output):
                self.values[path, index, pick] = tensor if self._starts else tensor.clone()
            return output

        return keep


def _plain(model: Any, inputs: dict[str, Any], change: tuple[Key, Any] | None = None) -> _Pass:
    with torch.inference_mode():
        return _Pass(model, inputs, change)


def _key(info: FeatureMapInfo) -> Key:
    return info.path, info.call_index, info.pick


def _inputs(family: str, seed: int = 0) -> dict[str, Any]:
    return family_inputs(family, seed=seed)


def _differing(maps: trocar.FeatureMaps, expected: dict[Key, torch.Tensor]) -> list[str]:
    return [name for name, info in maps.info.items() if not same_bits(maps[name], expected[_key(info)])]


@every_family
def test_every_value_of_a_pass_is_that_of_a_plain_hook(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str
) -> None:
    inputs = _inputs(family)
    expected = _plain(models[family][1], inputs).values
    maps = client.extract(family, inputs, ["**@*"])
    assert {_key(info) for info in maps.info.values()} >= {key for key in expected if key[0]}
    assert _differing(maps, expected) == []


@every_family
def test_edits_at_random_values_are_those_of_a_plain_hook(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str
) -> None:
    inputs, chance = _inputs(family, 1), random.Random(family)
    model = models[family][1]
    infos = client.plan(family, inputs, ["**@*"]).feature_maps.values()
    single = [info for info in infos if info.path and not info.pick and info.dtype == "float32"]
    for info in chance.sample(single, EDITS_EACH):
        operation: Any = chance.choice(list(_EDITS))
        options, function = _EDITS[operation]
        expected = _plain(model, inputs, (_key(info), function)).values
        edit = trocar.edit(info.name, operation, **options)
        maps = client.extract(family, inputs, ["**@*"], edits=[edit])
        assert _differing(maps, expected) == [], f"{operation} at {info.name}"


def test_an_edit_is_seen_by_a_head_that_reads_the_states_of_all_stages(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    inputs, path = _inputs("segformer"), "segformer.stages.1"
    expected = _plain(models["segformer"][1], inputs, ((path, 0, ""), torch.zeros_like)).values
    for _ in range(2):
        maps = client.extract("segformer", inputs, ["decode_head.**@*"], edits=[trocar.edit(path, "zero")])
        assert _differing(maps, expected) == []


@pytest.mark.parametrize(("family", "path"), STATES.items())
def test_an_edit_is_seen_in_the_hidden_states_that_a_model_returns(
    client: trocar.Client, family: str, path: str
) -> None:
    taps, edits = [path, '/out["hidden_states"]'], [trocar.edit(path, "scale", 0.5)]
    maps = client.extract(f"{family}-states", _inputs(family), taps, edits=edits)
    np.testing.assert_array_equal(maps['/out["hidden_states"][1]'], maps[path])


@every_family
def test_gradients_at_random_values_are_those_of_torch(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str
) -> None:
    inputs, chance = _inputs(family, 2), random.Random(family)
    infos = client.plan(family, inputs, ["**@*"]).feature_maps.values()
    floats = {
        _key(info): info.name for info in infos if info.path and not info.pick and info.dtype == "float32"
    }
    goal = list(floats)[-1]
    _, reached = _own_gradients(models[family][1], inputs, goal, floats)
    at = chance.sample(list(reached), min(GRADIENTS_EACH, len(reached)))
    loss, own = _own_gradients(models[family][1], inputs, goal, at)
    of = trocar.value(floats[goal], function="square")
    found = client.gradients(family, inputs, of=of, at=[floats[key] for key in at])
    assert [floats[key] for key in at if not same_bits(found[floats[key]], own[key])] == []
    assert found.objective == loss


def _own_gradients(
    model: Any, inputs: dict[str, Any], goal: Key, at: Collection[Key]
) -> tuple[float, dict[Key, torch.Tensor]]:
    """The sum of squares at a goal, and its gradients at those of the places from which it is computed."""
    kept = _Pass(model, inputs, starts=at).values
    loss = kept[goal].square().sum()
    places = [key for key in at if kept[key].requires_grad and kept[key] is not kept[goal]]
    found = torch.autograd.grad(loss, [kept[key] for key in places], allow_unused=True)
    pairs: Any = zip(places, found, strict=True)  # None where unused, which torch's types do not say
    return float(loss.detach()), {key: gradient for key, gradient in pairs if gradient is not None}


@pytest.mark.parametrize("padding", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64])
@pytest.mark.parametrize("family", PADDED)
def test_padding_makes_the_batch_that_a_tokenizer_makes(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str, padding: int
) -> None:
    if family == "gpt2":
        padding = min(padding, 9)
    short, long = [2, 5, 6, 7, 8, 3], [2, *range(4, 4 + (padding + 4) % 9), 3]
    long += [9] * (len(short) + padding - len(long))
    ids = np.array([short + [0] * padding, long])
    inputs = {"input_ids": ids, "attention_mask": (np.arange(ids.shape[1]) < [[len(short)], [len(long)]]) * 1}
    expected = _plain(models[family][1], inputs).values
    maps = client.extract(family, [short, long], ["**@*"])
    assert maps.tokens.lengths == (len(short), len(long))
    assert _differing(maps, expected) == []
