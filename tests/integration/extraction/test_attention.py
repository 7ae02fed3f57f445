"""Attention of tapped layers equals that of transformers in eager mode; the model stays on its kernels."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from packaging.version import Version
from torch import nn
from torch.nn import functional as F

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt
from trocar.errors import EditNotPossibleError

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
TEXT = {**SIZES, "vocab_size": 30}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
T5 = {"d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 16, "d_kv": 4, "vocab_size": 30}
SPEECH = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 30,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
PADDED = {"input_ids": IDS, "attention_mask": MASK}
PIXELS = {"pixel_values": np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)}
SOUND = {
    "input_features": np.random.default_rng(0).standard_normal((2, 8, 20), np.float32),
    "decoder_input_ids": IDS,
}
BOTH = {**PADDED, "decoder_input_ids": IDS[:, :4]}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "bert": (T.BertModel, T.BertConfig(**TEXT)),
    "gpt2": (T.GPT2LMHeadModel, T.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=30)),
    "llama": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPED)),
    "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config(**GROUPED, attn_logit_softcapping=0.05, sliding_window=3)),
    "falcon": (
        T.FalconForCausalLM,
        T.FalconConfig(**TEXT, alibi=True, multi_query=False, new_decoder_architecture=False),
    ),
    "mistral": (T.MistralForCausalLM, T.MistralConfig(**GROUPED, sliding_window=3)),
    "vit": (T.ViTModel, T.ViTConfig(**SIZES, image_size=8, patch_size=4)),
    "t5": (T.T5ForConditionalGeneration, T.T5Config(**T5, pad_token_id=0, decoder_start_token_id=0)),
    "whisper": (T.WhisperForConditionalGeneration, T.WhisperConfig(**SPEECH)),
    "convbert": (T.ConvBertModel, T.ConvBertConfig(**TEXT, embedding_size=16, conv_kernel_size=3)),
}
CASES = [
    ("bert", "encoder.layer.1.attention", "attentions", PADDED),
    ("convbert", "encoder.layer.1.attention", "attentions", PADDED),  # beside a softmax of kernels
    ("gpt2", "transformer.h.1.attn", "attentions", PADDED),
    ("llama", "model.layers.1.self_attn", "attentions", PADDED),
    ("gemma2", "model.layers.0.self_attn", "attentions", PADDED),
    ("gemma2", "model.layers.1.self_attn", "attentions", PADDED),
    ("mistral", "model.layers.1.self_attn", "attentions", PADDED),
    ("vit", "layers.1.attention", "attentions", PIXELS),
    ("t5", "encoder.block.1.layer.0", "encoder_attentions", BOTH),
    ("t5", "decoder.block.1.layer.0.SelfAttention", "decoder_attentions", BOTH),
    ("t5", "decoder.block.1.layer.1.EncDecAttention", "cross_attentions", BOTH),
    ("whisper", "model.encoder.layers.1.self_attn", "encoder_attentions", SOUND),
    ("whisper", "model.decoder.layers.1.self_attn", "decoder_attentions", SOUND),
    ("whisper", "model.decoder.layers.1.encoder_attn", "cross_attentions", SOUND),
]


class TokensFirst(nn.Module):
    """Attention over (tokens, batch, width), as torch's layers take it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return result


