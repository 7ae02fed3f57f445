"""Trainers on texts: steps equal those of transformers and torch alone, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from transformers import (
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

import trocar
from tests.support.models.text_models import placed, save_text_classifier, save_tokenizer, save_whisper
from tests.support.servers.running_server import RunningServer, running_server
from trocar.errors import InputRejectedError, NoPreprocessingError, RequestTooLargeError, TargetRejectedError

BATCHES: list[tuple[list[Any], list[int]]] = [
    (["the cat sat", "a dog sat on the mat", "hello"], [0, 1, 2]),
    ([("the cat", "a dog"), ("hello", "the mat on the mat")], [1, 0]),
    ([[2, 4, 3], [2, 5, 6, 7, 3], [2, 9, 3]], [2, 2, 0]),
]
"""Texts, pairs and token ids, with their classes."""


def _folder(root: Path, kind: Any, config: Any, **tokenizer: Any) -> Path:
    torch.manual_seed(0)
    kind(config).save_pretrained(root)
    return save_tokenizer(root, **tokenizer)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    gpt2 = GPT2Config(vocab_size=15, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    other = GPT2Config(vocab_size=15, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return {
        "bert": save_text_classifier(tmp_path_factory.mktemp("bert"), BertForSequenceClassification),
        "answers": save_text_classifier(tmp_path_factory.mktemp("answers"), BertForQuestionAnswering, 2),
        "gpt2": _folder(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel, gpt2),
        "left": _folder(tmp_path_factory.mktemp("left"), GPT2LMHeadModel, gpt2, padding_side="left"),
        "taught": _folder(tmp_path_factory.mktemp("taught"), GPT2LMHeadModel, other),
        "taught_left": _folder(tmp_path_factory.mktemp("left"), GPT2LMHeadModel, other, padding_side="left"),
        "whisper": save_whisper(tmp_path_factory.mktemp("whisper")),
    }


@pytest.fixture(scope="module")
def running(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    limits = {"max_text_characters": 20_000, "max_tokens": 512}
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models=models, limits=limits, device="cpu", data_dir=data_dir) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_trainers(running: RunningServer) -> Iterator[None]:
    yield
    with trocar.connect(running.address) as client:
        for info in client.trainers():
            client.trainer(info.trainer_id).close()


def encoded(folder: Path, samples: list[Any]) -> Any:
    """Tokenize and pad with transformers alone."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder)
    if isinstance(samples[0], list):
        return tokenizer.pad({"input_ids": samples}, return_tensors="pt")
    if isinstance(samples[0], tuple):
        return tokenizer(*map(list, zip(*samples, strict=True)), padding=True, return_tensors="pt")
    return placed(tokenizer, tokenizer(samples, padding=True, return_tensors="pt"))


def plain(kind: Any, folder: Path) -> Any:
    """Load a model as a trainer's, in train mode."""
    return kind.from_pretrained(folder, attn_implementation="sdpa").train()


