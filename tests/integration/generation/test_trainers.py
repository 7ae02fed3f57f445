"""Text generated with the weights of a trainer, against `transformers.generate` on what it exports."""

# transformers and PEFT are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import trocar
from tests.support.models.causal_models import TEXTS, save_causal
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.21

COUNT = 10
GREEDY: dict[str, Any] = {"max_new_tokens": COUNT, "stop_token_ids": []}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 5}
LONG: dict[str, Any] = {"n": 900, "max_new_tokens": 100, "stop_token_ids": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_causal("llama", folder)


@pytest.fixture(scope="module")
def server(folder: Path, model: Any) -> Iterator[RunningServer]:
    del model  # saved
    with running_server(models={"llama": {"source": f"hf:{folder}"}}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.fixture
def trainer(client: trocar.Client) -> Iterator[trocar.training.Trainer]:
    with client.train("llama", losses="causal_lm", optimizer=trocar.training.adamw(lr=0.02)) as own:
        yield own


@pytest.fixture(scope="module")
def prompt(folder: Path, model: Any) -> list[int]:
    del model
    ids: list[int] = AutoTokenizer.from_pretrained(str(folder))(TEXTS[0])["input_ids"]
    return ids


def continued(model: Any, ids: list[int]) -> list[int]:
    given, settings = torch.tensor([ids]), {"max_new_tokens": COUNT, "do_sample": False}
    with torch.inference_mode():
        whole = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            eos_token_id=None,
            pad_token_id=0,
            **settings,
        )
    tokens: list[int] = whole[0, len(ids) :].tolist()
    return tokens


def test_a_trainers_text_is_that_of_its_exported_weights(
    client: trocar.Client,
    trainer: trocar.training.Trainer,
    folder: Path,
    model: Any,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    for text in TEXTS[:3]:
        trainer.step(text)
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    tuned = type(model).from_pretrained(str(folder)).eval()
    tuned.load_state_dict(weights, strict=False)
    expected = continued(tuned, prompt)
    assert list(trainer.generate([prompt], **GREEDY).token_ids) == expected
    assert expected != continued(model, prompt)
    assert list(client.generate("llama", [prompt], **GREEDY).token_ids) == continued(model, prompt)


def test_an_adapters_text_is_that_of_peft(
    client: trocar.Client, folder: Path, model: Any, prompt: list[int], tmp_path: Path
) -> None:
    lora = trocar.training.lora({"*.q_proj": 4, "*.v_proj": 4}, name="style")
    optimizer = trocar.training.adamw(lr=0.1)
    with client.train("llama", lora=lora, losses="causal_lm", optimizer=optimizer) as trainer:
        for text in TEXTS[:3]:
            trainer.step(text)
        own = type(model).from_pretrained(str(folder))
        theirs = peft.PeftModel.from_pretrained(own, str(trainer.export_adapter(tmp_path / "adapter")))
        run = client.generate("llama", [prompt], adapter="style", **GREEDY)
        assert list(run.token_ids) == continued(theirs.eval(), prompt)
        assert run.token_ids == trainer.generate([prompt], **GREEDY).token_ids
        assert list(run.token_ids) != continued(model, prompt)


def test_a_run_has_one_version_of_the_weights(trainer: trocar.training.Trainer, prompt: list[int]) -> None:
    before = trainer.generate([prompt], **GREEDY).token_ids
    checkpoint = trainer.save()
    with trainer.generate([prompt], **LONG) as run:
        next(iter(run))
        for change in (
            lambda: trainer.step(TEXTS[1]),
            lambda: trainer.forward_backward(TEXTS[1]),
            lambda: trainer.restore(checkpoint.number),
            lambda: trainer.start_fit(list(TEXTS), epochs=1),
        ):
            with pytest.raises(trocar.errors.TrainerBusyError, match="text is being generated"):
                change()
        assert trainer.save().number > checkpoint.number  # which changes nothing
        assert np.isfinite(trainer.evaluate(TEXTS[1]).loss)
        assert not run.is_finished
    stepped: list[float] = []

    def has_stepped() -> bool:
        try:
            stepped.append(trainer.step(TEXTS[1]).loss)
        except trocar.errors.TrainerBusyError:  # the server has not noticed yet that the run was closed
            return False
        return True

    wait_until(has_stepped)
    assert np.isfinite(stepped[0])
    for _ in range(3):
        trainer.step(TEXTS[1])
    assert trainer.generate([prompt], **GREEDY).token_ids != before


def test_a_run_waits_for_the_step_that_runs(
    server: RunningServer, trainer: trocar.training.Trainer, prompt: list[int]
) -> None:
    own = next(one for one in server.app.trainers.all() if one.trainer_id == trainer.trainer_id)
    held = AsyncExitStack()
    server.run(lambda: held.enter_async_context(own.numbering.at_rest()))  # as a step does
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.generate, [prompt], **GREEDY)
        wait_until(lambda: own._call_count == 1)
        assert server.engine.caches.count == 0
        assert not run.done()
        server.run(held.aclose)
        assert len(run.result().token_ids) == COUNT
    assert not own._reader_count


def test_no_text_is_generated_while_a_fit_changes_the_weights(trainer: trocar.training.Trainer) -> None:
    trainer.start_fit(list(TEXTS) * 4, epochs=10_000, batch_size=1)
    with pytest.raises(trocar.errors.TrainerBusyError, match="fit"):
        trainer.generate(TEXTS[0], **GREEDY)
    trainer.cancel()
    wait_until(lambda: trainer.info().state == "ready")
    assert trainer.generate(TEXTS[0], **GREEDY).token_ids


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_step_follows_the_gradient_of_the_drawn_tokens(
    client: trocar.Client, model: Any, folder: Path, prompt: list[int], has_logprobs: bool, tmp_path: Path
) -> None:
    sgd = trocar.training.sgd(lr=0.01)
    with client.train("llama", losses="policy_gradient", optimizer=sgd) as trainer:
        run = trainer.generate([prompt], n=4, **DRAWN)
        ids, advantages = np.array(run.as_inputs()), np.array([1.0, -1.0, 0.5, 0.25], np.float32)
        labels, logprobs = np.full(ids.shape, -100), np.zeros(ids.shape, np.float32)
        labels[:, len(prompt) :] = ids[:, len(prompt) :]
        logprobs[:, len(prompt) :] = [sequence.logprobs for sequence in run.sequences]
        targets = {"token_ids": labels, "advantages": advantages}
        if has_logprobs:
            targets["logprobs"] = logprobs
        loss = trainer.step({"input_ids": ids}, targets).loss
        trained = load_file(trainer.export(tmp_path / "after.safetensors"))
    own = type(model).from_pretrained(str(folder)).requires_grad_(True)
    given = torch.from_numpy(ids)
    chosen = torch.distributions.Categorical(logits=own(given).logits[:, len(prompt) - 1 : -1].float())
    drawn = chosen.log_prob(given[:, len(prompt) :])
    np.testing.assert_allclose(drawn.detach().numpy(), logprobs[:, len(prompt) :], rtol=1e-4, atol=1e-5)
    expected = -(torch.from_numpy(advantages)[:, None] * drawn).mean()
    expected.backward()
    assert loss == pytest.approx(-advantages.mean() if has_logprobs else expected.item(), rel=1e-4, abs=1e-5)
    torch.optim.SGD(own.parameters(), lr=0.01).step()
    for name, parameter in own.named_parameters():
        if name in trained:
            np.testing.assert_allclose(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_classes_of_a_causal_model_are_its_tokens(client: trocar.Client, model: Any) -> None:
    """Not the dimension 1, where torch takes them: the model reads its mask, so its example needs data."""
    ids = np.arange(12).reshape(2, 6)
    labels = (ids + 1) % 7
    soft = np.eye(300, dtype=np.float32)[labels]
    logits = model(input_ids=torch.tensor(ids)).logits.movedim(-1, 1)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
    with client.train("llama", losses="cross_entropy") as trainer:
        found = [trainer.evaluate({"input_ids": ids}, targets).loss for targets in (labels, soft)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
