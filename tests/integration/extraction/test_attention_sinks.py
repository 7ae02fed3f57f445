"""Attention with a sink, a column of the softmax that stands for no key: `/pattern`, `/logits`, `/sink`.

GPT-OSS in eager mode is the oracle, and its own parameter of sinks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

import trocar
from tests.support.servers.running_server import running_server
from trocar.errors import EditNotPossibleError, UnknownPickError
from trocar_server.surgery import (
    EditTarget,
    FunctionSession,
    attention_in,
    parse_selector,
    record_calls,
    record_functions,
    resolve,
)
from trocar_server.tensors.edits import Edit
from trocar_server.tensors.edits.elementwise import Zero

CONFIG: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
}
IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
PADDED = {"input_ids": IDS, "attention_mask": MASK}
PATHS = [f"model.layers.{number}.self_attn" for number in range(2)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = T.GptOssForCausalLM(T.GptOssConfig(**CONFIG)).eval().requires_grad_(requires_grad=False)
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            parameter.copy_(torch.randn_like(parameter))
        elif parameter.dim() > 1:
            parameter.mul_(10)
    return made


@pytest.fixture(scope="module")
def client(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    folder: Path = tmp_path_factory.mktemp("folder")
    model.save_pretrained(folder)
    data_dir = tmp_path_factory.mktemp("data")
    models = {"gpt-oss": {"source": f"hf:{folder}"}}
    with (
        running_server(models=models, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> Any:
    return model(**{name: torch.from_numpy(value) for name, value in inputs.items()}, **more)


@pytest.mark.parametrize("size", [6, 5, 1])
def test_columns_are_keys_and_the_sink_has_a_name_of_its_own(
    client: trocar.Client, model: nn.Module, size: int
) -> None:
    inputs = {name: value[:, :size] for name, value in PADDED.items()}
    expected = run(model, inputs, output_attentions=True).attentions
    ports = [f"{path}/{port}" for path in PATHS for port in ("pattern", "logits", "sink")]
    maps = client.extract("gpt-oss", inputs, ports)
    assert list(maps) == list(maps.info)
    for path, own in zip(PATHS, expected, strict=True):
        pattern, logits, sink = (maps[f"{path}/{port}"] for port in ("pattern", "logits", "sink"))
        assert pattern.shape == logits.shape == own.shape == (2, 4, size, size)
        np.testing.assert_allclose(pattern, own.numpy(), atol=1e-6)
        assert sink.shape == (2, 4, size, 1)
        np.testing.assert_allclose(pattern.sum(-1, keepdims=True) + sink, 1, atol=1e-6)
        sinks = model.get_parameter(f"{path}.sinks").view(1, -1, 1, 1).expand(2, -1, size, 1)
        whole = torch.cat([torch.from_numpy(logits), sinks], -1).softmax(-1).numpy()
        np.testing.assert_allclose(whole[..., :-1], pattern, atol=1e-6)
        np.testing.assert_allclose(whole[..., -1:], sink, atol=1e-6)


def test_patterns_of_selectors_find_all_sinks(client: trocar.Client) -> None:
    maps = client.extract("gpt-oss", PADDED, ["**/sink", "**/pattern"])
    assert sorted(maps) == sorted(f"{path}/{port}" for path in PATHS for port in ("sink", "pattern"))
    assert maps.info[f"{PATHS[0]}/sink"].shape == (2, 4, 6, 1)
    stats = client.extract("gpt-oss", PADDED, trocar.tap(f"{PATHS[0]}/sink", stats=["mean"], values=False))
    mean = stats.stats[f"{PATHS[0]}/sink"].mean
    assert mean == pytest.approx(float(maps[f"{PATHS[0]}/sink"].mean()), rel=1e-5)


def without_head(model: nn.Module, head: int) -> Any:
    """Zero what a head of the last layer gives to the output projection, until it is removed."""

    def zero(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        mixed = args[0].clone()
        mixed[..., 8 * head : 8 * (head + 1)] = 0
        return (mixed,)

    return model.get_submodule(f"{PATHS[1]}.o_proj").register_forward_pre_hook(zero)


def test_an_edit_of_the_pattern_changes_what_the_model_uses(client: trocar.Client, model: nn.Module) -> None:
    handle = without_head(model, 1)
    expected = run(model, PADDED).logits.numpy()
    handle.remove()
    edit = trocar.edit(f"{PATHS[1]}/pattern", "zero", channels=[1])
    maps = client.extract(
        "gpt-oss", PADDED, ["lm_head", f"{PATHS[1]}/pattern", f"{PATHS[1]}/sink"], edits=edit
    )
    np.testing.assert_allclose(maps["lm_head"], expected, atol=1e-4)
    assert not maps[f"{PATHS[1]}/pattern"][:, 1].any()
    assert maps[f"{PATHS[1]}/sink"].any()


def test_more_of_every_logit_is_less_of_the_sink(client: trocar.Client) -> None:
    """A softmax knows differences only: adding to the keys is subtracting from the parameter of sinks."""
    taps = ["lm_head", f"{PATHS[1]}/pattern", f"{PATHS[1]}/sink"]
    raised = client.extract("gpt-oss", PADDED, taps, edits=trocar.edit(f"{PATHS[1]}/logits", "add", 1.5))
    lowered = client.extract(
        "gpt-oss", PADDED, taps, edits=trocar.edit(f"{PATHS[1]}/param(sinks)", "add", -1.5)
    )
    plain = client.extract("gpt-oss", PADDED, taps)
    for name in taps:
        np.testing.assert_allclose(raised[name], lowered[name], atol=1e-4)
        assert not np.allclose(raised[name], plain[name], atol=1e-3)


def test_gradients_flow_through_an_edited_pattern(client: trocar.Client, model: nn.Module) -> None:
    place, objective = "model.layers.1", trocar.value("lm_head", function="square")
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept.append(args[0].detach().requires_grad_())
        return (kept[0], *args[1:]), kwargs

    handles = [
        without_head(model, 1),
        model.get_submodule(place).register_forward_pre_hook(keep, with_kwargs=True),
    ]
    with torch.enable_grad():
        run(model, PADDED).logits.square().sum().backward()
    for handle in handles:
        handle.remove()
    edit = trocar.edit(f"{PATHS[1]}/pattern", "zero", channels=[1])
    (found,) = client.gradients("gpt-oss", PADDED, of=objective, at=f"{place}/in", edits=edit).values()
    expected = kept[0].grad
    assert expected is not None
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_what_the_sink_takes_cannot_be_edited_there(client: trocar.Client) -> None:
    with pytest.raises(EditNotPossibleError, match=r"/param\(sinks\)"):
        client.extract("gpt-oss", PADDED, "lm_head", edits=trocar.edit(f"{PATHS[1]}/sink", "zero"))


class Attention(nn.Module):
    """Attends with a sink that is computed in another way."""

    def __init__(self, shares: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.shares = shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over (batch, tokens, width)."""
        return self.shares(x @ x.transpose(1, 2)) @ x