def test_steps_equal_those_of_transformers_and_torch(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = client.train("bert", optimizer=trocar.training.adamw(lr=0.01), seed=7)
    model = plain(BertForSequenceClassification, folders["bert"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)  # dropout's
    for samples, labels in BATCHES:
        result = trainer.step(samples, labels)
        loss = cross_entropy(model(**encoded(folders["bert"], samples)).logits, torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert result.loss == loss.item()
        assert result.sample_count == len(labels)
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value), name
    model.eval()
    samples, labels = BATCHES[0]
    with torch.no_grad():
        logits = model(**encoded(folders["bert"], samples)).logits
    evaluated = trainer.evaluate(samples, labels)
    assert evaluated.loss == cross_entropy(logits, torch.tensor(labels)).item()
    assert evaluated.correct_count == int((logits.argmax(1) == torch.tensor(labels)).sum())


def test_gradients_of_halves_are_those_of_torch(client: trocar.Client, folders: dict[str, Path]) -> None:
    trainer = client.train("bert", seed=7)
    model = plain(BertForSequenceClassification, folders["bert"])
    samples, labels = BATCHES[0]
    trainer.forward_backward(trocar.texts(samples, max_tokens=5, truncate=True), labels)
    torch.manual_seed(7)
    cut = AutoTokenizer.from_pretrained(folders["bert"])(
        samples, padding=True, truncation=True, max_length=5, return_tensors="pt"
    )
    cross_entropy(model(**cut).logits, torch.tensor(labels)).backward()
    gradients = trainer.parameter_gradients()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(gradients[name], parameter.grad.numpy(), err_msg=name)


@pytest.mark.parametrize("name", ["gpt2", "left"])
def test_texts_are_their_own_labels_of_the_causal_loss(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    trainer = client.train(name, losses="causal_lm", seed=7)
    model = plain(GPT2LMHeadModel, folders[name])
    samples = BATCHES[0][0]
    encoding = encoded(folders[name], samples)
    labels = encoding["input_ids"].masked_fill(encoding["attention_mask"] == 0, -100)
    torch.manual_seed(7)
    expected = model(**encoding, labels=labels).loss
    assert trainer.step(samples).loss == expected.item()


@pytest.mark.parametrize(("name", "teacher"), [("gpt2", "taught"), ("left", "taught_left")])
def test_a_student_of_texts_learns_each_tokens_classes_of_its_teacher(
    client: trocar.Client, folders: dict[str, Path], name: str, teacher: str
) -> None:
    term = trocar.training.loss_term("kl_div", teacher=trocar.training.teacher(teacher), temperature=2.0)
    trainer = client.train(name, losses=term, seed=7)
    model = plain(GPT2LMHeadModel, folders[name])
    samples = BATCHES[0][0]
    encoding = encoded(folders[name], samples)
    counts = encoding["attention_mask"] == 1
    with torch.no_grad():
        taught = plain(GPT2LMHeadModel, folders[teacher]).eval()(**encoding).logits[counts]
    torch.manual_seed(7)
    logits = model(**encoding).logits[counts]
    expected = kl_div(log_softmax(logits / 2, -1), softmax(taught / 2, -1), reduction="batchmean") * 4
    assert trainer.step(samples).loss == pytest.approx(expected.item(), rel=1e-5)


ANSWERS = [
    trocar.training.loss_term("cross_entropy", at=f'/out["{name}_logits"]', target=name)
    for name in ("start", "end")
]


def test_the_place_of_an_answer_may_be_any_of_its_text(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    trainer = client.train("answers", losses=ANSWERS, seed=7)
    model = plain(BertForQuestionAnswering, folders["answers"])
    samples = [("the cat", "a dog sat on the mat on a mat hello"), ("a dog", "hello")]
    start, end = torch.tensor([9, 4]), torch.tensor([12, 4])
    torch.manual_seed(7)
    expected = model(**encoded(folders["answers"], samples), start_positions=start, end_positions=end).loss
    result = trainer.step(samples, {"start": start.numpy(), "end": end.numpy()})
    assert result.loss == pytest.approx(2 * expected.item(), rel=1e-6)


def test_a_place_behind_the_text_is_refused_and_nothing_is_applied(client: trocar.Client) -> None:
    trainer = client.train("answers", losses=ANSWERS)
    with pytest.raises(TargetRejectedError, match="labels from 6 to 6; they must be from 0 to 4"):
        trainer.step(["a cat sat"], {"start": [1], "end": [6]})
    assert trainer.info().update_count == 0
    assert trainer.step(["a cat sat"], {"start": [1], "end": [4]}).number == 0


def test_sound_trains_too(client: trocar.Client) -> None:
    trainer = client.train("whisper", optimizer=trocar.training.sgd(lr=0.1))
    clip = trocar.audio([np.sin(np.arange(800, dtype=np.float32))] * 2, 16_000)
    losses = [trainer.step(clip, [0, 1]).loss for _ in range(3)]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("inputs", "labels", "kind", "problem"),
    [
        (["cat", ""], [0, 1], InputRejectedError, "the text is empty"),
        ([[2, 99, 3]], [0], InputRejectedError, "has the token id 99, the vocabulary ends with 14"),
        (["cat " * 40], [0], InputRejectedError, "has 42 tokens, the model takes 16"),
        (["cat " * 10] * 60, [0] * 60, RequestTooLargeError, "tokens with its padding, the limit is 512"),
        (trocar.texts(["cat " * 5001]), [0], RequestTooLargeError, "20,004 characters"),
        (["cat", "dog"], [0], TargetRejectedError, "has 1 entries for a batch of 2"),
        (["cat"], None, TargetRejectedError, "needs one target"),
        (trocar.audio(np.zeros(160, np.float32), 16_000), [0], NoPreprocessingError, "takes no sound"),
    ],
)
def test_bad_batches_are_refused_and_nothing_is_applied(
    client: trocar.Client, inputs: Any, labels: Any, kind: Any, problem: str
) -> None:
    trainer = client.train("bert")
    with pytest.raises(kind, match=problem):
        trainer.step(inputs, labels)
    assert trainer.info().update_count == 0
    assert trainer.step(["cat"], [0]).number == 0


def test_a_repeated_number_is_applied_once(client: trocar.Client) -> None:
    trainer = client.train("bert")
    first = trainer.step(["cat", "dog"], [0, 1], number=0)
    again = trainer.step(["cat", "dog"], [0, 1], number=0)
    assert first.loss == again.loss
    assert trainer.info().update_count == 1
