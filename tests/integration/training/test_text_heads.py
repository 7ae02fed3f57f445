"""Heads on models of texts: steps equal those of a linear layer behind the model in plain torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
)

import trocar
from tests.support.models.text_models import WORDS, placed, save_text_classifier, save_tokenizer
from tests.support.servers.running_server import RunningServer, running_server
from trocar.errors import TargetRejectedError, TrainerInvalidError

TEXTS = ["the cat sat", "a dog sat on the mat", "hello"]
LABELS = [0, 3, 2]
TAGS = [[-100, 1, 0, 3, -100], [-100, 1, 2, 3, 3, 1, 0, -100], [-100, 2, -100]]
SEED = 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    made = {name: root / name for name in ("bert", "mini", "gpt2", "classifier", "half")}
    save_text_classifier(made["bert"], BertModel)
    save_text_classifier(made["mini"], BertModel)
    save_text_classifier(made["classifier"], BertForSequenceClassification)
    save_text_classifier(made["half"], BertModel)
    BertModel.from_pretrained(made["half"], dtype=torch.bfloat16).save_pretrained(made["half"])
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=15, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    GPT2Model(config).save_pretrained(made["gpt2"])
    save_tokenizer(made["gpt2"], padding_side="left")
    kinds = ("Transformer", "", "Pooling", "1_Pooling", "Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds[::2], kinds[1::2], strict=True))
    ]
    (made["mini"] / "modules.json").write_text(json.dumps(modules))
    (made["mini"] / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (made["mini"] / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return made


@pytest.fixture(scope="module")
def running(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    models["resnet18"] = {"weights": "random:0"}
    with running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_trainers(running: RunningServer) -> Iterator[None]:
    yield
    with trocar.connect(running.address) as client:
        for info in client.trainers():
            client.trainer(info.trainer_id).close()


def mean(values: Any, mask: Any) -> Any:
    """Mean over tokens without padding, as sentence-transformers writes it."""
    wide = mask.unsqueeze(-1).expand(values.size()).to(values.dtype)
    return (values * wide).sum(1) / wide.sum(1).clamp(min=1e-9)


def vector(name: str, output: Any, mask: Any) -> Any:
    if name == "bert":
        return output.pooler_output
    values = mean(output.last_hidden_state, mask)
    return torch.nn.functional.normalize(values, p=2, dim=1) if name == "mini" else values


class Plain:
    """A model and a linear layer behind it, stepped in plain torch."""

    def __init__(self, name: str, folder: Path, of: str) -> None:
        kind: Any = GPT2Model if name == "gpt2" else BertModel
        load: Any = AutoTokenizer.from_pretrained
        self.name, self.of, self.tokenizer = name, of, load(folder)
        self.model = kind.from_pretrained(folder, attn_implementation="sdpa").train()
        torch.manual_seed(SEED)
        self.head = nn.Linear(16, 4)
        self.named = {
            **dict(self.model.named_parameters()),
            **{f"head.{name}": parameter for name, parameter in self.head.named_parameters()},
        }
        self.optimizer = torch.optim.SGD(self.named.values(), lr=0.1)
        torch.manual_seed(SEED)  # dropout's

    def step(self, labels: Any) -> float:
        encoding = placed(self.tokenizer, self.tokenizer(TEXTS, padding=True, return_tensors="pt"))
        # A cache joins keys into other layouts, which changes the last bits of attention with dropout.
        output = self.model(**encoding, use_cache=False)
        if self.of == "sentence":
            loss = cross_entropy(
                self.head(vector(self.name, output, encoding["attention_mask"])), torch.tensor(labels)
            )
        else:
            laid_out = torch.full(encoding["input_ids"].shape, -100)
            laid_out[encoding["attention_mask"] == 1] = torch.tensor([tag for row in labels for tag in row])
            loss = cross_entropy(self.head(output.last_hidden_state).reshape(-1, 4), laid_out.reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


@pytest.mark.parametrize(
    ("name", "of"),
    [(name, of) for name in ("bert", "mini", "gpt2") for of in ("sentence", "tokens")],
)
def test_steps_with_a_head_equal_those_of_a_linear_layer_behind_the_model(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path, name: str, of: str
) -> None:
    plain = Plain(name, folders[name], of)
    losses: Any
    losses, labels = ("cross_entropy", LABELS) if of == "sentence" else ("token_cross_entropy", TAGS)
    trainer = client.train(
        name,
        head=trocar.training.head(4, of=of),
        losses=losses,
        optimizer=trocar.training.sgd(lr=0.1),
        seed=SEED,
    )
    assert trainer.info().head_path == "head"
    assert trainer.step(TEXTS, labels).loss == plain.step(labels)
    for _ in range(2):
        assert trainer.step(TEXTS, labels).loss == plain.step(labels)
    weights = load_file(trainer.export(tmp_path / "tuned.safetensors"))
    for path, value in plain.named.items():
        assert torch.equal(weights[path], value), path


def test_a_classifier_of_texts_gets_a_new_head(client: trocar.Client) -> None:
    trainer = client.train("classifier", head=5)
    assert trainer.info().head_path == "classifier"
    assert trainer.predict(TEXTS).shape == (3, 5)


def paired_loss(folder: Path, texts: list[str]) -> float:
    """MultipleNegativesRankingLoss of sentence vectors, in eval mode: pairs are the halves."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder)
    encoding = placed(tokenizer, tokenizer(texts, padding=True, return_tensors="pt"))
    model: Any = BertModel.from_pretrained(folder, attn_implementation="sdpa")
    with torch.no_grad():
        output = model.eval()(**encoding)
        first, second = vector("mini", output, encoding["attention_mask"]).chunk(2)
        return cross_entropy(first @ second.T * 20, torch.arange(len(first))).item()


