"""Data sets of texts: fits equal the same epochs with transformers and torch alone, bit for bit."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertForSequenceClassification, BertForTokenClassification

import trocar
from tests.support.models.text_models import WORDS, save_text_classifier
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.server_processes import server_processes
from trocar.errors import DatasetInvalidError, FitInvalidError, InputRejectedError, SourceError

COUNT, BATCH, EPOCHS, SEED = 22, 4, 2, 5


def samples(count: int = COUNT, seed: int = 3) -> tuple[list[str], list[int]]:
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS[:7], size=1 + index % 9)) for index in range(count)]
    return texts, [index % 3 for index in range(count)]


def fitted_plainly(folder: Path, texts: list[Any], labels: list[int], epochs: int = EPOCHS) -> Any:
    """Run the epochs with transformers and torch alone; dropout draws from one generator."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder)
    model: Any = BertForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(SEED)
    for epoch in range(epochs):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED + epoch))
        for indices in order.split(BATCH):
            own = [texts[index] for index in indices]
            encoding = tokenizer(own, padding=True, return_tensors="pt")
            optimizer.zero_grad()
            loss = cross_entropy(model(**encoding).logits, torch.tensor(labels)[indices])
            loss.backward()
            optimizer.step()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_classifier(tmp_path_factory.mktemp("bert"), BertForSequenceClassification)


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tagger = save_text_classifier(tmp_path_factory.mktemp("tagger"), BertForTokenClassification)
    models = {"bert": {"source": f"hf:{folder}"}, "tagger": {"source": f"hf:{tagger}"}}
    models["resnet18"] = {"weights": "random:0"}
    with running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_trainers(running: RunningServer) -> Iterator[None]:
    yield
    with trocar.connect(running.address) as client:
        for info in client.trainers():
            client.trainer(info.trainer_id).close()


def make_trainer(client: trocar.Client, model_id: str = "bert", **options: Any) -> trocar.training.Trainer:
    return client.train(model_id, optimizer=trocar.training.sgd(lr=0.1), seed=SEED, **options)


def assert_weights(trainer: trocar.training.Trainer, model: Any, path: Path) -> None:
    weights = load_file(trainer.export(path))
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_a_fit_on_texts_equals_the_same_epochs_in_torch(
    client: trocar.Client, folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(client)
    history = trainer.fit(samples(), epochs=EPOCHS, batch_size=BATCH, eval=samples(9, 4))
    assert history.outcome == "finished"
    assert [event["step"] for event in history.of_kind("step")] == list(range(1, 13))
    model = fitted_plainly(folder, *samples())
    assert_weights(trainer, model, tmp_path / "fitted.safetensors")
    texts, labels = samples(9, 4)
    load: Any = AutoTokenizer.from_pretrained
    with torch.no_grad():
        logits = model.eval()(**load(folder)(texts, padding=True, return_tensors="pt")).logits
    found = np.mean(logits.argmax(1).numpy() == labels)
    assert history.evaluations[-1]["metrics"]["accuracy"] == pytest.approx(found)


def test_a_fit_on_texts_survives_a_kill(folder: Path, tmp_path: Path) -> None:
    models = {"bert": {"source": f"hf:{folder}"}}
    with server_processes() as processes:
        server = processes.start(tmp_path / "data", models=models)
        with trocar.connect(server.address, retries=0) as client:
            trainer = make_trainer(client)
            first = trainer.start_fit(samples(), epochs=EPOCHS, batch_size=BATCH, checkpoint_every=2)
            for event in trainer.watch(first):
                if event.kind == "step" and event["step"] == 5:
                    server.kill()
                    break
    with (
        running_server(models=models, device="cpu", data_dir=tmp_path / "data") as second,
        trocar.connect(second.address) as client,
    ):
        found = client.trainer(trainer.trainer_id)
        events = list(found.watch(first))
        assert events[-1].kind == "finished", events[-1]
        assert [event["step"] for event in events if event.kind == "step"] == list(range(1, 13))
        assert_weights(found, fitted_plainly(folder, *samples()), tmp_path / "fitted.safetensors")


def test_labels_of_tokens_are_laid_out_as_the_tokens(client: trocar.Client, tmp_path: Path) -> None:
    texts, _ = samples(6)
    labels = [[-100, *[index % 3 for index in range(len(text.split()))], -100] for text in texts]
    trainer = make_trainer(client, "tagger", losses="token_cross_entropy")
    expected = make_trainer(client, "tagger", losses="token_cross_entropy")
    dataset = client.upload_dataset((texts, labels), name="tags")
    assert dataset.targets[""].shape == (max(map(len, labels)),)
    trainer.fit(dataset, batch_size=3, shuffle=False, metrics=())
    for start in (0, 3):
        expected.step(texts[start : start + 3], labels[start : start + 3])
    found, other = (
        load_file(one.export(tmp_path / f"{i}.safetensors")) for i, one in enumerate((trainer, expected))
    )
    assert all(torch.equal(found[name], other[name]) for name in other)


def table_of(texts: list[str], labels: list[int]) -> list[dict[str, Any]]:
    return [{"text": text, "label": "abc"[label]} for text, label in zip(texts, labels, strict=True)]


def as_csv(path: Path, rows: list[dict[str, Any]]) -> str:
    with (path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path / "rows.csv")


def as_json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return str(path / "rows.jsonl")


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=list("abc")))
    made.to_parquet(path / "rows.parquet")
    return str(path / "rows.parquet")


