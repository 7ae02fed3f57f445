"""Runs as a notebook shows them: prompts, values and lenses of a real run, and what is not read yet."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import RunningServer, running_server

BLOCK = "model.layers.0"
TOKEN = 'title="position'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "llama"
    save_causal("llama", path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(models={"llama": {"source": f"hf:{folder}"}}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_prompt_tokens_are_the_prompt(client: trocar.Client, folder: Path, text: str) -> None:
    run = client.generate("llama", text, max_new_tokens=2, stop_token_ids=[])
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert "".join(run.prompt_texts) == text
    assert len(run.prompt_texts) == len(run.prompt_ids)
    for token, own in zip(run.prompt_ids, run.prompt_texts, strict=True):
        alone = tokenizer.decode([token])
        assert own == alone or "\ufffd" in alone  # a part of a character


def test_a_run_shows_what_was_read_of_it(client: trocar.Client) -> None:
    with client.generate("llama", TEXTS[0], max_new_tokens=6, stop_token_ids=[]) as run:
        assert "0 tokens so far; finish() reads it" in run._repr_html_()
        assert "so far" in str(run)
        first = next(iter(run))
        html = run._repr_html_()
        assert "so far" in html
        assert html.count(TOKEN) == len(run.prompt_ids) + 1
        assert str(run) == first.text
        assert run.show()._repr_html_().count(TOKEN) == len(run.prompt_ids) + 6  # this reads the rest
        assert "so far" not in run._repr_html_()
        assert str(run) == run.text


def test_a_run_that_was_closed_shows_what_came(client: trocar.Client) -> None:
    run = client.generate("llama", TEXTS[0], max_new_tokens=50, stop_token_ids=[])
    next(iter(run))
    run.close()
    assert "so far" in run._repr_html_()
    assert "so far" in run.show()._repr_html_()


def test_a_run_is_coloured_by_its_lens_and_by_its_values(client: trocar.Client) -> None:
    last = trocar.positions(prompt=[-1], generated="all")
    taps: list[str | trocar.Tap] = [BLOCK, trocar.lens("layer[0]", top_k=3, positions=last)]
    run = client.generate("llama", TEXTS[0], max_new_tokens=5, stop_token_ids=[], taps=taps)
    html = run.show("lens:layer[0]")._repr_html_()
    assert html.count("lens layer[0]: ") == 5  # every generated token
    norms = np.linalg.norm(run[BLOCK], axis=-1)
    assert run.show(norms)._repr_html_().count("value ") == len(norms)
    chosen = norms[[0, 2]]
    assert run.show(chosen, positions=(0, 2))._repr_html_().count("value ") == 2
    with pytest.raises(ValueError, match="positions="):
        run.show(chosen)


def test_the_baseline_is_shown_once_it_was_read(client: trocar.Client) -> None:
    edit = trocar.edit(BLOCK, "scale", -2.0)
    run = client.generate("llama", TEXTS[0], max_new_tokens=4, stop_token_ids=[], edits=[edit]).finish()
    assert "without edits" not in run._repr_html_()
    assert run.baseline.text is not None
    assert "without edits" in run._repr_html_()
    assert run._repr_html_().count(TOKEN) == 2 * (len(run.prompt_ids) + 4)
    plain = client.generate("llama", TEXTS[0], max_new_tokens=4, stop_token_ids=[]).finish()
    assert plain.baseline is plain
    assert "without edits" not in plain._repr_html_()


def test_several_texts_are_shown_below_each_other(client: trocar.Client) -> None:
    run = client.generate(
        "llama", [TEXTS[0], "The"], n=2, temperature=1.0, max_new_tokens=3, stop_token_ids=[]
    )
    html = run.show()._repr_html_()
    assert [f"prompt {p}, sample {s}" in html for p in (0, 1) for s in (0, 1)] == [True] * 4
    assert run.sequences[2].prompt_texts == run.sequences[3].prompt_texts
    assert "".join(run.sequences[2].prompt_texts) == "The"
    assert str(run).count("--- prompt") == 4


def test_a_run_with_asyncio_shows_what_was_read(server: RunningServer) -> None:
    async def main() -> None:
        async with trocar.aio.connect(server.address) as client:
            run = await client.generate("llama", TEXTS[0], max_new_tokens=3, stop_token_ids=[])
            assert "0 tokens so far" in run._repr_html_()
            with pytest.raises(RuntimeError, match="under way"):
                run.show()
            await run.finish()
            assert run.show()._repr_html_() == run._repr_html_()

    asyncio.run(main())
