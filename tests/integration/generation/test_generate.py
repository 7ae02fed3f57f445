"""Generated text, with taps and edits at every token, against `transformers.generate` with own hooks."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import CAUSAL, TEXTS, Hooked, save_causal
from tests.support.models.text_models import save_text_model
from tests.support.servers.footprint import hook_count
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from trocar_server.engine.generate import generation
from trocar_server.models import ModelState

BLOCKS = {
    **dict.fromkeys(set(CAUSAL) - {"gpt2", "bloom", "opt", "neox"}, "model.layers.1"),
    "gpt2": "transformer.h.1",
    "bloom": "transformer.h.1/out[0]",
    "opt": "model.decoder.layers.1",
    "neox": "gpt_neox.layers.1",
}
COUNT = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("causal")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    """The models in this process; those of `half` in bfloat16."""
    found = {family: save_causal(family, folders / family) for family in CAUSAL}
    found["half"] = save_causal("llama", folders / "half", torch.bfloat16)
    save_text_model(folders / "bert")
    return found


@pytest.fixture(scope="module")
def server(folders: Path, models: dict[str, Any]) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folders / name}"} for name in (*models, "bert")}
    tables["net"] = {"architecture": "squeezenet1_1", "weights": "random:0"}
    with running_server(models=tables, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


def ids_of(folders: Path, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(str(folders / "llama"))(text)["input_ids"]
    return ids


def generated(model: Any, ids: list[int], **options: Any) -> Any:
    """Generate greedily with transformers; returns token ids and logits."""
    given = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        return model.generate(
            given,
            attention_mask=torch.ones_like(given),
            output_logits=True,
            return_dict_in_generate=True,
            use_cache=True,
            **{**settings, **options},
        )


@pytest.mark.parametrize("family", [*CAUSAL, "half"])
def test_tokens_logits_and_values_have_the_bits_of_transformers(
    client: trocar.Client, models: dict[str, Any], folders: Path, family: str
) -> None:
    model, block = models[family], BLOCKS.get(family, "model.layers.1")
    for text in (TEXTS[0], TEXTS[2][:1]):
        ids = ids_of(folders, text)
        path = block.partition("/")[0]
        with Hooked(model, [path]) as hooked:
            expected = generated(model, ids)
        run = client.generate(
            family, [ids], max_new_tokens=COUNT, stop_token_ids=[], taps=[block], logprobs=3
        )
        assert list(run.token_ids) == expected.sequences[0, len(ids) :].tolist()
        scores = torch.cat(expected.logits).float().log_softmax(-1)
        chosen = [float(row[token]) for row, token in zip(scores, run.token_ids, strict=True)]
        assert list(run.logprobs) == chosen
        assert [each.token_id for each in run.tokens[0].likely] == scores[0].topk(3).indices.tolist()
        np.testing.assert_array_equal(run[block], hooked.rows(path))
        assert run.positions(block) == tuple(range(len(ids) + COUNT - 1))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_last_token_needs_no_position(
    client: trocar.Client, models: dict[str, Any], folders: Path, family: str
) -> None:
    ids = (ids_of(folders, TEXTS[1]) * 160)[:160]
    for count in (1, 3):
        prompt = ids[: 161 - count]
        expected = generated(models[family], prompt, max_new_tokens=count)
        run = client.generate(family, [prompt], max_new_tokens=count, stop_token_ids=[])
        assert list(run.token_ids) == expected.sequences[0, len(prompt) :].tolist()
    with pytest.raises(trocar.errors.InvalidArgumentError, match="may need 161 positions"):
        client.generate(family, [ids], max_new_tokens=2)


@pytest.mark.parametrize("prompts", [[[]], [[1, 2], []]])
def test_a_prompt_without_tokens_is_refused(client: trocar.Client, prompts: list[list[int]]) -> None:
    with pytest.raises(trocar.errors.EmptyBatchError, match="of the list is empty; a text has at least one"):
        client.generate("llama", prompts)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_edits_act_at_every_token_as_hooks_do(
    client: trocar.Client, models: dict[str, Any], folders: Path, family: str
) -> None:
    model, block = models[family], BLOCKS[family]
    first = block.replace(".1", ".0")
    ids, vector = ids_of(folders, TEXTS[1]), torch.randn(16, generator=torch.Generator().manual_seed(3))
    with Hooked(model, [block], {first: lambda x: x + 4.0 * vector}) as hooked:
        expected = generated(model, ids)
    plain = generated(model, ids)
    edit = trocar.edit(first, "add", 4.0 * vector.numpy())
    run = client.generate(family, [ids], max_new_tokens=COUNT, stop_token_ids=[], taps=[block], edits=[edit])
    assert list(run.token_ids) == expected.sequences[0, len(ids) :].tolist()
    assert not torch.equal(plain.logits[0], expected.logits[0])
    np.testing.assert_array_equal(run[block], hooked.rows(block))
    (count,) = run.edit_counts
    assert (count.prompt, count.generated) == (len(ids), COUNT - 1)


def test_text_comes_in_pieces_that_make_the_whole(
    client: trocar.Client, models: dict[str, Any], folders: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folders / "llama"))
    for text in TEXTS:
        ids = ids_of(folders, text)
        expected = generated(models["llama"], ids, max_new_tokens=30)
        run = client.generate("llama", text, max_new_tokens=30, stop_token_ids=[])
        pieces = [str(token) for token in run]
        assert list(run.prompt_ids) == ids
        assert list(run.token_ids) == expected.sequences[0, len(ids) :].tolist()
        whole = tokenizer.decode(expected.sequences[0].tolist(), skip_special_tokens=False)
        assert run.text == whole[len(text) :]
        assert run.text.startswith("".join(pieces))
        assert run.finish_reason == "length"


def test_an_array_of_token_ids_is_a_prompt(client: trocar.Client, folders: Path) -> None:
    ids = ids_of(folders, TEXTS[0])
    forms: list[Any] = [[ids], np.array([ids]), {"input_ids": np.array([ids])}, TEXTS[0]]
    runs = [client.generate("llama", form, max_new_tokens=4, stop_token_ids=[]) for form in forms]
    assert len({run.token_ids for run in runs}) == 1
    assert all(list(run.prompt_ids) == ids for run in runs)


def test_the_baseline_is_the_same_run_without_edits(client: trocar.Client) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "stop_token_ids": []}
    edit = trocar.edit("model.layers.0", "scale", -3.0)
    run = client.generate("llama", TEXTS[0], edits=[edit], taps=["model.layers.1"], **options)
    plain = client.generate("llama", TEXTS[0], taps=["model.layers.1"], **options)
    assert run.baseline.token_ids == plain.token_ids
    np.testing.assert_array_equal(run.baseline["model.layers.1"], plain["model.layers.1"])
    assert run.baseline is run.baseline
    assert not np.array_equal(run["model.layers.1"], run.baseline["model.layers.1"])


def test_a_chat_is_a_prompt(client: trocar.Client) -> None:
    run = client.generate("llama", trocar.chat([("user", "hello")]), max_new_tokens=2)
    assert len(run.prompt_ids) >= len("[user]hello") // 4
    assert len(run.token_ids) <= 2


def test_stop_tokens_and_stop_strings_end_a_text(client: trocar.Client, folders: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folders / "llama"))
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    options: dict[str, Any] = {
        "max_new_tokens": 30,
        "logit_bias": dict.fromkeys(letters, 100.0),
        "presence_penalty": 20.0,
    }
    whole = client.generate("llama", TEXTS[0], stop_token_ids=[], **options)
    third = whole.token_ids[2]
    run = client.generate("llama", TEXTS[0], stop_token_ids=[third], **options)
    assert run.finish_reason == "stop_token"
    assert run.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    stop = whole.text[4:7]
    stopped = client.generate("llama", TEXTS[0], stop_token_ids=[], stop=[stop, "never"], **options)
    assert stopped.finish_reason == "stop_string"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert len(stopped.token_ids) < 30


def test_a_tap_that_was_not_reached_says_so_and_the_last_token_has_likely_ones(
    client: trocar.Client,
) -> None:
    first = client.generate("llama", TEXTS[0], max_new_tokens=1, stop_token_ids=[]).token_ids[0]
    late = trocar.tap("model.layers.1", positions=trocar.positions(generated=[3]))
    run = client.generate(
        "llama", TEXTS[0], max_new_tokens=8, stop_token_ids=[first], taps=[late], logprobs=2
    ).finish()
    assert run.finish_reason == "stop_token"
    assert all(each.text for each in run.tokens[-1].likely)
    with pytest.raises(KeyError, match="ended before any of its positions was computed"):
        _ = run["model.layers.1"]


def test_seeds_of_64_bits_differ(client: trocar.Client) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5, "stop_token_ids": []}
    runs = [client.generate("llama", TEXTS[0], seed=seed, **options) for seed in (5, (1 << 63) + 5)]
    assert runs[0].token_ids != runs[1].token_ids


def test_the_same_seed_draws_the_same_text(client: trocar.Client) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 50, "stop_token_ids": []}
    one, same = (client.generate("gpt2", TEXTS[0], seed=7, **options) for _ in range(2))
    others = [client.generate("gpt2", TEXTS[0], seed=seed, **options).token_ids for seed in range(3)]
    assert one.token_ids == same.token_ids
    assert len({one.token_ids, *others}) > 1


def test_a_low_precision_of_the_wire_is_asked_for_by_the_tap(client: trocar.Client) -> None:
    block = BLOCKS["llama"]
    exact = client.generate("llama", TEXTS[0], max_new_tokens=3, taps=[block])
    cast = client.generate("llama", TEXTS[0], max_new_tokens=3, taps=[trocar.tap(block, cast="float16")])
    assert cast[block].dtype == np.float16
    np.testing.assert_array_equal(cast[block], exact[block].astype(np.float16))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"taps": ["model.layers.9"]}, "no module 'model.layers.9'"),
        ({"max_new_tokens": 1000}, "the model has 160"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-45}, "give 0 for the most likely token"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": 10_000}, "logprobs"),
        ({"logit_bias": {999: 1.0}}, "999"),
        ({"stop_token_ids": [999]}, "999"),
        ({"taps": [trocar.tap("model.layers.1", stats="mean")]}, "statistics"),
        ({"taps": ["model.layers.1.self_attn/pattern"]}, "dimension of tokens"),
        ({"taps": ["fx:linear"]}, "traced graph"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_computed(
    client: trocar.Client, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(trocar.TrocarError, match=problem):
        client.generate("llama", TEXTS[0], **options)


def test_a_model_is_unloaded_behind_its_runs(
    client: trocar.Client, server: RunningServer, models: dict[str, Any], folders: Path
) -> None:
    ids = ids_of(folders, TEXTS[0])
    expected = generated(models["gpt2"], ids, max_new_tokens=120).sequences[0, len(ids) :].tolist()
    # With a stop string each token waits until the one before was sent, so the run is longer.
    run = client.generate("gpt2", [ids], max_new_tokens=120, stop_token_ids=[], stop=["no such text"])
    next(iter(run))
    with ThreadPoolExecutor() as pool, trocar.connect(server.address) as other:
        unloading = pool.submit(other.unload, "gpt2")
        wait_until(lambda: server.engine.catalogue.get("gpt2").state is not ModelState.LOADED)
        with pytest.raises(trocar.errors.ModelNotLoadedError):
            client.generate("gpt2", [ids], max_new_tokens=1)
        assert list(run.finish().token_ids) == expected
        unloading.result()
    client.load("gpt2")


def test_a_model_says_whether_it_generates(client: trocar.Client, models: dict[str, Any]) -> None:
    listed = {model.model_id: model.generates for model in client.models()}
    assert listed == {**dict.fromkeys(models, True), "bert": False, "net": False}
    assert client.model("llama").generates


@pytest.mark.parametrize(
    ("model_id", "prompt", "problem"),
    [
        ("bert", "hello", "no head for the next token"),
        ("net", "hello", "'net' cannot generate text: it is no language model"),
        ("llama", "", "at least one token|empty"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    client: trocar.Client, model_id: str, prompt: Any, problem: str
) -> None:
    with pytest.raises(trocar.TrocarError, match=problem):
        client.generate(model_id, prompt)


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes(
    client: trocar.Client, folders: Path, models: dict[str, Any]
) -> None:
    ids, count = ids_of(folders, TEXTS[0]), 130
    length = len(ids) + count - 1
    needed = 2 * 2 * 16 * 4 * length  # keys and values of two layers, float32
    of_prompt = client.plan("llama", [ids], ['/out["logits"]']).memory_bytes
    limits = {"max_pass_bytes": of_prompt + needed // 2}
    tables = {"llama": {"source": f"hf:{folders / 'llama'}"}}
    with (
        running_server(models=tables, device="cpu", limits=limits) as running,
        trocar.connect(running.address) as limited,
    ):
        with pytest.raises(trocar.errors.PassTooLargeError, match=f"{needed:,} bytes"):
            limited.generate("llama", [ids], max_new_tokens=count)
        assert limited.generate("llama", [ids], max_new_tokens=3).token_ids


def test_a_cache_beyond_its_callers_share_is_refused_for_good(folders: Path, models: dict[str, Any]) -> None:
    needed = 2 * 2 * 16 * 4 * 139  # keys and values of two layers, float32
    tables = {"gpt2": {"source": f"hf:{folders / 'gpt2'}"}}
    limits = {"max_principal_bytes": needed - 1}
    with (
        running_server(models=tables, device="cpu", limits=limits) as running,
        trocar.connect(running.address) as limited,
    ):
        with pytest.raises(trocar.errors.RequestTooLargeError, match="one caller may have"):
            limited.generate("gpt2", [[5] * 10], max_new_tokens=130)
        assert limited.generate("gpt2", [[5] * 10], max_new_tokens=3).token_ids


def test_the_size_of_a_models_caches_is_worked_out_once(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.generate("qwen3", TEXTS[0], max_new_tokens=2)
    calls: list[Any] = []
    monkeypatch.setattr(generation, "make_meta_replica", calls.append)
    for text, count in ((TEXTS[0], 2), (TEXTS[1], 5)):
        client.generate("qwen3", text, max_new_tokens=count)
    assert not calls


def test_values_are_saved_with_their_tokens(client: trocar.Client, tmp_path: Path) -> None:
    run = client.generate("llama", TEXTS[0], max_new_tokens=4, taps=[BLOCKS["llama"]], stop_token_ids=[])
    run.save(tmp_path / "run.safetensors")
    saved = load_file(tmp_path / "run.safetensors")
    np.testing.assert_array_equal(saved[BLOCKS["llama"]], run[BLOCKS["llama"]])
    assert saved["token_ids"].tolist() == run.as_inputs()[0]


def test_the_finished_text_is_an_input(client: trocar.Client) -> None:
    run = client.generate("llama", TEXTS[0], max_new_tokens=4, taps=[BLOCKS["llama"]], stop_token_ids=[])
    maps = client.extract("llama", run.as_inputs(), [BLOCKS["llama"]])
    np.testing.assert_allclose(maps[BLOCKS["llama"]][0, :-1], run[BLOCKS["llama"]], rtol=1e-4, atol=1e-5)


def test_a_run_that_nobody_reads_ends_and_leaves_nothing(server: RunningServer) -> None:
    with trocar.connect(server.address) as client:
        with client.generate("llama", TEXTS[0], max_new_tokens=100, stop_token_ids=[]) as run:
            next(iter(run))
        maps = client.extract("llama", [[5, 6, 7]], [BLOCKS["llama"]])
    assert maps[BLOCKS["llama"]].shape == (1, 3, 16)
    deployment = server.engine.deployment("llama")
    assert all(hook_count(replica.module) == 0 for replica in deployment.pool.free)


def test_calls_run_between_two_tokens(server: RunningServer) -> None:
    with trocar.connect(server.address) as client:
        run = client.generate("llama", TEXTS[0], max_new_tokens=60, stop_token_ids=[])
        tokens, calls = iter(run), 0
        for _ in range(20):
            next(tokens)
            client.extract("llama", [[5, 6, 7]], [BLOCKS["llama"]])
            calls += 1
        assert not run.is_finished or calls == 20
        whole = client.generate("llama", TEXTS[0], max_new_tokens=60, stop_token_ids=[])
        assert run.token_ids == whole.token_ids


def test_the_asyncio_client_generates_too(server: RunningServer, client: trocar.Client) -> None:
    expected = client.generate("gpt2", TEXTS[0], max_new_tokens=5, stop_token_ids=[]).token_ids

    async def main() -> tuple[int, ...]:
        async with trocar.aio.connect(server.address) as asynchronous:
            run = await asynchronous.generate("gpt2", TEXTS[0], max_new_tokens=5, stop_token_ids=[])
            with pytest.raises(RuntimeError, match="under way"):
                _ = run.text
            found = [token.token_id async for token in run]
            assert run.text == "".join(map(str, run.tokens)) or run.text
            return tuple(found)

    assert asyncio.run(main()) == expected
