"""Labels of words and of spans of characters: as the recipe of transformers' guide lays them out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertConfig, BertForTokenClassification

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar.errors import InvalidArgumentError, TargetRejectedError

PIECES = ["the", "cat", "##s", "##ty", "par", "##is", "sat", "in", ",", "a", "new", "york", "hello"]
WORDS = [["the", "cats", "sat", "in", "paris"], ["hello", "new", "york"], ["catty", "paris", ",", "parisis"]]
TAGS = [[0, 0, 0, 0, 1], [0, 2, 2], [-100, 1, 0, 2]]
TEXTS = ["the cats sat in paris", "hello new york", "catty paris, parisis"]
SPANS = [[(16, 21, 1)], [(6, 14, 2)], [(6, 11, 1), (13, 20, 2)]]
NAMED = [[(16, 21, "PLACE")], [(6, 14, "TOWN")], [(6, 11, "PLACE"), (13, 20, "TOWN")]]
CLASSES = ("O", "PLACE", "TOWN")
IGNORED = -100
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"


def _save(folder: Path, **options: Any) -> Path:
    """Save a tagger of three classes, and a tokenizer that splits words in pieces."""
    text_models.save_tokenizer(folder, pieces=PIECES, **options)
    torch.manual_seed(1)
    labels: dict[str, Any] = {"num_labels": 3}
    config = BertConfig(
        vocab_size=17,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        **labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForTokenClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "right": _save(tmp_path_factory.mktemp("right")),
        "left": _save(tmp_path_factory.mktemp("left"), padding_side="left"),
        "chats": _save(tmp_path_factory.mktemp("chats"), chat_template=CHAT_TEMPLATE),
    }


@pytest.fixture(scope="module")
def running(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models=models, device="cpu", data_dir=data_dir) as server:
        yield server


@pytest.fixture(autouse=True)
def _few_trainers(running: RunningServer) -> Iterator[None]:
    yield
    with trocar.connect(running.address) as client:
        for info in client.trainers():
            client.trainer(info.trainer_id).close()


def aligned(encoding: Any, tags: list[list[int]], b_to_i: Any = None) -> torch.Tensor:
    """The function `tokenize_and_align_labels` of the guide to token classification.

    With `b_to_i` that of the script `run_ner.py` with its option `label_all_tokens`.
    """
    labels = []
    for index, label in enumerate(tags):
        previous = None
        ids = []
        for word in encoding.word_ids(batch_index=index):
            if word is None:
                ids.append(IGNORED)
            elif word == previous:
                ids.append(IGNORED if b_to_i is None or label[word] == IGNORED else b_to_i[label[word]])
            else:
                ids.append(label[word])
            previous = word
        labels.append(ids)
    return torch.tensor(labels)


def plain_loss(
    folder: Path, tags: list[list[int]], samples: Any, b_to_i: Any = None, **options: Any
) -> float:
    """Return the loss of transformers and torch alone."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(folder)
    encoding = text_models.placed(tokenizer, tokenizer(samples, padding=True, return_tensors="pt", **options))
    model: Any = BertForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**encoding).logits
    return cross_entropy(logits.view(-1, 3), aligned(encoding, tags, b_to_i).view(-1)).item()


