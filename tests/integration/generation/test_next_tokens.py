"""`predict` of causal language models: the next tokens by name, against transformers' logits."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main

PROMPTS = [TEXTS[0], "a", "The mill"]
FAMILIES = ("llama", "gpt2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("next")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    return {family: save_causal(family, folders / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def server(folders: Path, models: dict[str, Any]) -> Iterator[RunningServer]:
    tables = {name: {"source": f"hf:{folders / name}"} for name in models}
    with running_server(models=tables, device="cpu") as running:
        yield running


def expected(model: Any, folders: Path, family: str, text: str) -> torch.Tensor:
    """Return the probabilities of the token that follows a text."""
    ids = AutoTokenizer.from_pretrained(str(folders / family))(text)["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float().softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_next_tokens_are_those_of_transformers(
    client: trocar.Client, models: dict[str, Any], folders: Path, family: str
) -> None:
    found = client.predict(family, PROMPTS, top=4)
    tokenizer = AutoTokenizer.from_pretrained(str(folders / family))
    assert [one.sample for one in found] == PROMPTS
    assert found.class_count == 300
    for text, prediction in zip(PROMPTS, found, strict=True):
        best = expected(models[family], folders, family, text).topk(4)
        assert [one.number for one in prediction] == best.indices.tolist()
        assert [one.name for one in prediction] == [tokenizer.decode([each]) for each in best.indices]
        np.testing.assert_allclose([one.score for one in prediction], best.values, rtol=1e-3)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert [one.classes for one in client.predict(family, ids, top=4)] == [one.classes for one in found]


def test_an_edit_changes_the_next_token(client: trocar.Client, models: dict[str, Any], folders: Path) -> None:
    found = client.predict("llama", "The mill", edits=trocar.edit("head", "scale", -1.0), top=1)
    scores = expected(models["llama"], folders, "llama", "The mill")
    assert found[0].top.number == int(scores.argmin())


def test_the_command_and_asyncio_print_the_same(
    client: trocar.Client, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = client.predict("llama", "The mill", top=2)
    words = ["predict", "llama", "--text", "The mill", "--top", "2", "--json", "--server", server.address]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    (sample,) = shown["samples"]
    assert [one["number"] for one in sample["classes"]] == [one.number for one in found[0]]
    assert [one["name"] for one in sample["classes"]] == [one.name for one in found[0]]

    async def main_() -> trocar.Predictions:
        async with trocar.aio.connect(server.address) as asynchronous:
            return await asynchronous.predict("llama", "The mill", top=2)

    assert asyncio.run(main_()) == found


def test_other_activations_have_no_meaning(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="predicts the next token"):
        client.predict("llama", "The mill", activation="sigmoid")
    with pytest.raises(ValueError, match="top=0"):
        client.predict("llama", "The mill", top=0)


def test_compare_shows_the_next_tokens_before_and_after(
    client: trocar.Client, models: dict[str, Any], folders: Path
) -> None:
    edit = trocar.edit("head", "scale", -1.0)
    found = client.compare("llama", PROMPTS, edits=edit, taps=["layer[0]"], top=2)
    assert found.before is not None
    assert found.after is not None
    plain = client.predict("llama", PROMPTS, top=2)
    edited = client.predict("llama", PROMPTS, top=2, edits=edit)
    for side, expected_side in ((found.before, plain), (found.after, edited)):
        for one, other in zip(side, expected_side, strict=True):
            assert [(each.number, each.name) for each in one] == [(each.number, each.name) for each in other]
            np.testing.assert_allclose(
                [each.score for each in one], [each.score for each in other], rtol=1e-3
            )
    for text, change in zip(PROMPTS, found.classes, strict=True):
        scores = expected(models["llama"], folders, "llama", text)
        assert change.before.number == int(scores.argmax())
        assert change.after.number == int(scores.argmin())
    assert [row.name for row in found.diff.rows] == ["model.layers.0", '/out["logits"]']
    two = client.compare("llama", PROMPTS, other="gpt2", taps=['/out["logits"]'], top=1)
    assert two.after is not None
    assert [one.top.number for one in two.after] == [
        int(expected(models["gpt2"], folders, "gpt2", text).argmax()) for text in PROMPTS
    ]


def test_compare_of_token_ids_has_next_tokens(client: trocar.Client) -> None:
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    found = client.compare("llama", ids, edits=trocar.edit("layer[1]", "scale", 2.0), taps=["layer[1]"])
    assert found.before is not None
    assert [one.top.number for one in found.before] == [
        one.top.number for one in client.predict("llama", ids, top=1)
    ]


def test_the_command_compares_texts(
    client: trocar.Client, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "llama", "--text", "The mill", "--edit", "head scale -1.0", "--tap", "layer[1]"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json", "--server", server.address])
    assert ended.value.code == 0
    (change,) = json.loads(capsys.readouterr().out)["classes"]
    assert change["before"]["name"] == client.predict("llama", "The mill", top=1)[0].name
    assert change["before"]["number"] != change["after"]["number"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", "llama", "--edit", "head scale -1.0", "--server", server.address])
    assert ended.value.code == 2
    assert "IMAGES or texts" in capsys.readouterr().err
