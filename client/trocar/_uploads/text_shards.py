"""Text shards: texts, pairs, token ids and words, each as JSON; files of texts with their columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trocar._base.names import few
from trocar._base.token_labels import label_names, numbered, padded_labels
from trocar._request.texts import Texts, text_entry
from trocar._sources.text_tables import read_table, table_columns, target_columns, target_rows, text_rows
from trocar._uploads.array_shards import named_targets, target_tensor
from trocar._uploads.shards import (
    MAX_SHARD_SAMPLES,
    MakeParts,
    Parts,
    Shard,
    Tensor,
    make_shard,
    target_key,
    text_parts,
)
from trocar._uploads.upload_plan import UploadPlan
from trocar.errors import SourceError
from trocar_api.v1 import extraction_pb2 as pb


def text_plan(given: Texts, targets: object, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of texts in memory.

    Args:
        given: One for each sample.
        targets: As in `array_plan`; lists of labels of different lengths, one for each token or word, and of
            spans, are filled up with -100. Names of classes are numbered.
        name: Name of the data set.
        shard_bytes: Of one shard.

    Raises:
        TypeError: A sample is a chat, or there are options; a target cannot be stored.
        ValueError: Texts and targets are not for the same number of samples.
    """
    return encoded_plan(encoded_texts(given), "texts", text_parts, targets, name, shard_bytes)


def encoded_plan(
    encoded: Sequence[bytes],
    noun: str,
    parts: MakeParts,
    targets: object,
    name: str,
    shard_bytes: int,
) -> UploadPlan:
    """Return the plan of samples that are bytes already.

    Args:
        encoded: The samples, as the server stores them.
        noun: What they are, for messages.
        parts: Makes the bytes of a shard of them.
        targets: As in `text_plan`.
        name: Name of the data set.
        shard_bytes: Of one shard.

    Raises:
        TypeError: A target cannot be stored.
        ValueError: Samples and targets are not equally many.
    """
    tensors, categories = target_tensors(targets)
    for target, tensor in tensors.items():
        if not tensor.array.ndim or len(tensor.array) != len(encoded):
            count = len(tensor.array) if tensor.array.ndim else 1
            raise ValueError(
                f"there are {len(encoded)} {noun}, and {target} for {count}; each {noun[:-1]} has one"
            )
    return UploadPlan(name, categories, len(encoded), partial(_shards, encoded, parts, tensors, shard_bytes))


def table_plan(path: Path, columns: Sequence[str] | None, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of a CSV file or a file of JSON lines.

    Args:
        path: The file.
        columns: Columns of targets, several by their names; the one with a usual name when None.
        name: Name of the data set.
        shard_bytes: Of one shard.

    Raises:
        SourceError: It is not readable; a column is not there, or not clear, or has null.
        TypeError, ValueError: As `text_plan`.
    """
    table = read_table(path)
    chosen = target_columns(list(table)) if columns is None else list(columns)
    missing = [column for column in chosen if column not in table]
    if missing:
        raise SourceError(f"{path} has no column {missing[0]!r}; available: {few(list(table))}")
    sources = table_columns(path, {name: table[name] for name in table if name not in chosen})
    given = Texts(tuple(map(text_entry, text_rows(path, table, sources))))
    labels = {column: target_rows(path, table, column) for column in chosen}
    targets: Any = labels[chosen[0]] if len(chosen) == 1 else labels
    return text_plan(given, targets or None, name, shard_bytes)


def encoded_texts(given: Texts) -> list[bytes]:
    """Return texts as the server stores them.

    Raises:
        TypeError: A sample is a chat, or there are options, which belong to a fit.
    """
    if given != Texts(given.entries):
        raise TypeError("a data set has texts without options; give `max_tokens` and `truncate` to the fit")
    return [_encoded(entry) for entry in given.entries]


def target_tensors(targets: object) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return targets by the names of their tensors, and the categories where they were texts.

    Raises:
        TypeError: They cannot be stored.
    """
    result: dict[str, Tensor] = {}
    categories: tuple[str, ...] = ()
    for name, values in named_targets(targets).items():
        found_names = label_names(values)
        labels = padded_labels(numbered(values, found_names) if found_names else values)
        tensor, names = target_tensor(values if labels is None else labels, name)
        names = names or found_names
        result[target_key(name)], categories = tensor, names or categories
    return result, categories


def _encoded(entry: pb.TextEntry) -> bytes:
    kind = entry.WhichOneof("form")
    value: Any
    if kind == "text":
        value = entry.text
    elif kind == "pair":
        value = [entry.pair.first, entry.pair.second]
    elif kind == "token_ids":
        value = list(entry.token_ids.ids)
    elif kind == "words":
        value = {"words": list(entry.words.words)}
    else:
        raise TypeError("a data set has texts, pairs of texts, token ids and words, no chats")
    return encoded_text(value)


def encoded_text(value: Any) -> bytes:
    """Return a text, a list of two, a list of token ids, or words as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _shards(
    samples: Sequence[bytes], parts: MakeParts, tensors: Mapping[str, Tensor], shard_bytes: int
) -> Iterator[Shard]:
    row_bytes = sum(tensor.array.nbytes for tensor in tensors.values()) // len(samples)
    start, size = 0, 0
    for index, sample in enumerate(samples):
        is_full = size + len(sample) + row_bytes > shard_bytes or index - start == MAX_SHARD_SAMPLES
        if index > start and is_full:
            yield make_shard(partial(_build, samples, parts, tensors, start, index), index - start)
            start, size = index, 0
        size += len(sample) + row_bytes
    yield make_shard(partial(_build, samples, parts, tensors, start, len(samples)), len(samples) - start)


def _build(
    samples: Sequence[bytes], parts: MakeParts, tensors: Mapping[str, Tensor], start: int, stop: int
) -> Parts:
    rows = {name: Tensor(tensor.dtype, tensor.array[start:stop]) for name, tensor in tensors.items()}
    return parts(samples[start:stop], rows)
