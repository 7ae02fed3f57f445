"""Source opening: a source from a user's path, name or object."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trocar._base.input_kinds import is_path
from trocar._sources.files import (
    CLIENT_SUFFIXES,
    SERVER_SUFFIXES,
    file_source,
    folder_source,
    printable,
)
from trocar._sources.sample import Sample, Source
from trocar._sources.text_tables import TABLE_SUFFIXES, table_source
from trocar.errors import SourceError

Decode = Literal["server", "client"]
Kind = Literal["folder", "archive", "array", "table", "parquet", "file", "torch", "huggingface", "object"]


_KINDS: dict[str, Kind] = {
    ".tar": "archive",
    ".npy": "array",
    **dict.fromkeys(TABLE_SUFFIXES, "table"),
    ".parquet": "parquet",
}
"""Of files by suffix; others are one sample each."""


def open_source(given: object, *, decode: Decode, sample_rank: int, column: str = "") -> Source:
    """Return the source of a user's path, name or object.

    Args:
        given: A folder, a file of an image, sound or a text, a `.npy`, `.tar`, `.csv`, `.jsonl` or `.parquet`
            file, `torch:module:name`, `hf:name:split:column`, an array or a dataset object; or a list of
            paths and such names.
        decode: Side that decodes images; determines which files of a folder are images.
        sample_rank: Number of dimensions of one sample of the model's input.
        column: Which column of a table or dataset; the one with a usual name when empty.

    Raises:
        SourceError: It cannot be read.
    """
    parts = _parts(given)
    if not parts:
        raise SourceError("the list of sources is empty; name at least one")
    sources = []
    for kind, group in groupby(parts, key=kind_of):
        sources += _open(kind, list(group), decode, sample_rank, column, is_alone=len(parts) == 1)
    return sources[0] if len(sources) == 1 else _chained(sources)


def kind_of(given: object) -> Kind:
    """Return the kind of a user's source; paths need not exist."""
    if not is_path(given):
        return "array" if isinstance(given, np.ndarray) else "object"
    text = os.fspath(given)
    if str(text).startswith("torch:"):
        return "torch"
    if str(text).startswith("hf:"):
        return "huggingface"
    path = Path(text)
    if path.is_dir():
        return "folder"
    return _KINDS.get(path.suffix.lower(), "file")


def _parts(given: object) -> list[Any]:
    """Split a list of names; a list of anything else is a dataset itself."""
    if isinstance(given, (list, tuple)) and all(map(is_path, given)):
        return list(given)
    return [given]


def _open(
    kind: Kind, parts: list[Any], decode: Decode, sample_rank: int, column: str, is_alone: bool
) -> list[Source]:
    # Each module is imported on first use: `import trocar` stays fast.
    if kind == "file":
        return [file_source([Path(part) for part in parts])]
    if kind == "archive":
        from trocar._sources.webdataset import webdataset_source

        return [webdataset_source([Path(part) for part in parts])]
    return [_open_one(kind, part, decode, sample_rank, column, is_alone) for part in parts]


def _open_one(kind: Kind, part: Any, decode: Decode, sample_rank: int, column: str, is_alone: bool) -> Source:
    from trocar._sources import arrays, huggingface, objects

    if kind == "folder":
        suffixes = SERVER_SUFFIXES if decode == "server" else CLIENT_SUFFIXES
        root = Path(part)
        return folder_source(root, suffixes, prefix="" if is_alone else f"{root.as_posix()}/")
    if kind == "array":
        is_file = not isinstance(part, np.ndarray)
        return (
            arrays.npy_source(Path(part), sample_rank) if is_file else arrays.array_source(part, sample_rank)
        )
    if kind == "huggingface":
        return huggingface.open_huggingface(part, column)
    if kind == "table":
        return table_source(Path(part), column)
    if kind == "parquet":
        path, name = Path(part), printable(str(part))
        return huggingface.huggingface_source(huggingface.read_parquet(path), column, name=name)
    dataset = objects.import_dataset(part) if kind == "torch" else part
    name = part if kind == "torch" else ""
    if huggingface.is_huggingface(dataset):
        return huggingface.huggingface_source(dataset, column, name=name)
    return objects.object_source(dataset, name)


def _chained(sources: Sequence[Source]) -> Source:
    """Concatenate sources."""
    counts = [source.count for source in sources]
    total = sum(count for count in counts if count is not None) if None not in counts else None

    def samples(start: int) -> Iterator[Sample]:
        for position, source in enumerate(sources):
            if source.count is not None and start >= source.count:
                start -= source.count
                continue
            # The size of an uncounted source is only known by reading it, from its beginning.
            skipped = 0 if source.count is None else start
            for sample in source.samples(skipped):
                if skipped < start:
                    start -= 1
                else:
                    yield Sample(sample.key, sample.load, _overall(sample.fraction, position, counts))
            start -= skipped

    description = {"kind": "chain", "parts": [source.description for source in sources]}
    notes = tuple(note for source in sources for note in source.notes)
    return Source(description, samples, total, notes)


def _overall(fraction: float | None, position: int, counts: Sequence[int | None]) -> float | None:
    """Return the progress over all sources: by samples if they are counted, else unknown."""
    known = [count for count in counts if count is not None]
    if fraction is None or len(known) < len(counts) or not sum(known):
        return None
    return (sum(known[:position]) + fraction * known[position]) / sum(known)