def as_dataset(path: Path, rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=list("abc")))


def as_objects(path: Path, rows: list[dict[str, Any]]) -> Any:
    return [(row["text"], "abc".index(row["label"])) for row in rows]


@pytest.mark.parametrize("make", [as_csv, as_json_lines, as_parquet, as_dataset, as_objects])
def test_tables_become_the_data_set_of_their_lists(client: trocar.Client, tmp_path: Path, make: Any) -> None:
    texts, labels = ["the cat sat", "ein Hund 🐕", 'a,\n"b"', "123"], [0, 2, 1, 0]
    dataset = client.upload_dataset(make(tmp_path, table_of(texts, labels)), shard_bytes=40)
    assert (dataset.sample_count, dataset.has_texts, dataset.has_images) == (4, True, False)
    assert dataset.inputs is None
    assert dataset.categories == (() if make is as_objects else ("a", "b", "c"))
    assert (dataset.targets[""].low, dataset.targets[""].high) == (0, 2)
    one, other = (make_trainer(client) for _ in range(2))
    history = one.fit(dataset, batch_size=4, shuffle=False)
    assert history.of_kind("step")[0]["loss"] == other.step(trocar.texts(texts), labels).loss


@pytest.mark.parametrize(
    "given", [[("the cat", "a dog"), ("hello", "a mat on a mat")], [[2, 4, 3], [2, 5, 6, 7, 3]]]
)
def test_pairs_and_token_ids_are_data_sets_too(client: trocar.Client, given: list[Any]) -> None:
    one, other = (make_trainer(client) for _ in range(2))
    history = one.fit((given, [1, 2]), batch_size=2, shuffle=False)
    assert history.of_kind("step")[0]["loss"] == other.step(given, [1, 2]).loss


def test_long_texts_end_a_fit_with_their_index_unless_they_are_cut(client: trocar.Client) -> None:
    texts = ["the cat", "a dog", "hello", "cat " * 40]
    trainer = make_trainer(client)
    with pytest.raises(InputRejectedError, match=r"sample 3 of the data set .* has 42 tokens.*`truncate`"):
        trainer.fit((texts, [0, 1, 2, 0]), batch_size=2, shuffle=False)
    assert trainer.info().update_count == 1
    history = trainer.fit((texts, [0, 1, 2, 0]), batch_size=2, shuffle=False, truncate=True, max_tokens=5)
    assert history.outcome == "finished"


@pytest.mark.parametrize(
    ("model_id", "options", "problem"),
    [
        ("resnet18", {"metrics": ()}, "takes no texts"),
        ("bert", {"augment": "RandomHorizontalFlip"}, "augmentations: they change images"),
        ("bert", {"max_tokens": 0}, "max_tokens"),
        ("bert", {"max_tokens": 99}, "the model takes 16"),
    ],
)
def test_fits_that_cannot_be_are_refused(
    client: trocar.Client, model_id: str, options: dict[str, Any], problem: str
) -> None:
    trainer = client.train(model_id)
    with pytest.raises(FitInvalidError, match=problem):
        trainer.fit((["the cat", "a dog"], [0, 1]), **options)


@pytest.mark.parametrize(
    ("source", "options", "kind", "problem"),
    [
        ((["cat", "dog"], [1]), {}, ValueError, "there are 2 texts, and targets for 1"),
        ((["cat", ""], [0, 1]), {}, DatasetInvalidError, "text 1 of a shard cannot be used"),
        (trocar.chat([("user", "hello")]), {}, TypeError, "no chats"),
        (trocar.texts(["cat"], truncate=True), {}, TypeError, "give `max_tokens` and `truncate` to the fit"),
        ("rows.csv", {"targets": "kind"}, SourceError, "has no column 'kind'; available: text, label"),
        ("broken.jsonl", {}, SourceError, "is not readable"),
        ("other.csv", {}, SourceError, "has no column `text`"),
        ("ragged.jsonl", {}, SourceError, "row 2 has not the columns of the first"),
    ],
)
def test_texts_that_are_no_data_set_are_refused(
    client: trocar.Client, tmp_path: Path, source: Any, options: dict[str, Any], kind: Any, problem: str
) -> None:
    files = {
        "rows.csv": "text,label\ncat,1\n",
        "broken.jsonl": '{"text": "cat"\n',
        "other.csv": "a,b\n1,2\n",
        "ragged.jsonl": '{"text": "cat"}\n{"label": 1}\n',
    }
    if isinstance(source, str):
        (tmp_path / source).write_text(files[source], "utf-8")
        source = tmp_path / source
    with pytest.raises(kind, match=problem):
        client.upload_dataset(source, **options)
