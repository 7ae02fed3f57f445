"""`trocar generate` against a real server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import RunningServer, running_server
from trocar._cli import main

Command = Callable[..., tuple[int, str, str]]
BLOCK = "model.layers.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("llama")
    save_causal("llama", folder)
    models = {"llama": {"source": f"hf:{folder}"}}
    with capture_logs(), running_server(models=models, device="cpu") as running:
        yield running


@pytest.fixture
def generate(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("TROCAR_SERVER", server.address)

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["generate", "llama", TEXTS[0], "--max-new-tokens", "9", *map(str, words)])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def texts(server: RunningServer, **options: Any) -> list[str]:
    with trocar.connect(server.address) as client:
        run = client.generate("llama", TEXTS[0], max_new_tokens=9, **options)
        return [sequence.text for sequence in run.sequences]


def test_the_text_is_printed_and_values_are_saved(
    generate: Command, server: RunningServer, tmp_path: Path
) -> None:
    code, out, err = generate("--tap", BLOCK, "--out", tmp_path / "run.safetensors")
    assert (code, out) == (0, texts(server)[0] + "\n")
    assert f"{BLOCK}: (" in err
    assert BLOCK in load_file(tmp_path / "run.safetensors")


def test_samples_are_printed_below_each_other(generate: Command, server: RunningServer) -> None:
    drawn = texts(server, n=2, temperature=1.0, seed=4)
    code, out, _ = generate("--n", 2, "--temperature", 1, "--seed", 4)
    assert (code, out) == (0, f"--- sample 0\n{drawn[0]}\n--- sample 1\n{drawn[1]}\n")
    code, out, _ = generate("--n", 2, "--temperature", 1, "--seed", 4, "--json")
    assert [each["text"] for each in json.loads(out)["sequences"]] == drawn


def test_a_report_of_one_text_is_flat(generate: Command, server: RunningServer) -> None:
    code, out, _ = generate("--tap", BLOCK, "--json")
    report = json.loads(out)
    assert (code, report["text"]) == (0, texts(server)[0])
    assert report["shapes"][BLOCK][0] == len(report["prompt_ids"]) + len(report["token_ids"]) - 1


def test_values_of_several_texts_are_not_one_file(generate: Command, tmp_path: Path) -> None:
    code, _, err = generate("--n", 2, "--out", tmp_path / "run.safetensors")
    assert code != 0
    assert "--n" in err


def test_a_prompt_is_a_text_even_where_it_looks_like_a_file(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROCAR_SERVER", server.address)
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "llama", "setup.py", "--max-new-tokens", "3", "--json"])
    report = json.loads(capsys.readouterr().out)
    with trocar.connect(server.address) as client:
        run = client.generate("llama", trocar.texts("setup.py"), max_new_tokens=3)
        assert (stopped.value.code or 0, tuple(report["token_ids"])) == (0, run.token_ids)


def test_no_token_ends_the_text_if_none_may(generate: Command) -> None:
    drawn = ("--n", 100, "--temperature", 100, "--json")
    reasons = [
        {each["finish_reason"] for each in json.loads(generate(*drawn, *words)[1])["sequences"]}
        for words in ((), ("--ignore-end",))
    ]
    assert reasons == [{"length", "stop_token"}, {"length"}]


def test_a_lens_says_what_a_layer_would(generate: Command, client: trocar.Client, tmp_path: Path) -> None:
    run = client.generate("llama", TEXTS[0], max_new_tokens=9, taps=[trocar.lens(BLOCK)])
    code, _, err = generate("--lens", BLOCK, "--out", tmp_path / "run.safetensors")
    said = ", ".join(repr(token.text) for token in run.lens(BLOCK)[-1])
    assert (code, f"{BLOCK} would say behind the last token read: {said}" in err) == (0, True)
    assert load_file(tmp_path / "run.safetensors")[f"{BLOCK}:lens"].shape[1] == len(run.lens(BLOCK)[-1])
