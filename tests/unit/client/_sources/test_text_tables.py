"""Tables of texts: columns stay what their files say; the oracles are csv and json."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trocar._export.decoding import as_value, keep_encoded
from trocar._request.texts import texts
from trocar._sources.text_tables import table_source
from trocar._uploads.text_shards import table_plan
from trocar.errors import SourceError


def written(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content, "utf-8")
    return folder / name


def loaded(path: Path, column: str = "") -> list[Any]:
    return [as_value(sample.load(), keep_encoded) for sample in table_source(path, column).samples(0)]


def uploaded(path: Path, targets: list[str] | None = None) -> bytes:
    (shard,) = table_plan(path, targets, "x", 1 << 20).shards()
    return b"".join(map(bytes, shard.parts()))


def test_texts_of_digits_are_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", "text,label\n007,1\n2023,0\n-5,1\n")
    assert loaded(path) == [texts("007"), texts("2023"), texts("-5")]
    assert b'"007""2023""-5"' in uploaded(path)


def test_pairs_of_digits_are_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", "sentence1,sentence2\nhello,5\nbye,06\n")
    assert loaded(path) == [texts(("hello", "5")), texts(("bye", "06"))]
    assert b'["hello","5"]["bye","06"]' in uploaded(path)


def test_labels_of_a_csv_file_are_integers_where_all_are(tmp_path: Path) -> None:
    whole = table_plan(written(tmp_path, "x.csv", "text,label\na,10\nb,-1\n"), None, "x", 1 << 20)
    named = table_plan(written(tmp_path, "y.csv", "text,label\na,10\nb,x\n"), None, "x", 1 << 20)
    assert (whole.categories, named.categories) == ((), ("10", "x"))


def test_labels_of_a_csv_file_are_floats_where_all_are_numbers(tmp_path: Path) -> None:
    plan = table_plan(written(tmp_path, "x.csv", "text,label\na,0.5\nb,10\nc,-1e2\n"), None, "x", 1 << 20)
    (shard,) = plan.shards()
    content = b"".join(map(bytes, shard.parts()))
    assert plan.categories == ()
    assert np.array([0.5, 10, -100]).tobytes() in content


def test_an_empty_label_of_a_csv_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", 'text,label\na,0\nb,""\nc,1\n')
    with pytest.raises(SourceError, match="row 2 has no 'label'"):
        table_plan(path, None, "x", 1 << 20)


def test_a_number_is_not_taken_for_the_id_of_a_token(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", '{"text": 7}\n{"text": 2023}\n')
    with pytest.raises(SourceError, match="int is no text"):
        loaded(path)
    with pytest.raises(TypeError, match="int is no text"):
        uploaded(path)


def test_null_is_named_where_the_column_is_used(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": null}\n')
    assert loaded(path) == [texts("a"), texts("b")]
    uploaded(path, [])
    with pytest.raises(SourceError, match=r"row 2 has null in column 'label'"):
        uploaded(path)
    with pytest.raises(SourceError, match=r"row 2 has null in column 'label'"):
        loaded(path, "label")


def test_rows_of_another_length_are_named(tmp_path: Path) -> None:
    for content, problem in (("a,b\n1\n", "row 1 has fewer fields"), ("a,b\n1,2,3\n", "more fields")):
        with pytest.raises(SourceError, match=problem):
            loaded(written(tmp_path, "x.csv", content), "a")


@pytest.mark.parametrize(("name", "content"), [("x.csv", "text\na\n"), ("x.jsonl", '{"text": "a"}\n')])
def test_a_byte_order_mark_is_no_part_of_the_table(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, "utf-8-sig")
    assert loaded(tmp_path / name) == [texts("a")]


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    before, long = csv.field_size_limit(), "word " * 40_000
    assert len(long) > before
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], [long], ["b"]])
    assert loaded(tmp_path / "x.csv") == [texts(long), texts("b")]
    assert csv.field_size_limit() == before