def ones(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits[..., :1])


def shifted(logits: torch.Tensor) -> torch.Tensor:
    joined = torch.cat((logits, ones(logits)), -1)
    return (joined - joined.max(-1, keepdim=True).values).softmax(-1)[..., :-1]


SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded": lambda logits: F.pad(logits, (0, 1)).softmax(-1)[..., :-1],
    "padded by name": lambda logits: F.pad(logits, pad=(0, 1)).softmax(dim=-1)[:, :, :-1],
    "first": lambda logits: torch.cat((ones(logits), logits), dim=2).softmax(2)[..., 1:],
    "by name": lambda logits: F.softmax(torch.cat(tensors=(logits, ones(logits)), dim=-1), dim=-1)[..., :-1],
    "up to": lambda logits: torch.cat((logits, ones(logits)), -1).softmax(-1)[..., : logits.shape[-1]],
    "cast": lambda logits: F.dropout(
        torch.cat((logits, ones(logits)), -1).double().softmax(-1).float(), training=False
    )[..., :-1],
    "shifted": shifted,
}


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("name", SHARES)
def test_sinks_are_known_by_what_the_model_does(name: str, is_symbolic: bool) -> None:
    module, x = Attention(SHARES[name]), torch.rand(2, 5, 4)
    device = "meta" if is_symbolic else "cpu"
    given = (x.to(device),)
    functions = record_functions(module, given, is_symbolic=is_symbolic)
    recording = replace(
        record_calls(module, given, is_symbolic=is_symbolic), attention=attention_in(functions)
    )
    names = ["/pattern", "/logits", "/sink"]
    values = [value for (value,) in resolve(map(parse_selector, names), recording)]
    with FunctionSession([target for target, _ in values]) as session:
        module(x)
    expected = x @ x.transpose(1, 2)
    weights = expected.exp() / (1 + expected.exp().sum(-1, keepdim=True))
    for own, (target, leaf) in zip(
        (weights, expected, 1 - weights.sum(-1, keepdim=True)), values, strict=True
    ):
        assert session.values[target.name].shape == leaf.shape
        torch.testing.assert_close(session.values[target.name].float(), own)
    with FunctionSession([], before=[EditTarget(values[0][0], Edit(Zero()))]):
        assert not module(x).any()


def test_attention_without_a_sink_says_so(client: trocar.Client) -> None:
    module, x = Attention(lambda logits: logits.softmax(-1)), torch.rand(2, 5, 4)
    functions = record_functions(module, (x,), is_symbolic=False)
    recording = replace(record_calls(module, (x,), is_symbolic=False), attention=attention_in(functions))
    with pytest.raises(Exception, match="no attention with a sink"):
        resolve([parse_selector("/sink")], recording)
    with pytest.raises(UnknownPickError, match="no attention with a sink"):
        client.extract("gpt-oss", PADDED, "lm_head/sink")
