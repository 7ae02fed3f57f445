"""`/in` of modules that are called by keyword, on every way to it: plain torch is the oracle."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

import trocar
from tests.support.models.transformers_folders import family_inputs, save_family
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt
from trocar.errors import StartNotPossibleError, UnknownPickError

ROWS = noise(4, 3)
LABELS = np.array([0, 1, 1, 0])
Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[dict[str, Any]], None]


class Mix(nn.Module):
    """Takes its inputs by keyword, in another order than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)

    def forward(self, states: Tensor, other: Tensor | None = None, *, gain: Tensor) -> Tensor:
        """Mix (batch, 3) and (batch, 3)."""
        mixed: Tensor = self.own(states) * gain
        return mixed if other is None else mixed + other.tanh()


class Keywords(nn.Module):
    """Calls all its modules by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(3, 3), Mix(), nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 3)."""
        states = self.first(input=x)
        mixed = self.mix(gain=self.gain, other=x, states=states)
        result: Tensor = self.last(input=mixed)
        return result


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, save_family("whisper", folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_family("llama", folder)


@pytest.fixture(scope="module")
def client(whisper: Any, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    models: dict[str, Any] = {
        "keywords": custom(Keywords, (3,)),
        "whisper": {"source": f"hf:{whisper[0]}"},
        "llama": {"source": f"hf:{llama[0]}"},
    }
    data_dir = tmp_path_factory.mktemp("data")
    with (
        running_server(models=models, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


@contextmanager
def heard(model: nn.Module, path: str, change: Change = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield what a module gets, by the names of its forward, after a change."""
    module, given = model.get_submodule(path), dict[str, Any]()
    names = list(inspect.signature(module.forward).parameters)

    def hear(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given.update(zip(names, args, strict=False))
        given.update(kwargs)
        change(given)
        return tuple(given[name] for name in names[: len(args)]), {name: given[name] for name in kwargs}

    handle = module.register_forward_pre_hook(hear, with_kwargs=True)
    try:
        yield given
    finally:
        handle.remove()


def model_of() -> nn.Module:
    made: nn.Module = rebuilt(Keywords).eval()
    return made


def scaled(name: str, factor: float) -> Change:
    return lambda given: given.update({name: given[name] * factor})


def tensors(inputs: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


@pytest.mark.parametrize("again", range(3))
def test_values_of_every_parameter(client: trocar.Client, again: int) -> None:
    """In equal calls: planned, prepared, and kept by the server."""
    taps = ["mix/in", "mix/in(other)", "mix/in(gain)", "first/in", "last/in", "/in"]
    rows = ROWS + again
    with torch.no_grad(), heard(model := model_of(), "mix") as given, heard(model, "last") as last:
        model(torch.from_numpy(rows))
    expected = {
        "mix/in": given["states"],
        "mix/in(other)": given["other"],
        "mix/in(gain)": given["gain"],
        "first/in": torch.from_numpy(rows),
        "last/in": last["input"],
        "/in": torch.from_numpy(rows),
    }
    maps = client.extract("keywords", rows, taps)
    assert list(client.plan("keywords", rows, taps).feature_maps) == list(maps)
    with client.extract_stream("keywords", [rows], taps) as stream:
        (result,) = stream
    streamed = result.maps
    assert streamed is not None
    for name in taps:
        np.testing.assert_array_equal(maps[name], expected[name].detach().numpy())
        np.testing.assert_array_equal(streamed[name], expected[name].detach().numpy())


def test_numbers_and_names_mean_the_same_value(client: trocar.Client) -> None:
    same = {
        "mix/in": ["mix/in[0]", "mix/in(states)"],
        "mix/in(other)": ["mix/in[1]"],
        "mix/in(gain)": ["mix/in[2]"],
    }
    for name, others in same.items():
        maps = client.extract("keywords", ROWS, [name, *others])
        assert list(maps) == [name]
        assert all(maps.expansions[other] == (name,) for other in others)
    assert list(client.extract("keywords", ROWS, "**/in")) == ["first/in", "mix/in", "mix.own/in", "last/in"]


@pytest.mark.parametrize(
    ("selector", "name"), [("mix/in", "states"), ("mix/in[1]", "other"), ("mix/in(gain)", "gain")]
)
def test_edits_and_gradients_are_of_one_parameter(client: trocar.Client, selector: str, name: str) -> None:
    model, kept = model_of(), list[Tensor]()

    def keep(given: dict[str, Any]) -> None:
        kept.append(given[name].detach().requires_grad_())
        given[name] = kept[0] * 1

    with heard(model, "mix", scaled(name, 3)), torch.no_grad():
        expected = model(torch.from_numpy(ROWS)).numpy()
    edit = trocar.edit(selector, "scale", 3)
    np.testing.assert_allclose(
        client.extract("keywords", ROWS, "/out", edits=edit)["/out"], expected, atol=1e-6
    )
    with heard(model, "mix", keep):
        model(torch.from_numpy(ROWS)).square().sum().backward()
    of = trocar.value("/out", function="square")
    (found,) = client.gradients("keywords", ROWS, of=of, at=selector).values()
    assert kept[0].grad is not None
    np.testing.assert_allclose(found, kept[0].grad.numpy(), rtol=1e-4, atol=1e-5)


def test_swaps_take_the_first_parameter(client: trocar.Client) -> None:
    with heard(model := model_of(), "mix") as clean, torch.no_grad():
        model(torch.from_numpy(ROWS + 1))
    with heard(model, "mix", lambda given: given.update(states=clean["states"])), torch.no_grad():
        expected = model(torch.from_numpy(ROWS)).numpy()
    edit = trocar.edit("mix/in", "swap", source="clean")
    found = client.extract("keywords", ROWS, "/out", edits=edit, sources={"clean": ROWS + 1})
    np.testing.assert_allclose(found["/out"], expected, atol=1e-6)


def test_passes_start_at_a_keyword(client: trocar.Client) -> None:
    full = client.extract("keywords", ROWS, ["last/in", "/out"])
    found = client.extract("keywords", full["last/in"], "/out", start_at="last/in")
    np.testing.assert_array_equal(found["/out"], full["/out"])
    with pytest.raises(StartNotPossibleError):  # another parameter comes from before
        client.extract("keywords", full["last/in"], "/out", start_at="mix/in")


def test_rules_and_losses_of_trainers_are_at_one_parameter(client: trocar.Client, tmp_path: Path) -> None:
    """No gradient passes from `mix` to `first`, and a loss is at another parameter."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def blocked(given: dict[str, Any]) -> None:
        given["states"] = given["states"].detach()

    with heard(model, "mix", blocked) as given:
        output = model(torch.from_numpy(ROWS))
    gain = given["gain"]
    (nn.functional.cross_entropy(output, torch.from_numpy(LABELS)) + gain.square().mean()).backward()
    optimizer.step()
    trainer = client.train(
        "keywords",
        losses=[
            trocar.training.loss_term("cross_entropy"),
            trocar.training.loss_term("l2_norm", at="mix/in(gain)"),
        ],
        gradient_edits=trocar.training.gradient_edit("mix/grad_in", "zero"),
        optimizer=trocar.training.sgd(lr=0.1),
    )
    trainer.step(ROWS, LABELS)
    found = load_file(trainer.export(tmp_path / "trained.safetensors"))
    trainer.close()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert torch.equal(found["first.weight"], model_of().get_parameter("first.weight"))


def test_cross_attention_of_whisper_keeps_its_keys(client: trocar.Client, whisper: tuple[Path, Any]) -> None:
    inputs, model = family_inputs("whisper"), whisper[1]
    path = "model.decoder.layers.1.encoder_attn"
    with heard(model, path, scaled("hidden_states", 0)) as given, torch.no_grad():
        expected = model(**tensors(inputs)).logits.numpy()
    taps = ["proj_out", f"{path}/in", f"{path}/in(key_value_states)"]
    maps = client.extract("whisper", inputs, taps, edits=trocar.edit(f"{path}/in", "zero"))
    np.testing.assert_allclose(maps["proj_out"], expected, atol=1e-5)
    assert not maps[f"{path}/in"].any()
    np.testing.assert_allclose(
        maps[f"{path}/in(key_value_states)"], given["key_value_states"].numpy(), atol=1e-5
    )


def test_a_block_of_llama_keeps_its_position_embeddings(
    client: trocar.Client, llama: tuple[Path, Any]
) -> None:
    inputs, model = family_inputs("llama"), llama[1]
    with heard(model, "model.layers.1", scaled("hidden_states", 0)) as given, torch.no_grad():
        expected = model(**tensors(inputs)).logits.numpy()
    taps = ["lm_head", "model.layers.1/in(position_embeddings)"]
    maps = client.extract("llama", inputs, taps, edits=trocar.edit("model.layers.1/in", "zero"))
    np.testing.assert_allclose(maps["lm_head"], expected, atol=1e-5)
    for index, own in enumerate(given["position_embeddings"]):
        name = f"model.layers.1/in(position_embeddings)[{index}]"
        np.testing.assert_allclose(maps[name], own.numpy(), atol=1e-6)


def test_inputs_of_the_model_itself(client: trocar.Client) -> None:
    inputs = family_inputs("llama")
    maps = client.extract("llama", inputs, ["/in", "/in(attention_mask)", "/in(input_ids)"])
    assert list(maps) == ["/in", "/in(attention_mask)"]
    np.testing.assert_array_equal(maps["/in(input_ids)"], inputs["input_ids"])
    np.testing.assert_array_equal(maps["/in"], inputs["input_ids"])
    np.testing.assert_array_equal(maps["/in(attention_mask)"], inputs["attention_mask"])
    embeddings = noise(2, 7, 8)
    with pytest.raises(UnknownPickError, match=r"'input_ids'.*available: /in\(inputs_embeds\)"):
        client.extract("llama", {"inputs_embeds": embeddings}, "/in")
