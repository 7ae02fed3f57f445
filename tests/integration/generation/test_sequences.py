"""Several prompts and samples in one run, each as if it were alone; `transformers.generate` is the oracle."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

import trocar
from tests.support.models.causal_models import TEXTS, Hooked, save_causal
from tests.support.servers.running_server import running_server

COUNT = 8
BLOCK = "model.layers.1"
CHOSEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}
"""The generation configuration of `tuned`; that of `chatty` draws nothing, that of `beams` has beams."""

MASKED = {"input_ids": np.ones((1, 3), np.int64), "attention_mask": np.ones((1, 3), np.int64)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequences")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    saved = {name: save_causal("llama", folders / name) for name in ("llama", "tuned", "chatty", "beams")}
    changes: dict[str, dict[str, Any]] = {
        "tuned": CHOSEN,
        "chatty": {"repetition_penalty": 1.3},
        "beams": {"num_beams": 4},
    }
    for name, options in changes.items():
        config = GenerationConfig(eos_token_id=0, pad_token_id=0, **options)
        config.save_pretrained(folders / name)
        saved[name].generation_config = config
    return saved


@pytest.fixture(scope="module")
def client(folders: Path, models: dict[str, Any]) -> Iterator[trocar.Client]:
    tables = {name: {"source": f"hf:{folders / name}"} for name in models}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def prompts(folders: Path, models: dict[str, Any]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(str(folders / "llama"))
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def continued(model: Any, ids: list[int], **options: Any) -> list[int]:
    given = torch.tensor([ids])
    settings = {"max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0, **options}
    with torch.inference_mode():
        whole = model.generate(given, attention_mask=torch.ones_like(given), **settings)
    tokens: list[int] = whole[0, len(ids) :].tolist()
    return tokens


def test_each_prompt_is_continued_as_if_it_were_alone(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]]
) -> None:
    forms: list[Any] = [list(TEXTS), prompts, trocar.texts(list(TEXTS)), [np.array(ids) for ids in prompts]]
    expected = [continued(models["llama"], ids, do_sample=False) for ids in prompts]
    for form in forms:
        run = client.generate("llama", form, max_new_tokens=COUNT, stop_token_ids=[], taps=[BLOCK])
        assert [list(sequence.token_ids) for sequence in run.sequences] == expected
        assert [list(ids) for ids in run.prompts] == prompts
        assert run.as_inputs() == [[*ids, *own] for ids, own in zip(prompts, expected, strict=True)]
        for ids, sequence in zip(prompts, run.sequences, strict=True):
            with Hooked(models["llama"], [BLOCK]) as hooked:
                continued(models["llama"], ids, do_sample=False)
            np.testing.assert_array_equal(sequence[BLOCK], hooked.rows(BLOCK))
            assert sequence.positions(BLOCK) == tuple(range(len(ids) + COUNT - 1))
            assert sequence.finish_reason == "length"


def test_rows_of_an_array_are_prompts(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]]
) -> None:
    array = np.array([ids[:6] for ids in prompts[:3]])
    expected = [continued(models["llama"], ids.tolist(), do_sample=False) for ids in array]
    for given in (array, array.astype(np.int32), {"input_ids": array}):
        run = client.generate("llama", given, max_new_tokens=COUNT, stop_token_ids=[])
        assert [list(sequence.token_ids) for sequence in run.sequences] == expected


def test_a_list_of_chats_is_several_prompts(client: trocar.Client) -> None:
    chats = [[("user", "hello")], [("user", "what is it?"), ("assistant", "no idea")]]
    run = client.generate("llama", trocar.chat(chats), max_new_tokens=3, stop_token_ids=[])
    alone = [
        client.generate("llama", trocar.chat(each), max_new_tokens=3, stop_token_ids=[]) for each in chats
    ]
    assert [sequence.token_ids for sequence in run.sequences] == [each.token_ids for each in alone]
    assert [sequence.text for sequence in run.sequences] == [each.text for each in alone]
    assert run.prompts == tuple(each.prompt_ids for each in alone)


def test_a_sample_is_the_one_of_its_index(client: trocar.Client) -> None:
    options: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": [], "temperature": 1.5, "seed": 7}
    run = client.generate("llama", list(TEXTS[:2]), n=3, taps=[BLOCK], logprobs=2, **options)
    assert [(each.prompt, each.sample) for each in run.sequences] == [
        (prompt, sample) for prompt in range(2) for sample in range(3)
    ]
    assert len({each.token_ids for each in run.sequences}) == 6
    for index in range(3):
        alone = client.generate("llama", list(TEXTS[:2]), sample_index=index, taps=[BLOCK], **options)
        for own, sequence in zip(alone.sequences, run.sequences[index::3], strict=True):
            assert own.sample == sequence.sample == index
            assert (own.token_ids, own.logprobs) == (sequence.token_ids, sequence.logprobs)
            np.testing.assert_array_equal(own[BLOCK], sequence[BLOCK])
    later = client.generate("llama", TEXTS[0], n=2, sample_index=1, **options)
    assert [each.token_ids for each in later.sequences] == [run.sequences[i].token_ids for i in (1, 2)]


def test_tokens_tell_their_prompt_and_sample(client: trocar.Client) -> None:
    run = client.generate("llama", list(TEXTS[:2]), n=2, max_new_tokens=3, stop_token_ids=[])
    seen = [(token.prompt, token.sample) for token in run]
    assert seen == [(prompt, sample) for prompt in range(2) for sample in range(2) for _ in range(3)]
    assert len(run.tokens) == 12
    pieces = ["".join(map(str, sequence.tokens)) for sequence in run.sequences]
    assert all(each.text.startswith(piece) for each, piece in zip(run.sequences, pieces, strict=True))


def test_counts_stops_and_the_baseline_are_of_each_text(client: trocar.Client) -> None:
    vector = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    edit = trocar.edit(BLOCK, "add", 9 * vector, positions=trocar.positions(prompt=[-1], generated="all"))
    plain = client.generate("llama", list(TEXTS[:3]), max_new_tokens=COUNT, stop_token_ids=[])
    stop = plain.sequences[1].token_ids[2]
    run = client.generate("llama", list(TEXTS[:3]), max_new_tokens=COUNT, stop_token_ids=[stop], edits=[edit])
    assert [each.token_ids for each in run.baseline.sequences] == [
        each.token_ids[: each.token_ids.index(stop) + 1] if stop in each.token_ids else each.token_ids
        for each in plain.sequences
    ]
    for sequence in run.sequences:
        (count,) = sequence.edit_counts
        assert (count.prompt, count.generated) == (1, len(sequence.token_ids) - 1)


def test_what_one_text_has_is_refused_of_several(client: trocar.Client, tmp_path: Path) -> None:
    run = client.generate("llama", TEXTS[0], n=2, max_new_tokens=2, taps=[BLOCK], stop_token_ids=[])
    for name in ("text", "token_ids", "logprobs", "finish_reason", "edit_counts"):
        with pytest.raises(ValueError, match=r"2 texts: read run\.sequences\[i\]"):
            getattr(run, name)
    with pytest.raises(ValueError, match=r"run\.sequences"):
        _ = run[BLOCK]
    with pytest.raises(ValueError, match=r"run\.sequences"):
        run.save(tmp_path / "run.safetensors")
    run.sequences[1].save(tmp_path / "one.safetensors")
    assert run.values == run.sequences[0].values == (BLOCK,)
    assert len(run.prompt_ids) == len(run.sequences[1].prompt_ids)


def test_the_models_own_sampling_is_that_of_transformers(
    client: trocar.Client, models: dict[str, Any], prompts: list[list[int]]
) -> None:
    run = client.generate("tuned", TEXTS[0], max_new_tokens=2, sampling="model")
    used = {name: run.options[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    assert used == {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.3}
    given = client.generate("tuned", TEXTS[0], max_new_tokens=2, sampling="model", temperature=1.0, top_k=3)
    assert (given.options["temperature"], given.options["top_k"], given.options["top_p"]) == (1.0, 3, 0.9)
    plain = client.generate("tuned", TEXTS[0], max_new_tokens=2)
    assert (plain.options["temperature"], plain.options["repetition_penalty"]) == (0.0, 1.0)
    greedy = client.generate("chatty", [prompts[0]], max_new_tokens=30, sampling="model", stop_token_ids=[])
    assert list(greedy.token_ids) == continued(models["chatty"], prompts[0], max_new_tokens=30)
    without = client.generate("chatty", [prompts[0]], max_new_tokens=30, stop_token_ids=[])
    assert without.token_ids != greedy.token_ids


@pytest.mark.parametrize(
    ("model_id", "prompt", "options", "problem"),
    [
        ("beams", TEXTS[0], {"sampling": "model"}, "num_beams=4"),
        ("llama", TEXTS[0], {"n": 0}, "options.n"),
        ("llama", [TEXTS[0]] * 3, {"n": 400}, "1,200 texts"),
        ("llama", TEXTS[0], {"sample_index": -1}, "sample_index"),
        ("llama", np.zeros((2, 0), np.int64), {}, "at least one token"),
        ("llama", np.zeros((2, 3), np.float32), {}, "whole numbers"),
        ("llama", np.zeros((2, 3, 4), np.int64), {}, "shape"),
        ("llama", [[5, 6], [7, 999]], {}, "999"),
        ("llama", MASKED, {}, "only input"),
        ("llama", [TEXTS[0], "x" * 400], {}, "prompt 1: .* takes 160"),
    ],
)
def test_one_prompt_that_cannot_be_continued_refuses_the_run(
    client: trocar.Client, model_id: str, prompt: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(trocar.TrocarError, match=problem):
        client.generate(model_id, prompt, **{"max_new_tokens": 3, **options})


def test_an_unknown_source_of_options_is_refused_at_once(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="sampling='mine'"):
        client.generate("llama", TEXTS[0], sampling="mine")  # type: ignore[arg-type]
