"""WebDataset shards: plain tar archives whose members share a key up to the first dot of the file name.

`cats/001.jpg` and `cats/001.cls` are the sample `cats/001`. The standard library reads them; nothing is
ever unpacked to disk, so names with `..`, absolute names and links are only text.
Format: https://github.com/webdataset/webdataset
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

from trocar._base.names import few, shortened
from trocar._sources.files import check_regular, printable, stat_fingerprint
from trocar._sources.sample import MAX_SAMPLE_BYTES, Sample, Source
from trocar._sources.tar import Member, members
from trocar.errors import SourceError

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp")
"""Which member of a sample is the image: the first of these that there is."""
MAX_MEMBERS = 1_000
"""Of one sample: all of their names are in memory at once."""


def webdataset_source(shards: Sequence[Path]) -> Source:
    """Return the source of the images of tar archives, in the order of the archives and their members.

    A key is the members' common name. The number of samples is not known before the end.

    Raises:
        SourceError: An archive does not exist.
    """
    entries = [(printable(str(shard.resolve())), shard) for shard in shards]
    description: dict[str, Any] = {
        "kind": "webdataset",
        "name": ", ".join(name for name, _ in entries),
        "fingerprint": stat_fingerprint(entries),
    }
    for shard in shards:
        check_regular(shard)
    return Source(description, partial(_samples, shards))


def _samples(shards: Sequence[Path], start: int) -> Iterator[Sample]:
    sizes = [shard.stat().st_size for shard in shards]
    total, before, index = sum(sizes), 0, 0
    for shard, size in zip(shards, sizes, strict=True):
        with shard.open("rb") as file:
            for key, result in groupby(_visible(file, shard), key=lambda member: _split(member.name)[0]):
                group = list(islice(result, MAX_MEMBERS + 1))
                if index >= start:
                    done = before + min(size, group[-1].offset + group[-1].size)
                    yield Sample(key, _loader(file, shard, key, group), done / max(1, total))
                index += 1
        before += size


def _visible(file: BinaryIO, shard: Path) -> Iterator[Member]:
    for member in members(file, shard):
        if not Path(member.name).name.startswith(("__", ".")):
            yield member


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into key and field: `a.b/001.left.jpg` is `a.b/001` and `left.jpg`."""
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return printable(folder + slash + stem), field.lower()


def _loader(file: BinaryIO, shard: Path, key: str, group: list[Member]) -> partial[bytes]:
    """Read the image now, before the archive advances, or keep the reason for its absence."""
    try:
        return partial(_data, _read_image(file, shard, key, group))
    except SourceError as error:
        return partial(_refuse, error)


def _read_image(file: BinaryIO, shard: Path, key: str, group: list[Member]) -> bytes:
    where = f"sample '{shortened(key)}' of {shard}"
    if len(group) > MAX_MEMBERS:
        raise SourceError(f"{where} has more than {MAX_MEMBERS:,} members; a key names one sample")
    fields = [_split(member.name)[1] for member in group]
    chosen = _image_field(fields)
    if chosen is None:
        raise SourceError(f"{where} has no image ({', '.join(IMAGE_FIELDS)}), but {few(fields)}")
    if fields.count(chosen) > 1:
        raise SourceError(
            f"{where} has {fields.count(chosen)} members .{shortened(chosen)}; a key names one sample"
        )
    where = f"{where}: .{shortened(chosen)}"
    member = group[fields.index(chosen)]
    if member.is_sparse:
        raise SourceError(f"{where} is a sparse member; pack the archive again without --sparse")
    if member.size > MAX_SAMPLE_BYTES:
        raise SourceError(
            f"{where} says it has {member.size} bytes; more than {MAX_SAMPLE_BYTES >> 20} MiB is too "
            "large for a "
            "sample"
        )
    return _content(file, member, where)


def _content(file: BinaryIO, member: Member, where: str) -> bytes:
    # The size is the header's claim: the actual number of bytes is checked before memory is allocated.
    available = max(0, file.seek(0, 2) - member.offset)
    if available < member.size:
        raise SourceError(f"{where} is cut off, {available} of {member.size} bytes")
    file.seek(member.offset)
    try:
        return file.read(member.size)
    except OSError as error:
        raise SourceError(f"{where}: {error}") from error


def _image_field(fields: Sequence[str]) -> str | None:
    for name in IMAGE_FIELDS:
        if name in fields:
            return name
    return next((field for field in fields if field.rpartition(".")[2] in IMAGE_FIELDS), None)


def _data(data: bytes) -> bytes:
    return data


def _refuse(error: SourceError) -> bytes:
    raise error
