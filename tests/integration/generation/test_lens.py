"""The logit lens, against hooks and the family's own norm and head in this process."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import CAUSAL, TEXTS, Hooked, save_byte_tokenizer, save_causal
from tests.support.models.text_models import save_text_model
from tests.support.servers.footprint import hook_count
from tests.support.servers.running_server import RunningServer, running_server
from trocar._result.likely_tokens import LikelyToken

BLOCKS = {
    "gpt2": "transformer.h.0",
    "bloom": "transformer.h.0",
    "opt": "model.decoder.layers.0",
    "neox": "gpt_neox.layers.0",
}
HEADS: dict[str, Any] = {
    "gpt2": lambda model, h: model.lm_head(model.transformer.ln_f(h)),
    "bloom": lambda model, h: model.lm_head(model.transformer.ln_f(h)),
    "opt": lambda model, h: model.lm_head(model.model.decoder.final_layer_norm(h)),
    "neox": lambda model, h: model.lm_head(model.gpt_neox.final_layer_norm(h)),
    "phi": lambda model, h: model.lm_head(model.model.final_layernorm(h)),
}
FAMILIES = tuple(CAUSAL)
COUNT = 6


def block_of(family: str) -> str:
    return BLOCKS.get(family, "model.layers.0")


def scores(model: Any, family: str, hidden: Any) -> torch.Tensor:
    """Return the log-probabilities of the next token of hidden states, by the family's own norm and head."""
    head = HEADS.get(family, lambda model, h: model.lm_head(model.model.norm(h)))
    with torch.no_grad():
        return head(model, torch.as_tensor(hidden)).float().log_softmax(-1)  # type: ignore[no-any-return]


def check(read: list[tuple[LikelyToken, ...]], expected: torch.Tensor) -> None:
    """Compare what a lens read at each position with log-probabilities (positions, vocabulary)."""
    assert len(read) == len(expected)
    for tokens, row in zip(read, expected, strict=True):
        best = row.topk(len(tokens)).values
        np.testing.assert_allclose([each.logprob for each in tokens], best, rtol=1e-4, atol=1e-4)
        at = row[[each.token_id for each in tokens]]
        np.testing.assert_allclose(at, best, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lens")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    made = {family: save_causal(family, folders / family) for family in FAMILIES}
    save_text_model(folders / "bert")
    for name, (kind, config) in CAPPED.items():
        torch.manual_seed(0)
        kind(config).eval().save_pretrained(str(folders / name))
        save_byte_tokenizer(folders / name)
    return made


_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "pad_token_id": 0,
}
CAPPED: dict[str, Any] = {
    "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config(**_SIZES, final_logit_softcapping=2.0)),
    "cohere": (T.CohereForCausalLM, T.CohereConfig(**_SIZES, logit_scale=0.25)),
    "granite": (T.GraniteForCausalLM, T.GraniteConfig(**_SIZES, logits_scaling=3.0)),
}
"""Families that scale or cap the logits behind the head."""


