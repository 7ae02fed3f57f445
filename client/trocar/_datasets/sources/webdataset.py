"""WebDataset shards: plain tar archives whose members share a key up to the first dot of the file name.

`cats/001.jpg` and `cats/001.cls` are the sample `cats/001`. The standard library reads them; nothing is
ever unpacked to disk, so names with `..`, absolute names and links are only text.
Format: https://github.com/webdataset/webdataset
"""

import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from trocar._datasets.sample import MAX_SAMPLE_BYTES, Sample, Source
from trocar._datasets.sources.files import printable, stat_fingerprint
from trocar.errors import SourceError

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp")
"""Which member of a sample is the image: the first of these that there is."""

_BLOCK = tarfile.BLOCKSIZE


def webdataset_source(shards: Sequence[Path]) -> Source:
    """Return the source of the images of tar archives, in the order of the archives and their members.

    A key is the members' common name. How many samples there are is not known before the end.

    Raises:
        SourceError: An archive is not there.
    """
    entries = [(printable(str(shard.resolve())), shard) for shard in shards]
    description: dict[str, Any] = {
        "kind": "webdataset",
        "name": ", ".join(name for name, _ in entries),
        "fingerprint": stat_fingerprint(entries),
    }
    return Source(description, partial(_samples, shards))


def _samples(shards: Sequence[Path], start: int) -> Iterator[Sample]:
    sizes = [shard.stat().st_size for shard in shards]
    total, before, index = sum(sizes), 0, 0
    for shard, size in zip(shards, sizes, strict=True):
        with _opened(shard) as archive:
            for key, members in groupby(_members(archive, shard), key=lambda member: _split(member.name)[0]):
                group = list(members)
                if index >= start:
                    done = before + min(size, archive.offset)
                    yield Sample(key, _loader(archive, shard, key, group), done / max(1, total))
                index += 1
        before += size


def _opened(shard: Path) -> tarfile.TarFile:
    try:
        # "r:" and no compression: each header says where the next one is, so that samples which are
        # done are skipped without reading them, and no header can unpack to more than the file has.
        return tarfile.open(shard, "r:")
    except tarfile.TarError as error:
        raise SourceError(
            f"{shard} is no plain tar archive ({error}); unpack a compressed one first, as with gunzip"
        ) from error


def _members(archive: tarfile.TarFile, shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files; the list of all members, which tarfile keeps, is dropped on the way."""
    while True:
        try:
            member = archive.next()
        except tarfile.TarError as error:
            raise SourceError(f"{shard} is damaged at byte {archive.offset}: {error}") from error
        if member is None:
            break
        archive.members.clear()  # type: ignore[attr-defined]  # else memory grows with the archive
        if member.isreg() and not Path(member.name).name.startswith(("__", ".")):
            yield member
    _check_end(archive, shard)


def _check_end(archive: tarfile.TarFile, shard: Path) -> None:
    """Tell an archive's end from damage: tarfile takes a broken header for the end."""
    file = archive.fileobj
    assert file is not None
    file.seek(archive.offset)
    block = file.read(_BLOCK)
    if any(block) or 0 < len(block) < _BLOCK:
        raise SourceError(
            f"{shard} is damaged at byte {archive.offset}: no tar header there, the rest is lost"
        )


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into key and field: `a.b/001.left.jpg` is `a.b/001` and `left.jpg`."""
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return printable(folder + slash + stem), field.lower()


def _loader(
    archive: tarfile.TarFile, shard: Path, key: str, members: list[tarfile.TarInfo]
) -> partial[bytes]:
    """Read the image now, as the archive goes on, or remember why there is none."""
    try:
        return partial(_data, _read_image(archive, shard, key, members))
    except SourceError as error:
        return partial(_refuse, error)


def _read_image(archive: tarfile.TarFile, shard: Path, key: str, members: list[tarfile.TarInfo]) -> bytes:
    fields = [_split(member.name)[1] for member in members]
    chosen = _image_field(fields)
    where = f"sample '{key}' of {shard}"
    if chosen is None:
        raise SourceError(f"{where} has no image ({', '.join(IMAGE_FIELDS)}), but {', '.join(fields)}")
    if fields.count(chosen) > 1:
        raise SourceError(f"{where} has {fields.count(chosen)} members .{chosen}; a key names one sample")
    member = members[fields.index(chosen)]
    if member.size > MAX_SAMPLE_BYTES:
        raise SourceError(
            f"{where}: .{chosen} says it has {member.size} bytes; more than {MAX_SAMPLE_BYTES >> 20} MiB is "
            "taken for no sample"
        )
    file = archive.extractfile(member)
    assert file is not None  # a regular file
    try:
        data = file.read(member.size)
    except (tarfile.TarError, OSError) as error:
        raise SourceError(f"{where}: {error}") from error
    if len(data) != member.size:
        raise SourceError(f"{where}: .{chosen} is cut off, {len(data)} of {member.size} bytes")
    return data


def _image_field(fields: Sequence[str]) -> str | None:
    for name in IMAGE_FIELDS:
        if name in fields:
            return name
    return next((field for field in fields if field.rpartition(".")[2] in IMAGE_FIELDS), None)


def _data(data: bytes) -> bytes:
    return data


def _refuse(error: SourceError) -> bytes:
    raise error
