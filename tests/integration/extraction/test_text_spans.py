"""Tokens by characters, words and roles: those of the tokenizer's offsets and of transformers' own masks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server

MODELS = text_models.__name__
LAYER = "model.encoder.layer.1"
GPT_LAYER = "model.h.1"
TEXTS = ["the cat sat on the mat", "a dog sat", "cat cat"]
CHAT = [
    {"role": "system", "content": "a dog : user"},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": " hello dog "},
]
MARKED = (
    "{% for message in messages %}{{ message.role }} : {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{% endgeneration %}{% else %}{{ message.content | trim }}{% endif %} {% endfor %}"
)
"""A template that tells transformers itself where the assistant speaks."""
CHANGING = "{% for message in messages %}{{ message.content | upper }} {% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "bert": text_models.save_tokenizer(
            root / "bert", chat_template=text_models.CHAT_TEMPLATE, model_max_length=32
        ),
        "gpt": text_models.save_tokenizer(
            root / "gpt", chat_template=MARKED, padding_side="left", model_max_length=32
        ),
        "changing": text_models.save_tokenizer(root / "changing", chat_template=CHANGING),
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    factories = {"bert": "long_bert", "gpt": "long_gpt", "changing": "bert"}
    models: dict[str, Any] = {
        name: {"factory": f"{MODELS}:{factories[name]}", "input_shape": (4,), "processor": folder}
        for name, folder in folders.items()
    }
    with running_server(models=models, device="cpu") as running:
        yield running


def overlapping(tokenizer: Any, text: str, start: int, stop: int) -> list[int]:
    """Return the tokens of a text whose offsets overlap a range, special tokens left out."""
    encoding = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    return [
        place
        for place, (begin, end) in enumerate(encoding["offset_mapping"])
        if begin < stop and start < end and not encoding["special_tokens_mask"][place]
    ]


@pytest.mark.parametrize(("model", "layer"), [("bert", LAYER), ("gpt", GPT_LAYER)])
def test_characters_are_the_tokens_whose_offsets_overlap(
    client: trocar.Client, folders: dict[str, Path], model: str, layer: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folders[model]))
    span = (2, 6)
    maps = client.extract(model, TEXTS, [layer, trocar.tap(layer, alias="chosen", tokens=trocar.span(*span))])
    wanted = [overlapping(tokenizer, text, *span) for text in TEXTS]
    assert [list(row) for row in maps.info["chosen"].token_positions] == wanted
    assert len({len(row) for row in wanted}) > 1
    for values, chosen, row in zip(maps.samples(layer), maps.samples("chosen"), wanted, strict=True):
        np.testing.assert_array_equal(chosen, values[row])
    longest = max(map(len, wanted))
    assert maps["chosen"].shape[:2] == (3, longest)
    assert not maps["chosen"][2, len(wanted[2]) :].any()


def test_a_text_is_every_occurrence_in_each_text(client: trocar.Client) -> None:
    texts = ["the cat sat on the mat", "the the cat"]
    tap = trocar.tap(LAYER, tokens=trocar.span("the"))
    maps = client.extract("bert", texts, [tap])
    assert maps.info[LAYER].token_positions == ((1, 5), (1, 2))
    own = [trocar.span("mat"), trocar.span("the cat")]
    maps = client.extract("bert", texts, [trocar.tap(LAYER, tokens=own)])
    assert maps.info[LAYER].token_positions == ((6,), (2, 3))


def test_characters_of_a_pair_are_of_its_first_text_and_a_text_is_in_both(client: trocar.Client) -> None:
    pair = [("the cat", "a dog the")]
    first = client.extract("bert", pair, [trocar.tap(LAYER, tokens=trocar.span(0, 3))])
    both = client.extract("bert", pair, [trocar.tap(LAYER, tokens=trocar.span("the"))])
    assert first.info[LAYER].token_positions == ((1,),)
    assert both.info[LAYER].token_positions == ((1, 6),)


def test_statistics_pools_and_objectives_leave_the_filling_out(client: trocar.Client) -> None:
    span = trocar.span(2, 6)
    taps = [
        trocar.tap(LAYER, alias="values", tokens=span),
        trocar.tap(LAYER, alias="mean", tokens=span, reduce=trocar.pool("avg")),
        trocar.tap(LAYER, alias="stats", tokens=span, stats=["mean", "count"], values=False),
        trocar.tap(LAYER, alias="part", tokens=span, samples=[2, 0], channels=[1, 3]),
    ]
    maps = client.extract("bert", TEXTS, taps)
    rows = maps.samples("values")
    np.testing.assert_allclose(maps["mean"], [row.mean(0) for row in rows], atol=1e-6)
    np.testing.assert_allclose(maps.stats["stats"].mean, np.concatenate(rows).mean(), atol=1e-6)
    assert maps.stats["stats"].count == sum(row.size for row in rows)
    np.testing.assert_array_equal(maps["part"], maps["values"][[2, 0]][:, :, [1, 3]])
    of = trocar.value(LAYER, tokens=span, reduce="mean", function="exp")
    grads = client.gradients("bert", TEXTS, of=of, at=[LAYER], taps=[LAYER])
    chosen = np.exp(np.concatenate(rows))
    assert grads.objective == pytest.approx(chosen.mean(), rel=1e-5)
    total = np.zeros_like(grads[LAYER])
    for sample, row in enumerate(maps.info["values"].token_positions):
        total[sample, list(row)] = np.exp(grads[LAYER][sample, list(row)]) / chosen.size
    np.testing.assert_allclose(grads[f"{LAYER}/grad_out"], total, rtol=1e-4, atol=1e-8)


def test_the_assistant_speaks_where_transformers_says(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folders["gpt"]))
    encoding = tokenizer.apply_chat_template(
        CHAT, return_assistant_tokens_mask=True, return_dict=True, tokenizer_kwargs={}
    )
    wanted = tuple(np.flatnonzero(encoding["assistant_masks"]).tolist())
    maps = client.extract("gpt", trocar.chat(CHAT), [trocar.tap(GPT_LAYER, tokens="assistant")])
    assert maps.tokens.samples[0].ids == tuple(encoding["input_ids"])
    assert maps.info[GPT_LAYER].token_positions == (wanted,)


@pytest.mark.parametrize(("model", "layer"), [("bert", LAYER), ("gpt", GPT_LAYER)])
def test_roles_are_the_contents_and_not_what_the_template_writes(
    client: trocar.Client, model: str, layer: str
) -> None:
    taps = [
        trocar.tap(layer, alias=role, tokens=trocar.span(role=role))
        for role in ("system", "user", "assistant")
    ]
    maps = client.extract(model, trocar.chat(CHAT), taps)
    spelled = {
        role: [maps.tokens.samples[0].tokens[place] for place in maps.info[role].token_positions[0]]
        for role in ("system", "user", "assistant")
    }
    assert spelled["system"] == ["a", "dog", ":", "user"]
    assert spelled["user"] == ["user", "hello", "dog"]
    assert spelled["assistant"] == ["the", "cat", "sat"]


def test_plans_and_streams_know_spans(client: trocar.Client) -> None:
    tap = trocar.tap(LAYER, tokens=trocar.span("cat"))
    texts = [TEXTS[0], TEXTS[2]]
    assert client.plan("bert", texts, [tap]).feature_maps[LAYER].shape == (2, 2, 16)
    expected = client.extract("bert", texts, [tap])
    with client.extract_stream("bert", [texts, ["a dog"], texts[:1]], [tap]) as stream:
        results = list(stream)
    assert [result.maps is None for result in results] == [False, True, False]
    first = results[0].maps
    assert first is not None
    np.testing.assert_array_equal(first[LAYER], expected[LAYER])
    assert first.info[LAYER].token_positions == ((2,), (1, 2))


@pytest.mark.parametrize(
    ("model", "inputs", "tokens", "message"),
    [
        (
            "bert",
            TEXTS,
            trocar.span("cat"),
            "the text 'cat' of text 1: the text is not in it; it begins 'a dog sat'",
        ),
        ("bert", ["a cat"], trocar.span(9, 12), "characters 9 to 12 of text 0: it has 5 characters"),
        ("bert", ["a cat"], trocar.span(1, 2), "none of its tokens contains one of these characters"),
        ("bert", ["a cat"], "user", "it is not a chat"),
        ("bert", [[4, 5]], trocar.span(0, 1), "sent as token ids"),
        ("bert", TEXTS, [trocar.span("cat")] * 2, "2 spans for 3 texts"),
        (
            "bert",
            trocar.chat(CHAT[1:2]),
            "assistant",
            "no message with text has this role; the roles are user",
        ),
        ("changing", trocar.chat(CHAT[1:2]), "user", "the chat template changes the messages"),
        ("bert", np.zeros((1, 4), np.float32), trocar.span("cat"), "only texts that the server tokenizes"),
    ],
)
def test_spans_without_tokens_are_refused_with_what_there_is(
    client: trocar.Client, model: str, inputs: Any, tokens: Any, message: str
) -> None:
    taps = [trocar.tap(LAYER, tokens=tokens)]
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.ReductionRejectedError, match=message):
            call(model, inputs, taps)


@pytest.mark.parametrize(("model", "layer"), [("bert", LAYER), ("gpt", GPT_LAYER)])
def test_characters_of_chosen_tokens_are_those_of_the_whole_layer(
    client: trocar.Client, model: str, layer: str
) -> None:
    chosen = trocar.tap(layer, alias="chosen", tokens=trocar.span("cat sat"))
    maps = client.extract(model, [TEXTS[0], "hello the cat sat"], [layer, chosen])
    for sample, text in enumerate((TEXTS[0], "hello the cat sat")):
        start = text.index("sat")
        found = maps.span("chosen", start, start + 3, sample=sample)
        assert len(found) == 1
        np.testing.assert_array_equal(found, maps.span(layer, start, start + 3, sample=sample))
    with pytest.raises(ValueError, match="no token of text 0 holds one of the characters 0 to 3"):
        maps.span("chosen", 0, 3)  # "the" is in the text, but not among the chosen tokens
