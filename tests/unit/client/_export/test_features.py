"""Outputs read back, as NumPy would give them."""

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client._export.fakes import COLUMNS, FakeClient, write_samples
from trocar._base.tensors import Array
from trocar.errors import OutputError, ServerBusyError


@pytest.fixture(scope="module", params=["safetensors", "zarr", "parquet", "npy"])
def features(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> trocar.Features:
    place = tmp_path_factory.mktemp("out")
    client: Any = FakeClient()
    source = write_samples(place / "p", 23)
    trocar.extract_dataset(
        client, "m", source, list(COLUMNS), place / "out", format=request.param, batch=4, shard_size=10
    )
    return trocar.read_features(place / "out")


@pytest.fixture(scope="module")
def whole(features: trocar.Features) -> Array:
    return np.concatenate([part[0 : part.shape[0]] for part in features["wide/in"].parts])


@pytest.mark.parametrize(
    "rows",
    [
        0, -1, 22, np.int64(9), slice(None), slice(7, 9), slice(8, 16), slice(5, 100), slice(20, 3),
        slice(None, None, 5), slice(None, None, -1), slice(-3, None), [3, 1, 22, 3], [], [-1, -23],
    ],
)  # fmt: skip
def test_rows_are_numpys(features: trocar.Features, whole: Array, rows: Any) -> None:
    np.testing.assert_array_equal(
        features["wide/in"][rows], whole[np.asarray(rows, int) if isinstance(rows, list) else rows]
    )


def test_an_iteration_reads_every_block_once(features: trocar.Features, whole: Array) -> None:
    column = features["wide/in"]
    reads: list[slice] = []

    class Counted:
        def __init__(self, part: Any) -> None:
            self._part, self.shape = part, part.shape

        def __getattr__(self, name: str) -> Any:
            return getattr(self._part, name)

        def __getitem__(self, rows: slice) -> Any:
            reads.append(rows)
            return self._part[rows]

    counted = copy(column)
    counted.parts = tuple(map(Counted, column.parts))
    np.testing.assert_array_equal(np.stack(list(counted)), whole)
    assert len(reads) == len(column.parts) == 3


def test_masks_choose_rows(features: trocar.Features, whole: Array) -> None:
    mask = np.arange(23) % 3 == 0
    np.testing.assert_array_equal(features["wide/in"][mask], whole[mask])
    with pytest.raises(IndexError, match=r"a mask of shape \(5,\) for 23 rows"):
        features["wide/in"][mask[:5]]


@pytest.mark.parametrize("rows", [[0.5], [[0]], "a", (0, 1.5), None])
def test_what_chooses_no_rows_is_an_index_error(features: trocar.Features, rows: Any) -> None:
    with pytest.raises(IndexError, match="rows are chosen by"):
        features["wide/in"][rows]


@pytest.mark.parametrize("row", [23, -24, [23]])
def test_row_that_is_not_there_is_an_index_error(features: trocar.Features, row: Any) -> None:
    with pytest.raises(IndexError, match="of 23"):
        features["wide/in"][row]


def test_column_is_an_array_for_numpy(features: trocar.Features, whole: Array) -> None:
    column = features["wide/in"]
    np.testing.assert_array_equal(np.asarray(column), whole)
    assert np.asarray(column, dtype=np.float64).dtype == np.float64
    assert (column.shape, len(column)) == ((23, 5), 23)
    assert column.dtype == np.float32
    np.testing.assert_array_equal(list(column), whole)
    with pytest.raises(ValueError, match="only a copy"):
        np.array(column, copy=False)


def test_rows_are_the_callers_own(features: trocar.Features) -> None:
    rows = features["wide/in"][0:2]
    rows[:] = 7
    assert not (features["wide/in"][0:2] == 7).all()


def test_mapping_names_what_there_is(features: trocar.Features) -> None:
    assert list(features) == list(COLUMNS)
    assert (len(features), features.is_done, features.failed) == (2, True, ())
    assert features.job["model"]["weights"] == "random:0"
    assert "wide/in  (23, 5)  float32" in repr(features)
    assert "<td>wide/in</td><td>(23, 5)</td><td>float32</td>" in features._repr_html_()
    with pytest.raises(KeyError, match="nearest: code"):
        features["cod"]


def test_run_that_is_not_done_has_its_complete_shards(tmp_path: Path) -> None:
    client: Any = FakeClient(fail_at=3, error=ServerBusyError("no"))
    with pytest.raises(ServerBusyError):
        trocar.extract_dataset(
            client,
            "m",
            write_samples(tmp_path / "p", 23),
            list(COLUMNS),
            tmp_path / "out",
            batch=4,
            shard_size=8,
        )
    features = trocar.read_features(tmp_path / "out")
    assert not features.is_done
    assert features["code"].shape == (8, 1)
    assert "not done" in repr(features)


def test_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not an output of"):
        trocar.read_features(tmp_path)