@pytest.fixture(scope="module")
def server(folders: Path, models: dict[str, Any]) -> Iterator[RunningServer]:
    tables = {name: {"source": f"hf:{folders / name}"} for name in (*models, *CAPPED, "bert")}
    with running_server(models=tables, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lens_is_the_models_own_norm_and_head(
    client: trocar.Client, models: dict[str, Any], folders: Path, family: str
) -> None:
    ids = AutoTokenizer.from_pretrained(str(folders / family))(TEXTS[0])["input_ids"]
    with Hooked(models[family], [block_of(family)]) as hooked, torch.no_grad():
        models[family](torch.tensor([ids]))
    maps = client.extract(family, [ids], [trocar.lens("layer[0]", top_k=4)])
    check(maps.lens("layer[0]")[0], scores(models[family], family, hooked.rows(block_of(family))))
    name = next(iter(maps))
    assert name.endswith(":lens")
    assert maps.lens(name) == maps.lens("layer[0]")
    assert maps[name].shape == maps[f"{name}.indices"].shape == (1, len(ids), 4)


@pytest.mark.parametrize("family", [*FAMILIES, *CAPPED])
def test_the_lens_of_the_last_layer_is_the_models_prediction(client: trocar.Client, family: str) -> None:
    taps: list[str | trocar.Tap] = [trocar.lens("layer[-1]", top_k=3), '/out["logits"]']
    maps = client.extract(family, TEXTS[0], taps)
    expected = torch.as_tensor(maps['/out["logits"]'][0]).float().log_softmax(-1)
    check(maps.lens("layer[-1]")[0], expected)
    edit = trocar.edit("head", "scale", -1.0)
    head = trocar.lens('/out["logits"]', top_k=3)
    maps = client.extract(family, TEXTS[0], [head, '/out["logits"]'], edits=[edit])
    own = torch.as_tensor(maps['/out["logits"]'][0]).float().log_softmax(-1)
    check(maps.lens('/out["logits"]')[0], own)
    run = client.generate(family, TEXTS[0], max_new_tokens=3, stop_token_ids=[], taps=[head], edits=[edit])
    assert [tokens[0].token_id for tokens in run.lens('/out["logits"]')] == list(run.token_ids)


def test_texts_are_those_of_the_tokenizer_and_padding_is_left_out(
    client: trocar.Client, folders: Path
) -> None:
    texts = [TEXTS[0], "The mill"]
    tokenizer = AutoTokenizer.from_pretrained(str(folders / "llama"))
    lenses = [
        trocar.lens("layer[0]", top_k=2),
        trocar.lens("layer[0]", top_k=2, alias="last", positions=trocar.positions(prompt=[-1])),
    ]
    maps = client.extract("llama", texts, [*lenses, "layer[0]"])
    read = maps.lens("layer[0]")
    assert [len(rows) for rows in read] == list(maps.tokens.lengths)
    ids, last = (
        [[each.token_id for each in rows[-1]] for rows in part] for part in (read, maps.lens("last"))
    )
    assert ids == last
    for tokens in (row for rows in read for row in rows):
        assert [each.text for each in tokens] == [tokenizer.decode([each.token_id]) for each in tokens]
    assert maps["model.layers.0"].shape[-1] == 16
    alone = client.extract("llama", texts[1], [lenses[0]])
    for one, other in zip(alone.lens("layer[0]")[0], read[1], strict=True):
        assert [each.token_id for each in one] == [each.token_id for each in other]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_lens_reads_every_generated_token(
    client: trocar.Client, models: dict[str, Any], family: str
) -> None:
    path = block_of(family)
    last = trocar.positions(prompt=[-1], generated="all")
    taps: list[str | trocar.Tap] = [
        path,
        trocar.lens(path, top_k=3),
        trocar.lens("layer[-1]", top_k=1, positions=last),
    ]
    run = client.generate(family, TEXTS[0], max_new_tokens=COUNT, stop_token_ids=[], taps=taps)
    check(run.lens(path), scores(models[family], family, run[path]))
    assert run.positions(f"{path}:lens") == run.positions(path)
    assert [tokens[0].token_id for tokens in run.lens("layer[-1]")] == list(run.token_ids)
    assert all(tokens[0].text for tokens in run.lens("layer[-1]"))
    edit = trocar.edit(path, "add", np.linspace(-3, 3, 16, dtype=np.float32))
    steered = client.generate(
        family, TEXTS[0], max_new_tokens=COUNT, stop_token_ids=[], taps=taps, edits=[edit]
    )
    check(steered.lens(path), scores(models[family], family, steered[path]))


def test_every_other_way_to_ask_reads_the_same(
    client: trocar.Client, server: RunningServer, folders: Path
) -> None:
    taps = [trocar.lens("layer[0]", top_k=2), trocar.lens("layer[1]", top_k=2)]
    expected = client.extract("llama", TEXTS[0], taps)
    assert set(expected) == {f"model.layers.{at}:lens{end}" for at in (0, 1) for end in ("", ".indices")}
    assert client.plan("llama", TEXTS[0], taps).feature_maps["model.layers.0:lens"].shape[-1] == 2
    with client.extract_stream("llama", [TEXTS[0], TEXTS[0]], taps) as stream:
        results = [result.unwrap() for result in stream]
    for maps in results:
        assert maps.lens("layer[1]") == expected.lens("layer[1]")
    with trocar.connect(server.address) as other, other.train("llama", losses="causal_lm") as trainer:
        maps = trainer.extract(TEXTS[0], taps)
        assert maps.lens("layer[1]") == expected.lens("layer[1]")
    deployment = server.engine.deployment("llama")
    assert all(hook_count(replica.module) == 0 for replica in deployment.pool.free)
    assert hook_count(deployment.hosted.module) == 0


@pytest.mark.parametrize(
    ("model_id", "tap", "problem"),
    [
        ("bert", trocar.lens("layer[0]"), "has no logit lens: .*no head for the next token"),
        ("llama", trocar.lens("layer[0]", top_k=301), "at most the model's 300 tokens"),
        ("llama", trocar.lens("layer[0]", top_k=2000), "1 to 1,024"),
        ("llama", trocar.lens("model.layers.0.mlp.gate_proj"), "of the width 16 of the last block's output"),
        ("llama", trocar.lens("model.layers.0.self_attn/pattern"), "width 16|not the last dimension"),
        (
            "llama",
            trocar.tap("layer[0]", reduce=[*trocar.lens("layer[0]").reduce, trocar.pool("avg")]),
            "a lens must be the last",
        ),
    ],
)
def test_what_has_no_lens_is_refused(
    client: trocar.Client, model_id: str, tap: trocar.Tap, problem: str
) -> None:
    calls: list[Any] = [client.extract, client.plan]
    if model_id != "bert":
        calls.append(lambda model, text, taps: client.generate(model, text, taps=taps))
    for call in calls:
        with pytest.raises(trocar.TrocarError, match=problem):
            call(model_id, "a cat", [tap])


@pytest.mark.parametrize("lens_is_last", [True, False])
def test_a_selector_of_a_value_and_a_lens_is_the_value(client: trocar.Client, lens_is_last: bool) -> None:
    taps: list[str | trocar.Tap] = ["layer[0]", trocar.lens("layer[0]", top_k=2)]
    taps = taps if lens_is_last else taps[::-1]
    maps = client.extract("llama", TEXTS[0], taps)
    assert maps["layer[0]"].shape[-1] == 16
    assert maps.info["layer[0]"].shape[-1] == 16
    assert len(maps.lens("layer[0]")[0][0]) == 2
    run = client.generate("llama", TEXTS[0], max_new_tokens=2, stop_token_ids=[], taps=taps)
    assert run["layer[0]"].shape[-1] == 16
    assert len(run.lens("layer[0]")[0]) == 2


def test_what_is_no_lens_is_named(client: trocar.Client) -> None:
    maps = client.extract("llama", TEXTS[0], ["layer[0]"])
    with pytest.raises(KeyError, match="is no lens"):
        maps.lens("layer[0]")
    with pytest.raises(ValueError, match="below 1"):
        trocar.lens("layer[0]", top_k=0)
    with pytest.raises(trocar.TrocarError, match="a gradient has no lens"):
        client.gradients("llama", TEXTS[0], of=trocar.value("layer[1]"), at=[trocar.lens("layer[0]")])
