"""`.npy` files and folders made to hurt: our errors, little memory, nothing that is waited for."""

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from trocar._sources.arrays import array_source, npy_source
from trocar._sources.files import SERVER_SUFFIXES, folder_source
from trocar._sources.webdataset import webdataset_source
from trocar.errors import SourceError

GROWTH_BYTES = 32 << 20


def npy(header: bytes, version: int = 1, length: int | None = None) -> bytes:
    width = 2 if version == 1 else 4
    size = len(header) if length is None else length
    return np.lib.format.MAGIC_PREFIX + bytes((version, 0)) + size.to_bytes(width, "little") + header


def described(shape: str, descr: str = "'<f4'", order: str = "False") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n".encode()


@pytest.mark.parametrize(
    "content",
    [
        npy(b"", version=2, length=(1 << 32) - 1),
        npy(b"", version=3, length=200 << 20),
        npy(b"", version=2, length=200 << 20),
        npy(described("(-1, 3)")),
        npy(described("(99999999999999999999, 3)")),
        npy(described(f"({1 << 61}, 3)")),
        npy(described("(2, 3)")),
        npy(described("(" * 900 + ")" * 900)),
        npy(described("(1e3, 3)")),
        npy(described("(True, 3)", "'O'")),
        npy(described("(2, 3)", "[('a', '<f4', (1 << 40,))]")),
        npy(described("(2, 3)", "'<f4' * 2")),
        npy(described("(2, 3)", "'M8[s]'")) + bytes(48),
        npy(described("(2, 3)", "[('a', '<f4')]")) + bytes(24),
        npy(described("(2, 3)", "'U4'")) + bytes(96),
        npy(described(f"({1 << 60}, 0)")),
        b"PK\x03\x04" + bytes(100),
    ],
)
def test_headers_that_lie_are_refused_in_little_memory(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    if content[6:7] in (b"\2", b"\3"):
        os.truncate(path, 300 << 20)  # sparse: takes no room
    tracemalloc.start()
    try:
        with pytest.raises(SourceError) as caught:
            npy_source(path, 1)
        assert tracemalloc.get_traced_memory()[1] < GROWTH_BYTES
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1_000


def test_mutated_files_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(24, dtype=np.float32).reshape(4, 6))
    whole, chance, path = (tmp_path / "whole.npy").read_bytes(), random.Random(6), tmp_path / "x.npy"
    refused = 0
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(90)] = chance.choice(
                (*b"0123456789-(),'{}[]<>fiuOV\0 \n", chance.randrange(256))
            )
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.1 else data)
        try:
            source = npy_source(path, 1)
            for sample, _ in zip(source.samples(0), range(8), strict=False):
                sample.load()
        except SourceError:
            refused += 1
    assert 200 < refused < 2_000


def test_samples_without_a_value_are_refused() -> None:
    with pytest.raises(SourceError, match=r"\(5, 0\): its samples are empty"):
        array_source(np.zeros((5, 0), np.float32), 1)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("x.npy", "x.tar", "x.jpg"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "y.jpg").write_bytes(b"y")
    with pytest.raises(SourceError, match="not a regular file"):
        npy_source(tmp_path / "x.npy", 1)
    with pytest.raises(SourceError, match="not a regular file"):
        webdataset_source([tmp_path / "x.tar"])
    assert [sample.key for sample in folder_source(tmp_path, SERVER_SUFFIXES).samples(0)] == ["y.jpg"]


def test_links_in_a_circle_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(tmp_path / "b.jpg")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "a.jpg")
    (tmp_path / "c.jpg").write_bytes(b"c")
    assert [sample.key for sample in folder_source(tmp_path, SERVER_SUFFIXES).samples(0)] == ["c.jpg"]
