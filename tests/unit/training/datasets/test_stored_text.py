"""Stored texts: what a sample may be, and shards of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.wire.shards import shard_of, upload
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import TextEntry
from trocar_server.training.datasets import DatasetLibrary, DatasetStore
from trocar_server.training.datasets.stored_text import MAX_TEXT_BYTES, parse_text


def text_shard(*texts: bytes, **targets: np.ndarray[Any, Any]) -> bytes:
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return shard_of(texts=np.frombuffer(b"".join(texts), np.uint8), offsets=offsets, **targets)


@pytest.mark.parametrize(
    ("data", "entry"),
    [
        (b'"the cat"', TextEntry("text", "the cat")),
        ('["ein Hund 🐕", "a"]'.encode(), TextEntry("pair", ("ein Hund 🐕", "a"))),
        (b"[101, 7592, 102]", TextEntry("ids", (101, 7592, 102))),
    ],
)
def test_texts_pairs_and_token_ids_are_samples(data: bytes, entry: TextEntry) -> None:
    assert parse_text(data) == entry


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"the cat",
        b'""',
        b"[]",
        b'["a"]',
        b'["a", ""]',
        b'["a", "b", "c"]',
        b"[1, -1]",
        b"[1, 2.0]",
        b"[true, false]",
        b'{"a": 1}',
        b"7",
        b"\xff",
        b'"\\ud800"',
        b"[" * 100_000,
        b"9" * 5000,
        b"[" + b"9" * 30 + b"]",
        b'"' + b"a" * MAX_TEXT_BYTES + b'"',
    ],
    ids=range(18),
)
def test_nothing_else_is_a_sample(data: bytes) -> None:
    with pytest.raises(ValueError, match="it"):
        parse_text(data)


def test_texts_come_back_in_any_order(tmp_path: Path) -> None:
    store = DatasetStore(tmp_path / "sets", 1 << 20, 10_000)
    texts = ["a", "the cat", "ein Hund 🐕"]
    shards = [
        (text_shard(*(json.dumps(text).encode() for text in part), targets=labels), len(part))
        for part, labels in ((texts[:2], np.array([0, 1])), (texts[2:], np.array([2])))
    ]
    dataset_id = upload(store, "alice", *shards)
    reader = DatasetLibrary(store, {}, 10_000).open("alice", dataset_id)
    loaded = reader.load((2, 0, 1))
    found = [entry.content for entry in loaded.inputs if isinstance(entry, TextEntry)]
    assert found == [texts[2], texts[0], texts[1]]
    assert loaded.targets[""].tolist() == [2, 0, 1]
    assert reader.info.signature is not None
    assert reader.info.signature.is_text
    reader.close()
    assert DatasetStore(tmp_path / "sets", 1 << 20, 10_000).get("alice", dataset_id) == reader.info


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        (text_shard(b'"a"', b"no"), "text 1 of a shard cannot be used: it is not JSON"),
        (shard_of(texts=np.zeros(3, np.uint8)), "one of `images`, `texts` and `clips`"),
        (
            shard_of(texts=np.zeros(3, np.float32), offsets=np.array([0, 12])),
            "`texts` is uint8, `offsets` int64",
        ),
        (
            shard_of(texts=np.zeros(3, np.uint8), images=np.zeros(3, np.uint8), offsets=np.array([0, 3])),
            "it needs `inputs`, or",
        ),
        (shard_of(texts=np.zeros(3, np.uint8), offsets=np.array([0, 9])), "number of bytes of `texts`"),
    ],
)
def test_shards_that_are_wrong_are_refused(tmp_path: Path, shard: bytes, problem: str) -> None:
    store = DatasetStore(tmp_path / "sets", 1 << 20, 10_000)
    with pytest.raises(ServiceError, match=problem) as caught:
        upload(store, "alice", (shard, 2 if b"no" in shard else 1))
    assert caught.value.reason is ErrorReason.DATASET_INVALID


def test_shards_of_texts_and_of_arrays_are_no_data_set(tmp_path: Path) -> None:
    store = DatasetStore(tmp_path / "sets", 1 << 20, 10_000)
    arrays = shard_of(inputs=np.zeros((1, 4), np.float32))
    with pytest.raises(ServiceError, match="differs from the shards before"):
        upload(store, "alice", (text_shard(b'"a"'), 1), (arrays, 1))
