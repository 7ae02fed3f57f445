"""Text tables: CSV files and JSON lines, one sample a row; and which columns are texts, which are targets."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from trocar._base.names import few
from trocar._sources.files import check_regular, printable, stat_fingerprint
from trocar._sources.sample import MAX_SAMPLE_BYTES, Sample, Source, TextSample
from trocar.errors import SourceError

TABLE_SUFFIXES = (".csv", ".jsonl")
"""Of files that are read without further libraries."""
USUAL_TARGETS = ("label", "labels", "target", "fine_label", "ner_tags", "entities")
"""Columns that are targets where none is named."""

_SINGLE = ("text", "sentence", "tokens", "words", "input_ids")
_PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"))

_PAIR = 2

_FIELD_LIMIT = Lock()
"""Of csv's limit, which all threads share."""

Table = Mapping[str, Sequence[Any]]
"""Columns by name, of one length."""


def read_table(path: Path) -> Table:
    """Read a CSV file with a header, or a file of JSON objects, one a line; UTF-8.

    All fields of a CSV file are texts, `007` too; `target_rows` reads numbers of classes.

    Raises:
        SourceError: It is no such file, or its rows differ in their columns.
    """
    check_regular(path)
    try:
        rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise SourceError(f"{path} is not readable: {error}") from error
    if not rows:
        raise SourceError(f"{path} has no rows")
    names = list(rows[0])
    for number, row in enumerate(rows, 1):
        if set(row) != set(names):
            raise SourceError(f"{path}: row {number} has not the columns of the first, {few(names)}")
    return {name: [row[name] for row in rows] for name in names}


def table_source(path: Path, column: str = "") -> Source:
    """Return the source of the texts of a CSV file or a file of JSON lines; the keys are `x.csv[0]`, ...

    Args:
        path: The file.
        column: Which column, or two of pairs with a comma between; the one with a usual name when empty.

    Raises:
        SourceError: It is not readable, or the column is not there, or not clear, or has null.
    """
    name = printable(str(path))
    table = read_table(path)
    columns = table_columns(path, table, column)
    rows = text_rows(path, table, columns)

    def samples(start: int) -> Iterator[Sample]:
        for index in range(start, len(rows)):
            value = TextSample(rows[index])
            yield Sample(f"{name}[{index}]", partial(_itself, value), (index + 1) / len(rows))

    description = {
        "kind": "table",
        "name": name,
        "column": ",".join(columns),
        "count": len(rows),
        "fingerprint": stat_fingerprint([(name, path)]),
    }
    return Source(description, samples, len(rows))


def _itself(value: TextSample) -> TextSample:
    return value


def table_columns(path: Path, table: Table, column: str = "") -> tuple[str, ...]:
    """Return the columns of texts.

    Raises:
        SourceError: One is not there, or it is not clear which.
    """
    chosen = tuple(column.split(",")) if column else text_columns(list(table))
    missing = [name for name in chosen if name not in table]
    if missing or not chosen:
        wanted = f"column {missing[0]!r}" if missing else "column `text`, nor `sentence1` and `sentence2`"
        raise SourceError(f"{path} has no {wanted}; available: {few(list(table))}")
    if len(chosen) > _PAIR:
        raise SourceError(f"{path}: {column!r} names {len(chosen)} columns; a sample has one text or a pair")
    return chosen


def text_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the column of texts, words or token ids, or the two of pairs; empty where it is not clear."""
    for pair in _PAIRS:
        if set(pair) <= set(names):
            return pair
    result = [name for name in _SINGLE if name in names]
    return (result[0],) if result else ()


def text_rows(path: Path, table: Table, columns: Sequence[str]) -> list[Any]:
    """Return the text of each row, or the pair as a tuple.

    Raises:
        SourceError: A row has null.
    """
    values = [_filled(path, table, name) for name in columns]
    return list(values[0] if len(values) == 1 else zip(*values, strict=True))


def target_rows(path: Path, table: Table, column: str) -> Sequence[Any]:
    """Return the target of each row; of a CSV file integers, or else floats, if all of them can be.

    Raises:
        SourceError: A row has null, or a CSV file an empty field.
    """
    values = _filled(path, table, column)
    if path.suffix.lower() != ".csv":
        return values
    empty = next((number for number, value in enumerate(values, 1) if not value.strip()), None)
    if empty is not None:
        raise SourceError(f"{path}: row {empty} has no {column!r}; every row needs a value")
    if all(map(_is_integer, values)):
        return [int(value) for value in values]
    return [float(value) for value in values] if all(map(_is_float, values)) else values


def target_columns(names: Sequence[str]) -> list[str]:
    """Return the column of targets with a usual name, if there is one."""
    return [name for name in USUAL_TARGETS if name in names][:1]


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        rows = [dict(row) for row in csv.DictReader(file)]
    for number, row in enumerate(rows, 1):
        if None in row:  # where csv puts fields without a name
            raise ValueError(f"row {number} has more fields than the header")
        if None in row.values():
            raise ValueError(f"row {number} has fewer fields than the header")
    return rows


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let csv read fields as long as a sample may be; by default it refuses those over 131,072 characters."""
    with _FIELD_LIMIT:
        before = csv.field_size_limit()
        csv.field_size_limit(max(before, MAX_SAMPLE_BYTES))
        try:
            yield
        finally:
            csv.field_size_limit(before)


def _filled(path: Path, table: Table, column: str) -> Sequence[Any]:
    values = table[column]
    if None in values:
        raise SourceError(
            f"{path}: row {values.index(None) + 1} has null in column {column!r}; every row needs a value"
        )
    return values


def _is_integer(text: object) -> bool:
    return isinstance(text, str) and text.removeprefix("-").isdecimal() and len(text) < 20


def _is_float(text: str) -> bool:
    """Whether a text is a number: `nan` and `inf` are names."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _json_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                rows.append(row)
    return rows
