"""Tar archives made to hurt: whatever their headers say, our errors and little memory."""

import io
import random
import struct
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trocar._sources.sample import Source
from trocar._sources.webdataset import MAX_MEMBERS, webdataset_source
from trocar.errors import SourceError

BLOCK = 512
GROWTH_BYTES = 32 << 20
CHECKSUM = slice(148, 156)
SIZE = slice(124, 136)


def header(name: str = "1.jpg", size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytearray:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return bytearray(info.tobuf(tarfile.GNU_FORMAT)[-BLOCK:])


def summed(block: bytearray) -> bytearray:
    block[CHECKSUM] = b" " * 8
    block[CHECKSUM] = b"%06o\0 " % sum(block)
    return block


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def with_size(block: bytearray, size: int) -> bytearray:
    block[SIZE] = (
        b"\xff" + size.to_bytes(11, "big", signed=True) if size < 0 else b"\x80" + size.to_bytes(11, "big")
    )
    return summed(block)


def sparse(real_size: int) -> bytes:
    """Return an old GNU sparse member: 512 bytes that stand for `real_size`."""
    block = header("1.jpg", BLOCK, tarfile.GNUTYPE_SPARSE)
    block[386:398], block[398:410] = b"%011o\0" % (real_size - BLOCK), b"%011o\0" % BLOCK
    block[483:495] = b"%011o\0" % real_size
    return bytes(summed(block)) + bytes(BLOCK)


def pax(**values: str) -> bytes:
    records = b""
    for name, value in values.items():
        body = f" {name.replace('_', '.')}={value}\n".encode()
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length += 1
        records += str(length).encode() + body
    return bytes(header("x", len(records), tarfile.XHDTYPE)) + padded(records)


def read(source: Source) -> tuple[list[str], list[str]]:
    """Read a source to its end; return the keys and what was refused."""
    keys, refused = [], []
    try:
        for sample in source.samples(0):
            keys.append(sample.key)
            try:
                sample.load()
            except SourceError as error:
                refused.append(str(error))
    except SourceError as error:
        refused.append(str(error))
    return keys, refused


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < GROWTH_BYTES
    finally:
        tracemalloc.stop()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a negative size": lambda: bytes(with_size(header(), -BLOCK)),
    "a negative size of a sparse member": lambda: bytes(
        with_size(header(kind=tarfile.GNUTYPE_SPARSE), -(1 << 40))
    ),
    "a sparse member of 200 MiB": lambda: sparse(200 << 20),
    "a sparse member by its pax header": lambda: (
        pax(
            GNU_sparse_major="1",
            GNU_sparse_minor="0",
            GNU_sparse_name="1.jpg",
            GNU_sparse_realsize="209715200",
        )
        + bytes(header("GNUSparseFile.0/1.jpg", BLOCK))
        + padded(b"1\n209715200\n0\n")
    ),
    "a sparse map in a pax header": lambda: (
        pax(GNU_sparse_map="0,-1," * 10_000 + "0,1", GNU_sparse_size="-5") + bytes(header())
    ),
    "a size beyond the end": lambda: bytes(with_size(header(), 200 << 20)),
    "a size beyond everything": lambda: bytes(with_size(header(), (1 << 87) - 1)),
    "a size in a pax header": lambda: pax(size="9" * 300) + bytes(header()),
    "a negative size in a pax header": lambda: pax(size="-512") + bytes(header()),
    "a pax header of 200 MiB": lambda: bytes(with_size(header("x", 0, tarfile.XHDTYPE), 200 << 20)),
    "a global pax header of 200 MiB": lambda: bytes(with_size(header("x", 0, tarfile.XGLTYPE), 200 << 20)),
    "a name of 200 MiB": lambda: bytes(with_size(header("x", 0, tarfile.GNUTYPE_LONGNAME), 200 << 20)),
    "a link of 200 MiB": lambda: bytes(with_size(header("x", 0, tarfile.GNUTYPE_LONGLINK), 200 << 20)),
    "a name of 1 MiB": lambda: pax(path="k" * 1_000_000 + ".jpg") + bytes(header()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_headers_that_lie_are_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(HOSTILE[name]() + bytes(2 * BLOCK))
    with path.open("r+b") as file:
        file.truncate(max(path.stat().st_size, 300 << 20) if "of 200 MiB" in name else path.stat().st_size)
    with bounded_memory():
        _, refused = read(webdataset_source([path]))
    assert refused
    assert all(len(message) < 1_000 for message in refused)


def test_a_chain_of_headers_is_followed_without_recursion(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(pax(comment="x") * 5_000 + bytes(header("1.jpg", 3)) + padded(b"one") + bytes(2 * BLOCK))
    assert read(webdataset_source([path])) == (["1"], [])


@pytest.mark.parametrize(("count", "message"), [(20_000, "more than 1,000 members"), (900, "and 895 more")])
def test_an_error_counts_the_members_of_a_sample(tmp_path: Path, count: int, message: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(bytes(header(f"1.{index}")) for index in range(count)) + bytes(2 * BLOCK))
    with bounded_memory():
        keys, [refused] = read(webdataset_source([path]))
    assert keys == ["1"]
    assert message in refused
    assert len(refused) < 600
    assert MAX_MEMBERS == 1_000


def test_a_sparse_member_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(sparse(1 << 20) + bytes(header("2.jpg", 3)) + padded(b"two") + bytes(2 * BLOCK))
    keys, [refused] = read(webdataset_source([path]))
    assert keys == ["1", "2"]
    assert "sparse" in refused


def archives() -> list[bytes]:
    made = []
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
            for name, data in (
                ("a/1.jpg", b"x" * 700),
                ("a/1.cls", b"3"),
                ("d" * 90 + "/" + "k" * 60 + ".png", b"y"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        made.append(buffer.getvalue()[: 12 * BLOCK])
    made.append(sparse(1 << 28) + made[0])
    made.append(pax(GNU_sparse_major="1", GNU_sparse_name="q.jpg", size="700") + made[1])
    return made


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) // BLOCK) * BLOCK
        block = changed[at : at + BLOCK]
        kind = chance.randrange(6)
        if kind == 0:
            block[chance.randrange(len(block))] = chance.randrange(256)
        elif kind == 1:
            block[156] = chance.choice(b"0\0001234567LKSxgXVMD")
        elif kind == 2:
            size = chance.choice((-1, -(1 << 60), 0, 1, 511, 1 << 20, 1 << 28, 1 << 62, (1 << 87) - 1))
            block = with_size(block, size)
        elif kind == 3:
            block[SIZE] = chance.choice(
                (b"-0000000001\0", b"00000000777\0", b"99999999999\0", b"1_0        \0")
            )
        elif kind == 4:
            block[482:495] = struct.pack("B12s", chance.randrange(2), b"%011o\0" % chance.randrange(1 << 30))
        else:
            block = changed[chance.randrange(len(changed) // BLOCK) * BLOCK :][:BLOCK]
        changed[at : at + BLOCK] = summed(block) if chance.random() < 0.8 else block
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


def test_mutated_archives_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    chance, path, bases = random.Random(6), tmp_path / "a.tar", archives()
    refused = 0
    with bounded_memory():
        for _ in range(3_000):
            path.write_bytes(mutated(chance.choice(bases), chance))
            refused += bool(read(webdataset_source([path]))[1])
    assert 300 < refused < 3_000  # neither all harmless nor all broken