def test_vectors_of_a_model_without_a_main_output_are_fitted_and_evaluated(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    losses = trocar.training.loss_term("contrastive", at="normalize")
    trainer = client.train("mini", losses=losses, optimizer=trocar.training.sgd(lr=0.0), seed=SEED)
    texts = [*TEXTS, "the cat"]
    expected = pytest.approx(paired_loss(folders["mini"], texts), rel=1e-5)
    evaluated = trainer.evaluate(texts)
    assert evaluated.loss == expected
    assert evaluated.correct_count is None
    data = (texts, [0, 0, 0, 0])
    history = trainer.fit(data, epochs=2, batch_size=4, shuffle=False, eval=data)
    assert [event["loss"] for event in history.evaluations] == [expected, expected]
    assert len(history.of_kind("step")) == 2


def test_a_published_model_has_its_head_and_can_get_another(
    running: RunningServer, client: trocar.Client
) -> None:
    trainer = client.train("mini", head=trocar.training.head(4, of="sentence"), trainable=["head"], seed=SEED)
    trainer.step(TEXTS, LABELS)
    logits = client.extract(trainer.trainer_id, TEXTS, ["head"])["head"]
    published = trainer.publish("mini-tuned", categories=list("abcd"))
    assert np.array_equal(client.extract(published, TEXTS, ["head"])["head"], logits)
    again = client.train(published, head=6)
    assert again.info().head_path == "head"
    assert client.extract(again.trainer_id, TEXTS, ["head"])["head"].shape == (3, 6)


def test_a_published_model_keeps_the_dtype_that_only_its_bases_folder_names(
    running: RunningServer, client: trocar.Client
) -> None:
    """bfloat16 of `config.json`, without `dtype` in the server's configuration."""
    trainer = client.train("half", head=trocar.training.head(4, of="sentence"), trainable=["head"], seed=SEED)
    trainer.step(TEXTS, LABELS)
    taps = ["encoder.layer.1.output", "head"]
    before = client.extract(trainer.trainer_id, TEXTS, taps)
    published = trainer.publish("half-tuned", categories=list("abcd"))
    after = client.extract(published, TEXTS, taps)
    assert before.info["head"].dtype == after.info["head"].dtype == "bfloat16"
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_model_without_a_pooling_layer_is_published_and_there_after_a_restart(tmp_path: Path) -> None:
    save_text_classifier(tmp_path / "bert", BertForMaskedLM)
    source = f"hf:{tmp_path / 'bert'}#feature-extraction"
    settings: dict[str, Any] = {"models": {"masked": {"source": source}}, "data_dir": tmp_path / "data"}
    with running_server(device="cpu", **settings) as first, trocar.connect(first.address) as client:
        trainer = client.train("masked", head=trocar.training.head(4, of="sentence"), seed=SEED)
        trainer.step(TEXTS, LABELS)
        logits = client.extract(trainer.trainer_id, TEXTS, ["head"])["head"]
        assert trainer.publish("tuned") == "tuned"
        assert np.array_equal(client.extract("tuned", TEXTS, ["head"])["head"], logits)
    with running_server(device="cpu", **settings) as second, trocar.connect(second.address) as client:
        assert np.array_equal(client.extract("tuned", TEXTS, ["head"])["head"], logits)


def test_a_published_model_keeps_the_tokenizer_that_its_base_was_configured_with(tmp_path: Path) -> None:
    save_text_classifier(tmp_path / "bert", BertModel)  # with a tokenizer, which gives other ids
    save_tokenizer(tmp_path / "other", pieces=WORDS[::-1])
    models = {"bert": {"source": f"hf:{tmp_path / 'bert'}", "processor": tmp_path / "other"}}
    with running_server(device="cpu", models=models) as running, trocar.connect(running.address) as client:
        trainer = client.train("bert", head=trocar.training.head(4, of="sentence"), seed=SEED)
        trainer.step(TEXTS, LABELS)
        found = client.extract(trainer.publish("tuned"), TEXTS, ["head"]).tokens
    load: Any = AutoTokenizer.from_pretrained
    assert [list(sample.ids) for sample in found.samples] == load(tmp_path / "other")(TEXTS)["input_ids"]


def test_a_head_beside_an_adapter_is_trained_alone_with_it(client: trocar.Client) -> None:
    adapter = trocar.training.lora({"*.query": 2})
    trainer = client.train("mini", head=trocar.training.head(4, of="sentence"), lora=adapter)
    assert {name.partition(".")[0] for name in trainer.info().trainable} == {"encoder", "head"}
    assert np.isfinite(trainer.step(TEXTS, LABELS).loss)


@pytest.mark.parametrize(
    ("model_id", "head", "problem"),
    [
        ("mini", trocar.training.head(4), "add a head to a model of texts by `head.of`"),
        ("mini", trocar.training.head(4, of="words"), "head.of"),
        ("mini", trocar.training.head(4, of="tokens", path="pooling"), "leave one of them out"),
        ("resnet18", trocar.training.head(4, of="tokens"), "no hidden states of texts"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    client: trocar.Client, model_id: str, head: Any, problem: str
) -> None:
    with pytest.raises(TrainerInvalidError, match=problem):
        client.train(model_id, head=head)


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        ([TAGS[0], TAGS[1][:-1], TAGS[2]], "text 1 has 8 tokens and labels for 7"),
        ([TAGS[0], TAGS[1], [*TAGS[2], 1]], "text 2 has 3 tokens and labels for 4"),
        ([TAGS[0], TAGS[1]], "has 2 entries for a batch of 3"),
    ],
)
def test_labels_that_do_not_fit_the_tokens_are_refused(
    client: trocar.Client, tags: list[list[int]], problem: str
) -> None:
    trainer = client.train("bert", head=trocar.training.head(4, of="tokens"), losses="token_cross_entropy")
    with pytest.raises(TargetRejectedError, match=problem):
        trainer.step(TEXTS, tags)
