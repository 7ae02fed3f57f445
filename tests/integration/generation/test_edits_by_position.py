"""Edits of generated text that depend on the pass, not on the position, are refused; the others act once."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T

import trocar
from tests.support.models.causal_models import TEXTS, save_byte_tokenizer, save_causal
from tests.support.servers.running_server import running_server

FAMILIES = ("llama", "mistral", "gemma3", "bloom", "mixtral")
BLOCK = "model.layers.0"
IDS = [5, 9, 17, 33, 2, 120, 7, 81, 4, 63, 12]
COUNT = 8
OPTIONS: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": []}
_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OTHERS: dict[str, Any] = {
    "grouped": (T.MistralForCausalLM, T.MistralConfig(**_SIZES, head_dim=8, sliding_window=6)),
    "recurrent": (
        T.RecurrentGemmaForCausalLM,
        T.RecurrentGemmaConfig(
            **{**_SIZES, "num_hidden_layers": 3}, head_dim=8, lru_width=32, attention_window_size=8
        ),
    ),
    "phi3": (
        T.Phi3ForCausalLM,
        T.Phi3Config(
            **_SIZES,
            max_position_embeddings=160,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    "minimax": (
        T.MiniMaxForCausalLM,
        T.MiniMaxConfig(**_SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"]),
    ),
    "prophetnet": (
        T.ProphetNetForCausalLM,
        T.ProphetNetConfig(
            vocab_size=300,
            hidden_size=16,
            num_decoder_layers=2,
            num_decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=160,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
    ),
}
"""Families with states, caches or rows of their own."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edits")
    for family in FAMILIES:
        save_causal(family, folder / family)
    for name, (kind, config) in OTHERS.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
        model.save_pretrained(str(folder / name))
        save_byte_tokenizer(folder / name)
    return folder


@pytest.fixture(scope="module")
def client(folders: Path) -> Iterator[trocar.Client]:
    tables = {name: {"source": f"hf:{folders / name}#text-generation"} for name in (*FAMILIES, *OTHERS)}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def recomputed(client: trocar.Client, model_id: str, edit: trocar.Edit) -> list[int]:
    """Return greedy tokens of whole passes, without keys and values from before."""
    ids = list(IDS)
    for _ in range(COUNT):
        logits = client.extract(model_id, [ids], ['/out["logits"]'], edits=[edit])['/out["logits"]']
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(IDS) :]


def counts(run: Any) -> list[tuple[int, int]]:
    return [(each.prompt, each.generated) for each in run.edit_counts]


@pytest.mark.parametrize(
    "part",
    [
        {"tokens": [-1]},
        {"tokens": [0]},
        {"tokens": trocar.span("mill")},
        {"index": np.s_[:, -1]},
        {"index": np.s_[:, 2:]},
        {"mask": np.ones((1, len(IDS), 16), bool)},
    ],
)
def test_tokens_of_each_pass_are_refused(client: trocar.Client, part: dict[str, Any]) -> None:
    edit = trocar.edit(BLOCK, "add", 1.0, **part)
    prompt: Any = [IDS] if "mask" in part else "the mill"
    with pytest.raises(trocar.errors.EditNotPossibleError, match=r"count in each pass.* give positions="):
        client.generate("llama", prompt, edits=[edit], **OPTIONS)


