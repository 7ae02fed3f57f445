"""Every format, read back by the library that it belongs to."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from safetensors import safe_open
from safetensors.numpy import load_file

from trocar._base.tensors import Array
from trocar._export.schema import Column, Schema
from trocar._export.writers.formats import FORMATS
from trocar._export.writers.shard_writer import ShardContent, pieces
from trocar.errors import OutputError

ODD = ["layer1.0/in", 'out["a"]', "..", "__x", "Conv", "conv", "a b", "é*?<>|:", "n" * 300]
KEYS = ["a/1.jpg", "ü.png", 'q"uote']


def shard(arrays: dict[str, Array], keys: list[str] | None = None) -> ShardContent:
    from trocar._export.schema import _stem

    columns: list[Column] = []
    for name, array in arrays.items():
        stem = _stem(name, {column.stem.lower() for column in columns})
        columns.append(Column(name, array.dtype, array.shape[1:], stem, {"path": name}))
    return ShardContent(Schema("m", tuple(columns), {}), arrays, keys or KEYS)


def written(format: str, path: Path, content: ShardContent) -> Path:
    FORMATS[format].check(content.schema)
    FORMATS[format].write(path, content)
    return path


def sample_arrays() -> dict[str, Array]:
    chance = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "f4": chance.standard_normal((3, 2, 5)).astype("f4"),
        "f2": chance.standard_normal((3, 4)).astype("f2"),
        "f8": np.array([np.nan, -np.inf, 1e308]),
        "i8": np.array([[2**62], [-1], [0]]),
        "flag": np.array([[True, False], [False, False], [True, True]]),
        "u1": np.arange(6, dtype="u1").reshape(3, 2),
    }
    return arrays | {name: np.full((3, 1), index, "f4") for index, name in enumerate(ODD)}


def test_safetensors_is_what_the_library_reads(tmp_path: Path) -> None:
    content = shard(sample_arrays() | {"empty": np.zeros((3, 0), "f4"), "c8": np.full((3, 1), 1 + 2j, "c8")})
    path = written("safetensors", tmp_path / "x.safetensors", content)
    found = load_file(path)
    assert found.keys() == content.arrays.keys()
    for name, array in content.stored().items():
        np.testing.assert_array_equal(found[name], array)
    with safe_open(path, "numpy") as file:
        assert json.loads(file.metadata()["trocar.images"]) == KEYS
        assert json.loads(file.metadata()["trocar.info"])["f4"]["shape"] == [3, 2, 5]


def test_tensors_of_safetensors_are_aligned(tmp_path: Path) -> None:
    path = written("safetensors", tmp_path / "x.safetensors", shard(sample_arrays()))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    sizes = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "U8": 1, "BOOL": 1}
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_npy_is_what_numpy_reads(tmp_path: Path) -> None:
    content = shard(sample_arrays() | {"empty": np.zeros((3, 0), "f4")})
    path = written("npy", tmp_path / "x", content)
    for column in content.schema.columns:
        np.testing.assert_array_equal(np.load(path / f"{column.stem}.npy"), content.arrays[column.name])
    assert json.loads((path / "keys.json").read_text()) == KEYS
    assert len(list(path.iterdir())) == len(content.arrays) + 1


def test_zarr_is_what_zarr_reads(tmp_path: Path) -> None:
    content = shard(sample_arrays())
    group: Any = zarr.open_group(written("zarr", tmp_path / "x.zarr", content), mode="r")
    for column in content.schema.columns:
        np.testing.assert_array_equal(group[column.stem][:], content.arrays[column.name])
        assert group[column.stem].attrs["name"] == column.name
    assert json.loads(group.attrs["trocar.images"]) == KEYS


def test_parquet_is_what_pyarrow_reads(tmp_path: Path) -> None:
    content = shard(sample_arrays())
    table = pq.read_table(written("parquet", tmp_path / "x.parquet", content))
    assert table["key"].to_pylist() == KEYS
    for name, array in content.stored().items():
        rows = np.array(table[name].combine_chunks().storage.to_pylist(), array.dtype)
        np.testing.assert_array_equal(rows.reshape(array.shape), array)
        assert list(table.schema.field(name).type.shape) == list(array.shape[1:])


def test_parquet_is_lists_for_those_who_do_not_know_tensors(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    content = shard({"x": np.arange(12, dtype="f4").reshape(3, 2, 2)})
    frame = pandas.read_parquet(written("parquet", tmp_path / "x.parquet", content))
    np.testing.assert_array_equal(np.stack(frame["x"]).reshape(3, 2, 2), content.arrays["x"])


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_is_read_back_by_rows(format: str, tmp_path: Path) -> None:
    content = shard(sample_arrays())
    path = written(format, tmp_path / f"x{FORMATS[format].suffix}", content)
    arrays, keys = FORMATS[format].read(path, content.schema)
    assert list(keys) == KEYS
    for name, array in content.stored().items():
        assert arrays[name].shape == array.shape
        for rows in (slice(0, 3), slice(1, 2), slice(2, 2)):
            np.testing.assert_array_equal(arrays[name][rows], array[rows])
            assert np.asarray(arrays[name][rows]).dtype == array.dtype


@pytest.mark.parametrize("format", FORMATS)
def test_shard_larger_than_a_piece_is_written_whole(format: str, tmp_path: Path) -> None:
    big = np.arange(60 << 18, dtype="f4").reshape(60, 1 << 18)  # 63 MB: several pieces, groups and chunks
    content = shard({"x": big}, [str(index) for index in range(60)])
    path = written(format, tmp_path / f"x{FORMATS[format].suffix}", content)
    arrays, _ = FORMATS[format].read(path, content.schema)
    np.testing.assert_array_equal(arrays["x"][0:60], big)
    np.testing.assert_array_equal(arrays["x"][7:9], big[7:9])


@pytest.mark.parametrize(
    ("format", "array", "message"),
    [
        ("safetensors", np.zeros((3, 1), "c16"), "complex128, which a safetensors"),
        ("parquet", np.zeros((3, 1), "c8"), "complex64, which Parquet"),
        ("parquet", np.zeros((3, 0), "f4"), r"rows of shape \(0,\), which Parquet"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    format: str, array: Array, message: str
) -> None:
    with pytest.raises(OutputError, match=message):
        FORMATS[format].check(shard({"x": array}).schema)


def test_feature_map_that_is_called_key_is_refused_in_parquet() -> None:
    with pytest.raises(OutputError, match="another alias"):
        FORMATS["parquet"].check(shard({"key": np.zeros((3, 1))}).schema)


@pytest.mark.parametrize(("format", "library"), [("zarr", "zarr"), ("parquet", "pyarrow.parquet")])
def test_missing_library_says_what_to_install(
    format: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(OutputError, match=r'pip install "trocar\[datasets\]"'):
        FORMATS[format].need()


def test_pieces_cover_the_rows_once() -> None:
    rows = np.arange(100).reshape(50, 2)
    for size in (1, 16, 100, 1 << 20):
        np.testing.assert_array_equal(np.concatenate(list(pieces(rows, piece_bytes=size))), rows)
    assert list(pieces(np.zeros((0, 3)))) == []
