"""Gradients of the probability of a generated text, at positions, against autograd in this process."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import running_server

BLOCKS = {"llama": "model.layers.0", "gpt2": "transformer.h.0"}
COUNT = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    return {family: save_causal(family, folders / family) for family in BLOCKS}


@pytest.fixture(scope="module")
def client(folders: Path, models: dict[str, Any]) -> Iterator[trocar.Client]:
    tables = {family: {"source": f"hf:{folders / family}"} for family in models}
    with running_server(models=tables, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def gradient(
    model: Any, path: str, ids: list[int], score: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, float]:
    """Return the gradient of a score of the logits, (tokens, vocabulary), at a block's output."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_(True)
        kept.append(value)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    handle = model.get_submodule(path).register_forward_hook(keep)
    try:
        number = score(model(torch.tensor([ids])).logits[0])
    finally:
        handle.remove()
    (found,) = torch.autograd.grad(number, kept)
    return found[0].numpy(), float(number.detach())


def last_score(
    scored: Callable[[torch.Tensor], torch.Tensor], token_id: int, logits: torch.Tensor
) -> torch.Tensor:
    """Return the score of a token at the last position."""
    return scored(logits[-1])[token_id]


@pytest.mark.parametrize("family", BLOCKS)
def test_the_gradient_of_a_generated_texts_probability_is_that_of_autograd(
    client: trocar.Client, models: dict[str, Any], family: str
) -> None:
    path = BLOCKS[family]
    run = client.generate(family, TEXTS[0], max_new_tokens=COUNT, stop_token_ids=[])
    first = len(run.prompt_ids) - 1
    chosen = trocar.positions(prompt=slice(first, -1))
    of = trocar.log_probability(run.token_ids, positions=chosen)
    maps = client.gradients(family, run.as_inputs(), of=of, at=[path])

    def score(logits: torch.Tensor) -> torch.Tensor:
        rows = logits[first:-1].log_softmax(-1)
        return rows[torch.arange(COUNT), torch.tensor(run.token_ids)].sum()

    expected, number = gradient(models[family], path, run.as_inputs()[0], score)
    np.testing.assert_allclose(maps[f"{path}/grad_out"][0], expected, rtol=1e-3, atol=1e-5)
    assert maps.objective == pytest.approx(number, rel=1e-4)
    assert maps.objective == pytest.approx(sum(run.logprobs), rel=1e-4)


def test_each_text_has_its_own_positions_and_scores_are_of_every_kind(
    client: trocar.Client, models: dict[str, Any], folders: Path
) -> None:
    texts, path = [TEXTS[0], "The mill"], BLOCKS["llama"]
    tokenizer = AutoTokenizer.from_pretrained(str(folders / "llama"))
    ids = [tokenizer(text)["input_ids"] for text in texts]
    kinds: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
        (trocar.log_probability, lambda row: row.log_softmax(-1)),
        (trocar.probability, lambda row: row.softmax(-1)),
        (trocar.logit, lambda row: row),
    ]
    for objective, scored in kinds:
        for classes in ([5], [7, 9]):
            of = objective(classes, positions=trocar.positions(prompt=[-1]))
            maps = client.gradients("llama", texts, of=of, at=[path])
            for index, row in enumerate(ids):
                wanted = classes[index % len(classes)]
                score = partial(last_score, scored, wanted)
                expected, _ = gradient(models["llama"], path, row, score)
                found = maps.samples(f"{path}/grad_out")[index]
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_value_is_summed_at_positions(client: trocar.Client, models: dict[str, Any], folders: Path) -> None:
    path, ids = BLOCKS["llama"], AutoTokenizer.from_pretrained(str(folders / "llama"))(TEXTS[0])["input_ids"]
    of = trocar.value('/out["logits"]', function="square", positions=trocar.positions(prompt=[0, -1]))
    expected, number = gradient(models["llama"], path, ids, lambda logits: (logits[[0, -1]] ** 2).sum())
    for inputs in (TEXTS[0], [ids], {"input_ids": np.array([ids])}):
        given: Any = inputs
        maps = client.gradients("llama", given, of=of, at=[path])
        np.testing.assert_allclose(maps[f"{path}/grad_out"][0], expected, rtol=1e-3, atol=1e-3)
        assert maps.objective == pytest.approx(number, rel=1e-4)
    assert "positions=trocar.positions(prompt=[0, -1])" in repr(of)


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (trocar.logit([1, 2], positions=trocar.positions(prompt=[-1])), "2 classes for 1 positions"),
        (trocar.logit(300, positions=trocar.positions(prompt=[-1])), "300"),
        (trocar.logit(1, positions=trocar.positions(prompt=[900])), "objective: text 0: position 900"),
        (trocar.logit(1, positions=trocar.positions(generated="all")), "ask `generate`"),
        (
            trocar.value("model.layers.1", positions=trocar.positions(prompt=[900])),
            "objective: text 0: position 900",
        ),
    ],
)
def test_positions_that_have_no_score_are_refused(
    client: trocar.Client, of: trocar.Objective, problem: str
) -> None:
    with pytest.raises(trocar.TrocarError, match=problem):
        client.gradients("llama", TEXTS[0], of=of, at=["model.layers.0"])
    with pytest.raises(ValueError, match="not both"):
        trocar.value("x", positions=trocar.positions(prompt=[0]), tokens=[0])