class _TwoHeads(nn.Module):
    """Attention of rows (batch, tokens, 8) to themselves."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        heads = rows.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Signal(nn.Module):
    """Takes (batch, 1, times), which is no single token."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = _TwoHeads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.heads(x.unflatten(-1, (-1, 8)).squeeze(1))
        return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    for name, (kind, config) in FAMILIES.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters() if name != "t5" else ():  # patterns differ from uniform
                if parameter.dim() > 1:
                    parameter.mul_(10)
        model.save_pretrained(root / name)
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="module")
def client(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in models.items()}
    tables["tokens-first"] = custom(TokensFirst, (5, 8))
    tables["signal"] = custom(Signal, (1, 24))
    data_dir = tmp_path_factory.mktemp("data")
    with (
        running_server(models=tables, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def eager(models: dict[str, Path], family: str, inputs: dict[str, Any]) -> Any:
    model = FAMILIES[family][0].from_pretrained(models[family], attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(
            **{name: torch.from_numpy(value) for name, value in inputs.items()}, output_attentions=True
        )


def queries(pattern: Any, inputs: dict[str, Any]) -> Any:
    """Leave out the rows of padding, which kernels fill as they like."""
    mask = inputs.get("attention_mask")
    if mask is None or pattern.shape[2] != mask.shape[1]:
        return pattern
    return pattern.transpose(0, 2, 1, 3)[mask.astype(bool)]


@pytest.mark.parametrize(("family", "path", "name", "inputs"), CASES)
def test_the_pattern_is_that_of_eager_attention(
    client: trocar.Client, models: dict[str, Path], family: str, path: str, name: str, inputs: dict[str, Any]
) -> None:
    if family == "gemma2" and Version(T.__version__) < Version("5.21"):
        pytest.skip("up to transformers 5.20 the model itself leaves the soft-cap out, unless it is eager")
    number = int(next(part for part in path.split(".") if part.isdigit()))
    own = eager(models, family, inputs)[name][number].numpy()
    maps = client.extract(family, inputs, [f"{path}/pattern"])
    found = maps[f"{path}/pattern"]
    assert found.shape == own.shape
    assert float(own.std()) > 0.01
    np.testing.assert_allclose(queries(found, inputs), queries(own, inputs), atol=2e-6)


@pytest.mark.parametrize(("family", "path", "name", "inputs"), CASES)
def test_the_pattern_is_the_softmax_of_the_logits(
    client: trocar.Client, family: str, path: str, name: str, inputs: dict[str, Any]
) -> None:
    maps = client.extract(family, inputs, [f"{path}/pattern", f"{path}/logits", path])
    logits = torch.from_numpy(maps[f"{path}/logits"].copy())
    np.testing.assert_allclose(
        queries(logits.softmax(-1).numpy(), inputs), queries(maps[f"{path}/pattern"], inputs), atol=1e-6
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "bert"])
def test_the_pattern_of_a_single_token_has_all_heads(client: trocar.Client, family: str) -> None:
    path = "encoder.layer.1" if family == "bert" else "model.layers.1"
    for mask in ([[1], [1]], [[1], [0]]):
        inputs = {"input_ids": IDS[:, :1], "attention_mask": np.array(mask)}
        found = client.extract(family, inputs, [f"{path}/pattern"])[f"{path}/pattern"]
        assert found.shape == (2, 4, 1, 1)
        np.testing.assert_array_equal(found[0], np.ones((4, 1, 1), np.float32))


def test_packed_heads_are_not_taken_for_others_by_an_edit(client: trocar.Client) -> None:
    """Which of two shapes a single token's pattern has depends on the mask, so not on the recorded pass."""
    tap, edit = "lm_head", trocar.edit("model.layers.1.self_attn/pattern", "zero", channels=1)
    whole, padded = (
        {"input_ids": IDS[:, :1], "attention_mask": np.array(m)} for m in ([[1], [1]], [[1], [0]])
    )
    plain, edited = (
        client.extract("llama", whole, tap)[tap],
        client.extract("llama", whole, tap, edits=edit)[tap],
    )
    assert not np.array_equal(plain, edited)
    with pytest.raises(EditNotPossibleError, match="packs the heads"):
        client.extract("llama", padded, tap, edits=edit)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("path", ["layer.self_attn", "layer", ""])
def test_attention_over_tokens_first_has_all_heads_of_each_sample(
    client: trocar.Client, path: str, rows: int
) -> None:
    batch, model = noise(rows, 5, 8), rebuilt(TokensFirst)
    x = torch.from_numpy(batch).transpose(0, 1)
    _, expected = model.layer.self_attn(x, x, x, average_attn_weights=False)
    found = client.extract("tokens-first", batch, f"{path}/pattern")[f"{path}/pattern"]
    assert found.shape == (rows, 2, 5, 5)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6)


def test_a_head_of_one_sample_with_its_tokens_first_is_switched_off(client: trocar.Client) -> None:
    batch, attention = noise(1, 5, 8), rebuilt(TokensFirst).layer.self_attn
    x = torch.from_numpy(batch).transpose(0, 1)
    _, pattern = attention(x, x, x, average_attn_weights=False)
    values = F.linear(x, attention.in_proj_weight[16:], attention.in_proj_bias[16:])
    mixed = pattern * torch.tensor([1.0, 0.0]).view(2, 1, 1) @ values.view(5, 2, 4).transpose(0, 1)
    expected = attention.out_proj(mixed.permute(2, 0, 1, 3).flatten(2))
    edit = trocar.edit("layer.self_attn/pattern", "zero", channels=1)
    (found,) = client.extract("tokens-first", batch, "layer.self_attn[0]", edits=edit).values()
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("path", ["heads", ""])
def test_a_signal_is_not_taken_for_a_single_token(client: trocar.Client, path: str) -> None:
    batch = noise(2, 1, 24)
    heads = batch.reshape(2, 3, 2, 4).transpose(0, 2, 1, 3)
    logits = heads @ heads.transpose(0, 1, 3, 2) / 2
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = client.extract("signal", batch, f"{path}/pattern")[f"{path}/pattern"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_alibi_is_added_once_as_in_the_models_own_kernel(
    client: trocar.Client, models: dict[str, Path]
) -> None:
    """Falcon in eager mode adds it twice: it is in the mask that both modes get, and eager adds it again."""

    def without(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "alibi": torch.zeros_like(kwargs["alibi"])}

    model = T.FalconForCausalLM.from_pretrained(models["falcon"], attn_implementation="eager").eval()
    inputs = {name: torch.from_numpy(value) for name, value in PADDED.items()}
    path = "transformer.h.1.self_attention"
    with torch.inference_mode():
        twice = model(**inputs, output_attentions=True).attentions[1].numpy()
        for block in model.transformer.h:
            block.self_attention.register_forward_pre_hook(without, with_kwargs=True)
        once = model(**inputs, output_attentions=True).attentions[1].numpy()
    found = client.extract("falcon", PADDED, f"{path}/pattern")[f"{path}/pattern"]
    np.testing.assert_allclose(queries(found, PADDED), queries(once, PADDED), rtol=1e-4, atol=1e-6)
    assert np.abs(queries(once, PADDED) - queries(twice, PADDED)).max() > 1e-3


def test_other_values_are_those_of_a_pass_without_patterns(client: trocar.Client) -> None:
    alone = client.extract("llama", PADDED, ['/out["logits"]'])
    beside = client.extract("llama", PADDED, ["model.layers.0.self_attn/pattern", '/out["logits"]'])
    np.testing.assert_array_equal(next(iter(alone.values())), list(beside.values())[-1])


def test_a_pattern_takes_the_innermost_module_of_each_attention(client: trocar.Client) -> None:
    maps = client.extract("t5", BOTH, ["decoder.**/pattern"])
    assert [name.removeprefix("decoder.block.") for name in maps] == [
        "0.layer.0.SelfAttention/pattern",
        "0.layer.1.EncDecAttention/pattern",
        "1.layer.0.SelfAttention/pattern",
        "1.layer.1.EncDecAttention/pattern",
    ]


def test_the_plan_knows_shape_and_bytes(client: trocar.Client) -> None:
    tap = "encoder.layer.0/pattern"
    plan = client.plan("bert", PADDED, [tap])
    assert [(entry.name, entry.shape) for entry in plan.feature_maps.values()] == [(tap, (2, 4, 6, 6))]


def test_a_head_is_switched_off_by_an_edit_of_its_pattern(
    client: trocar.Client, models: dict[str, Path]
) -> None:
    path = "encoder.layer.1.attention"
    edit = trocar.edit(f"{path}/pattern", "zero", channels=[2])
    maps = client.extract("bert", PADDED, [f"{path}.output.dense/in"], edits=[edit])
    plain = client.extract("bert", PADDED, [f"{path}.output.dense/in"])
    (changed,), (before,) = maps.values(), plain.values()
    np.testing.assert_array_equal(changed[..., 8:12], 0)
    np.testing.assert_allclose(
        np.delete(changed, np.s_[8:12], -1), np.delete(before, np.s_[8:12], -1), atol=1e-5
    )


def test_logits_are_edited_before_the_softmax(client: trocar.Client) -> None:
    path = "encoder.layer.1.attention"
    edit = trocar.edit(f"{path}/logits", "scale", 0.0)
    maps = client.extract(
        "bert", {"input_ids": IDS}, [f"{path}.output.dense/in", f"{path}.self.value"], edits=[edit]
    )
    values, mixed = maps[f"{path}.self.value"], maps[f"{path}.output.dense/in"]
    np.testing.assert_allclose(mixed, np.broadcast_to(values.mean(1, keepdims=True), mixed.shape), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "selector", "error", "words"),
    [
        ("bert", "encoder.layer.0.intermediate/pattern", trocar.errors.UnknownPickError, "no attention"),
        ("bert", "encoder/pattern", trocar.errors.AmbiguousCallError, "2 attentions"),
        ("t5", "decoder.block.0/pattern", trocar.errors.AmbiguousCallError, "2 attentions"),
    ],
)
def test_a_module_without_one_attention_is_refused(
    client: trocar.Client, family: str, selector: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        client.extract(family, BOTH if family == "t5" else PADDED, [selector])
