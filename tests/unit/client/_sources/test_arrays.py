"""Arrays on disk and in memory."""

from pathlib import Path

import numpy as np
import pytest

from trocar._base.tensors import Array
from trocar._sources.arrays import array_source, npy_source
from trocar.errors import SourceError


def saved(folder: Path, array: Array) -> Path:
    np.save(folder / "x.npy", array)
    return folder / "x.npy"


@pytest.mark.parametrize(
    ("shape", "dtype", "count"),
    [
        ((5, 2, 3), "f4", 5),
        ((2, 3), "f4", 1),
        ((4, 5, 3), "u1", 1),
        ((7, 4, 5, 3), "u1", 7),
        ((0, 2, 3), "f4", 0),
    ],
)
def test_rows_of_a_file_are_samples(tmp_path: Path, shape: tuple[int, ...], dtype: str, count: int) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = saved(tmp_path, array)
    source = npy_source(path, 2)
    samples = list(source.samples(0))
    assert source.count == len(samples) == count
    for sample, row in zip(samples, array if count != 1 else [array], strict=True):
        np.testing.assert_array_equal(sample.load(), row)
    names = [str(path)] if count == 1 else [f"{path}[{index}]" for index in range(count)]
    assert [sample.key for sample in samples] == names


def test_array_in_memory_is_known_by_its_values() -> None:
    one, other = np.zeros((3, 2)), np.zeros((3, 2))
    other[0, 0] = 1
    prints = [array_source(array, 1).description["fingerprint"] for array in (one, one.copy(), other)]
    assert prints[0] == prints[1] != prints[2]
    assert [sample.key for sample in array_source(one, 1).samples(1)] == ["1", "2"]


def test_other_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has shape \(2, 3\); one sample has 3 dimensions, a batch 4"):
        npy_source(saved(tmp_path, np.zeros((2, 3))), 3)


def test_pickles_archives_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([{}]), allow_pickle=True)
    contents = [path.read_bytes(), b"", b"no array", b"\x93NUMPY"]
    np.savez(tmp_path / "y.npz", a=np.zeros(3))
    contents.append((tmp_path / "y.npz").read_bytes())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"not a readable \.npy file"):
            npy_source(path, 1)
    with pytest.raises(SourceError, match="No such file"):
        npy_source(tmp_path / "z.npy", 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ma.MaskedArray(np.zeros((3, 2)), True), r"array\.filled\(0\)"),
        (np.zeros((3, 2), "U3"), "it is text"),
    ],
)
def test_array_in_memory_that_cannot_be_sent_is_refused_at_once(array: Array, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        array_source(array, 1)