@pytest.mark.parametrize(
    ("operation", "arguments", "options"),
    [
        ("normalise", (1.0,), {}),
        ("top_k", (1,), {"dim": 1}),
        ("cast", ("int8",), {}),
        ("project_out", (np.ones((1, len(IDS)), np.float32),), {"channel_dim": 1}),
    ],
)
def test_operations_over_several_tokens_are_refused(
    client: trocar.Client, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    edit = trocar.edit(BLOCK, operation, *arguments, **options)
    with pytest.raises(trocar.errors.EditNotPossibleError, match="reads several tokens at once"):
        client.generate("llama", [IDS], edits=[edit], **OPTIONS)


def test_a_tensor_of_the_prompts_tokens_is_refused_before_anything_is_computed(client: trocar.Client) -> None:
    edit = trocar.edit(BLOCK, "add", np.ones((len(IDS), 16), np.float32))
    with pytest.raises(trocar.errors.EditShapeMismatchError, match=r"shape \(1, 1, 16\)"):
        client.generate("llama", [IDS], edits=[edit], **OPTIONS)
    edit = trocar.edit(BLOCK, "add", np.ones((2, 16), np.float32), positions=trocar.positions(prompt=[0, 1]))
    with pytest.raises(trocar.errors.EditShapeMismatchError, match="cannot be broadcast"):
        client.generate("llama", [IDS], edits=[edit], **OPTIONS)


def test_random_numbers_depend_on_the_position(client: trocar.Client) -> None:
    """Each generated token has numbers of its own; those of the prompt are as in `extract`."""
    edit = trocar.edit(BLOCK, "noise", 1.0, seed=4)
    run = client.generate("llama", [IDS], taps=[BLOCK], edits=[edit], **OPTIONS)
    late = trocar.edit(BLOCK, "noise", 1.0, seed=4, positions=trocar.positions(generated=[2, 4]))
    of_two = client.generate("llama", [IDS], taps=[BLOCK], edits=[late], **OPTIONS)
    inputs = {
        name: client.extract("llama", given.as_inputs(), [BLOCK])[BLOCK][0]
        for name, given in (("all", run), ("two", of_two))
    }
    of_prompt = client.extract("llama", [IDS], [BLOCK], edits=[edit])[BLOCK][0]
    np.testing.assert_array_equal(run[BLOCK][: len(IDS)], of_prompt)
    plain = client.extract("llama", [IDS], [BLOCK])[BLOCK][0]
    np.testing.assert_array_equal(of_two[BLOCK][: len(IDS)], plain)
    rows = [len(IDS) + 2, len(IDS) + 4]
    drawn = of_two[BLOCK][rows] - inputs["two"][rows]
    assert not np.allclose(drawn[0], drawn[1], atol=0.1)
    np.testing.assert_allclose(drawn, (run[BLOCK] - inputs["all"][:-1])[rows], atol=1e-4)


@pytest.mark.parametrize("place", ["lm_head", '/out["logits"]'])
def test_the_head_is_edited_and_counted_where_it_has_values(client: trocar.Client, place: str) -> None:
    vector = np.eye(300, dtype=np.float32)[44] * 1e4

    def run(**options: Any) -> Any:
        edit = trocar.edit(place, "add", vector, **options)
        return client.generate("llama", [IDS], edits=[edit], **OPTIONS).finish()

    last = run(positions=trocar.positions(prompt=[-1]))
    assert last.token_ids[0] == 44
    assert counts(last) == [(1, 0)]
    assert counts(run()) == [(1, COUNT - 1)]
    with pytest.raises(trocar.errors.EditShapeMismatchError, match="the last 1 of 11 tokens, and position 0"):
        run(positions=trocar.positions(prompt=[0]))
    tap = trocar.tap(place, positions=trocar.positions(prompt=[0, -1]))
    with pytest.raises(trocar.errors.InvalidArgumentError, match="has values from position 10 on"):
        client.generate("llama", [IDS], taps=[tap], **OPTIONS).finish()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("port", ["pattern", "logits"])
@pytest.mark.parametrize("part", [{}, {"channels": [1]}])
def test_patterns_are_edited_at_every_token(
    client: trocar.Client, family: str, port: str, part: dict[str, Any]
) -> None:
    own = "transformer.h.0.self_attention" if family == "bloom" else f"{BLOCK}.self_attn"
    edit = trocar.edit(f"{own}/{port}", "scale", 0.25, **part)
    run = client.generate(family, [IDS], edits=[edit], **OPTIONS)
    assert list(run.token_ids) == recomputed(client, family, edit)
    assert counts(run) == [(len(IDS), COUNT - 1)]


@pytest.mark.parametrize("place", ["", "/in"])
def test_packed_heads_are_heads(client: trocar.Client, place: str) -> None:
    """With a mask, torch gets the heads of a group in the place of one token's queries."""
    name = f"fn:scaled_dot_product_attention@0{place}"
    edit = trocar.edit(name, "scale", -2.0, index=np.s_[:, 2])
    run = client.generate("grouped", [IDS], edits=[edit], taps=[name], **OPTIONS)
    assert list(run.token_ids) == recomputed(client, "grouped", edit)
    whole = client.extract("grouped", run.as_inputs(), [name], edits=[edit])[name]
    np.testing.assert_allclose(run[name], whole[0, :, :-1].swapaxes(0, 1), atol=1e-4)
    keys = "fn:scaled_dot_product_attention@0/in[1]"
    edit = trocar.edit(keys, "scale", -2.0, index=np.s_[:, 2])
    with pytest.raises(trocar.errors.EditNotPossibleError, match="has another shape"):
        client.generate("grouped", [IDS], edits=[edit], **OPTIONS).finish()


def test_some_positions_of_values_that_are_computed_anew_are_refused(client: trocar.Client) -> None:
    edit = trocar.edit("fn:scaled_dot_product_attention@0/in[1]", "noise", 0.1)
    with pytest.raises(trocar.errors.EditNotPossibleError, match="anew for all positions in each pass"):
        client.generate("llama", [IDS], edits=[edit], **OPTIONS).finish()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_a_run(client: trocar.Client, temperature: float) -> None:
    edit = trocar.edit("lm_head", "scale", 3e38, positions=trocar.positions(generated=[2]))
    run = client.generate("llama", [IDS], edits=[edit], temperature=temperature, **OPTIONS)
    with pytest.raises(trocar.errors.NonFiniteValueError, match="logits at position 13 are not finite"):
        run.finish()


def test_an_edited_parameter_counts_every_position(client: trocar.Client) -> None:
    edit = trocar.edit(f"{BLOCK}.mlp.gate_proj/param(weight)", "scale", 0.5)
    run = client.generate("llama", [IDS], edits=[edit], **OPTIONS)
    assert counts(run) == [(len(IDS), COUNT - 1)]


def test_an_edit_that_changes_nothing_and_a_place_that_is_not_there_say_so(client: trocar.Client) -> None:
    late = trocar.edit('/out["logits"]', "zero", order="after")
    with pytest.raises(trocar.TrocarError, match="would change nothing"):
        client.generate("llama", TEXTS[0], edits=[late], **OPTIONS)
    with pytest.raises(trocar.TrocarError, match="the call has no input 'query'"):
        client.generate("llama", TEXTS[0], taps=["fn:scaled_dot_product_attention@0/in(query)"], **OPTIONS)


@pytest.mark.parametrize(
    ("name", "taps", "problem"),
    [
        ("recurrent", [], "keeps its state in its own modules"),
        ("minimax", [], "keeps its state in another way"),
        ("phi3", [], "computes all keys and values anew"),
        ("prophetnet", ["prophetnet.decoder.layers.0.self_attn.query_proj"], "rows for 11 tokens"),
    ],
)
def test_families_whose_positions_have_no_single_value_are_refused(
    client: trocar.Client, name: str, taps: list[str], problem: str
) -> None:
    with pytest.raises(trocar.TrocarError, match=problem):
        client.generate(name, [IDS], taps=taps, **OPTIONS).finish()


def test_a_text_on_one_side_of_the_switch_is_generated(client: trocar.Client) -> None:
    for prompt, count in ((11, 6), (17, 8)):
        ids = [*IDS, *IDS][:prompt]
        run = client.generate("phi3", [ids], max_new_tokens=count, stop_token_ids=[])
        assert len(run.token_ids) == count