def tagger(client: trocar.Client, model: str = "right", **options: Any) -> trocar.training.Trainer:
    losses = trocar.training.loss_term("token_cross_entropy", **options)
    return client.train(model, losses=losses, optimizer=trocar.training.sgd(lr=0.1), seed=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_of_words_are_those_of_the_guide(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    found = tagger(client, side).evaluate(WORDS, TAGS).loss
    assert found == plain_loss(folders[side], TAGS, WORDS, is_split_into_words=True)


@pytest.mark.parametrize("side", ["right", "left"])
def test_spans_label_the_first_token_of_each_word(
    client: trocar.Client, folders: dict[str, Path], side: str
) -> None:
    tags = [[0, 0, 0, 0, 1], [0, 2, 2], [0, 1, 0, 2]]
    expected = plain_loss(folders[side], tags, TEXTS)
    trainer = tagger(client, side)
    assert trainer.evaluate(TEXTS, SPANS).loss == expected
    inside = [[(18, 19, 1)], [(6, 7, 2), (10, 11, 2)], [(9, 11, 1), (14, 15, 2)]]
    assert trainer.evaluate(TEXTS, inside).loss == expected
    assert trainer.evaluate(WORDS[:2], SPANS[:2]).loss == plain_loss(folders[side], tags[:2], TEXTS[:2])


@pytest.mark.parametrize(
    ("options", "b_to_i"),
    [
        ({"label_all_tokens": True}, [0, 1, 2]),
        ({"b_to_i": [0, 2, 2]}, [0, 2, 2]),
        ({"label_all_tokens": True, "b_to_i": [0, 2, 2]}, [0, 2, 2]),
        ({"b_to_i": [IGNORED, 2, IGNORED]}, [IGNORED, 2, IGNORED]),
        ({"label_all_tokens": False}, None),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_other_tokens_of_words_have_labels_on_request(
    client: trocar.Client, folders: dict[str, Path], side: str, options: dict[str, Any], b_to_i: Any
) -> None:
    found = tagger(client, side, **options).evaluate(WORDS, TAGS).loss
    assert found == plain_loss(folders[side], TAGS, WORDS, b_to_i, is_split_into_words=True)


def test_a_span_begins_with_b_and_goes_on_with_i(client: trocar.Client, folders: dict[str, Path]) -> None:
    spans = [[(4, 12, 1)], [(6, 14, 1)], [(0, 5, 1), (6, 11, 1)]]
    tags = [[0, 1, 2, 0, 0], [0, 1, 2], [1, 1, 0, 0]]
    found = tagger(client, b_to_i=[0, 2, 2]).evaluate(TEXTS, spans).loss
    assert found == plain_loss(folders["right"], tags, TEXTS, [0, 2, 2])


def test_spans_of_chats_are_of_the_rendered_text(client: trocar.Client, folders: dict[str, Path]) -> None:
    rendered = "hello the cats"
    trainer = tagger(client, "chats")
    chats = trocar.chat([("hello", "the cats")])
    found = trainer.evaluate(chats, [[(6, 14, 2)]]).loss
    load: Any = AutoTokenizer.from_pretrained
    encoding = load(folders["chats"])([rendered], add_special_tokens=False, return_tensors="pt")
    model: Any = BertForTokenClassification.from_pretrained(folders["chats"]).eval()
    with torch.no_grad():
        logits = model(**encoding).logits
    assert found == cross_entropy(logits[0], aligned(encoding, [[0, 2, 2]])[0]).item()
    with pytest.raises(TargetRejectedError, match="has 14 characters and a label for 6 to 15"):
        trainer.evaluate(chats, [[(6, 15, 2)]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_all_tokens": 1}, "must be true or false"),
        ({"b_to_i": [0, 2]}, "a list of 3 classes, one for each class, or -100"),
        ({"b_to_i": [0, 2, 3]}, "a list of 3 classes"),
    ],
)
def test_odd_options_of_words_are_refused(
    client: trocar.Client, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(trocar.errors.TrainerInvalidError, match=message):
        tagger(client, **options)


def test_texts_without_spans_and_second_texts_of_pairs(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    trainer = tagger(client)
    expected = plain_loss(folders["right"], [[0] * 5, [0, 2, 2]], TEXTS[:2])
    assert trainer.evaluate(TEXTS[:2], [[], [(6, 14, 2)]]).loss == expected
    load: Any = AutoTokenizer.from_pretrained
    encoding = load(folders["right"])("new york", "paris", return_tensors="pt")
    model: Any = BertForTokenClassification.from_pretrained(folders["right"]).eval()
    with torch.no_grad():
        logits = model(**encoding).logits[0]
    labels = torch.tensor([IGNORED, 2, 2, IGNORED, IGNORED, IGNORED, IGNORED])
    found = trainer.evaluate([("new york", "paris")], [[(0, 8, 2)]]).loss
    assert found == cross_entropy(logits, labels).item()


def test_what_is_cut_has_no_labels(client: trocar.Client, folders: dict[str, Path]) -> None:
    options = {"truncation": True, "max_length": 6}
    trainer = tagger(client)
    texts = trocar.texts(WORDS, max_tokens=6, truncate=True)
    expected = plain_loss(folders["right"], TAGS, WORDS, is_split_into_words=True, **options)
    assert trainer.evaluate(texts, TAGS).loss == expected
    tags = [[0, 0, 0, 0, 1], [0, 2, 2], [0, 1, 0, 2]]
    texts = trocar.texts(TEXTS, max_tokens=6, truncate=True)
    assert trainer.evaluate(texts, SPANS).loss == plain_loss(folders["right"], tags, TEXTS, **options)


def test_words_are_taken_apart_from_their_labels(client: trocar.Client, folders: dict[str, Path]) -> None:
    maps = client.extract(
        "right", WORDS, ["bert.embeddings", trocar.tap("bert.embeddings", alias="paris", tokens=SPAN)]
    )
    load: Any = AutoTokenizer.from_pretrained
    expected = load(folders["right"])(WORDS, is_split_into_words=True)["input_ids"]
    assert [list(sample.ids) for sample in maps.tokens.samples] == expected
    assert maps.info["paris"].token_positions == ((6, 7), (2, 3), (3, 4, 5))


SPAN = [trocar.span("paris"), trocar.span(6, 14), trocar.span("paris ,")]


@pytest.mark.parametrize("form", ["spans", "named spans", "words", "json lines", "hugging face"])
def test_data_sets_have_labels_of_words_and_spans(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path, form: str
) -> None:
    source: Any
    if form == "json lines":
        source = tmp_path / "places.jsonl"
        rows = [{"text": text, "label": spans} for text, spans in zip(TEXTS, NAMED, strict=True)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "hugging face":
        tags = Sequence(ClassLabel(names=list(CLASSES)))
        features = Features({"tokens": Sequence(Value("string")), "ner_tags": tags})
        source = Dataset.from_dict(
            {"tokens": WORDS, "ner_tags": [TAGS[0], TAGS[1], [0, 1, 0, 2]]}, features=features
        )
    elif form == "words":
        source = (WORDS, [["O", "O", "O", "O", "PLACE"], ["O", "TOWN", "TOWN"], ["O", "PLACE", "O", "TOWN"]])
    else:
        source = (TEXTS, SPANS if form == "spans" else NAMED)
    dataset = client.upload_dataset(source)
    assert client.dataset(dataset.dataset_id).categories == (() if form == "spans" else CLASSES)
    trainer = tagger(client)
    history = trainer.fit(dataset, batch_size=3, shuffle=False, metrics=())
    tags_of_all = [[0, 0, 0, 0, 1], [0, 2, 2], [0, 1, 0, 2]]
    assert history.outcome == "finished"
    assert history.losses[0] == pytest.approx(plain_loss(folders["right"], tags_of_all, TEXTS), rel=1e-6)


@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        (WORDS[:1], [[0, 0, 0]], "text 0 has 5 words and labels for 3"),
        (WORDS[:1], [[0, 0, 0, 0, 1, 1]], "text 0 has 5 words and labels for 6"),
        (TEXTS[:1], [[(16, 22, 1)]], "text 0 has 21 characters and a label for 16 to 22"),
        (TEXTS[:1], [[(6, 6, 1)]], "label for 6 to 6"),
        (TEXTS[:1], [[(0, 3, -5)]], "the class -5"),
        (TEXTS[:1], [[(0, 3, 7)]], "from 0 to 2"),
        ([[2, 4, 3]], [[(0, 3, 1)]], "spans for labels, which are for texts"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    client: trocar.Client, samples: Any, labels: Any, message: str
) -> None:
    with pytest.raises(TargetRejectedError, match=message):
        tagger(client).step(samples, labels)


def test_names_of_classes_need_a_data_set(client: trocar.Client) -> None:
    with pytest.raises(TypeError, match="the class of a span is 'PLACE'; give its number, or upload"):
        tagger(client).step(TEXTS, NAMED)
    with pytest.raises(TypeError, match="names or numbers, not both"):
        client.upload_dataset((TEXTS[:1], [[(0, 3, "PLACE"), (4, 5, 1)]]))


def test_a_step_on_arrays_of_spans_is_that_on_lists(client: trocar.Client) -> None:
    array = np.full((3, 2, 3), IGNORED)
    for place, spans in zip(array, SPANS, strict=True):
        place[: len(spans)] = spans
    trainer = tagger(client)
    assert trainer.evaluate(TEXTS, array).loss == trainer.evaluate(TEXTS, SPANS).loss


def test_a_published_tagger_has_a_name_for_each_class(client: trocar.Client) -> None:
    trainer = tagger(client)
    for count in (2, 8):  # of 8 tokens is the example that its shapes are known from
        with pytest.raises(InvalidArgumentError, match=rf"{count} names for a model with 3 outputs"):
            trainer.publish("towns", categories=list("abcdefgh")[:count])
    assert trainer.publish("towns", categories=CLASSES) == "towns"
    assert client.model("towns").categories == CLASSES
    tap = '/out["logits"]'
    found, own = (client.extract(name, TEXTS, tap)[tap] for name in ("towns", trainer.trainer_id))
    assert np.array_equal(found, own)
