"""Tables of results, read back by pandas and pyarrow."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

import trocar
from trocar._base.tensors import Array
from trocar._result.plain_table import MOST_COLUMNS, PlainTable, save_blocks
from trocar._result.processed import ProcessedInput, ProcessedSample


def feature_maps(
    arrays: dict[str, Array], axes: dict[str, tuple[str, ...]] | None = None, **more: Any
) -> Any:
    info = {
        name: trocar.FeatureMapInfo(
            name,
            name,
            "",
            0,
            "out",
            "",
            values.shape,
            str(values.dtype),
            True,
            axes=(axes or {}).get(name, ()),
        )
        for name, values in arrays.items()
    }
    timing = trocar.ServerTiming(0.0, 0.0)
    return trocar.FeatureMaps(arrays, info=info, stats={}, expansions={}, timing=timing, **more)


def floats(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_each_number_has_a_column() -> None:
    arrays = {"fc": floats(3, 2), "map": floats(3, 2, 1, 2), "one": floats(3, 1, 1), "flat": floats(3)}
    frame = feature_maps(arrays).to_pandas()
    assert frame.columns.tolist() == [
        "sample", "fc[0]", "fc[1]", "map[0,0]", "map[0,1]", "map[1,0]", "map[1,1]", "one", "flat",
    ]  # fmt: skip
    assert frame["map[1,0]"].tolist() == arrays["map"][:, 1, 0, 0].tolist()
    assert frame["sample"].tolist() == [0, 1, 2]


def test_samples_that_are_not_first_are_rows() -> None:
    values = floats(4, 3)
    frame = feature_maps({"x": values}, {"x": ("time", "batch")}).to_pandas()
    np.testing.assert_array_equal(frame.drop(columns="sample").to_numpy(), values.T)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_files_give_the_numbers_back(tmp_path: Path, suffix: str) -> None:
    arrays = {
        "half": floats(4, 3, dtype="float16"),
        "single": floats(4, 2) / 3,
        "double": floats(4, 2, dtype="float64") / 3,
        "whole": np.arange(4, dtype=np.int64)[:, None] + 2**60,
        "odd": np.array([np.nan, np.inf, -np.inf, 0], np.float32),
    }
    path = tmp_path / f"x{suffix}"
    feature_maps(arrays).save(path)
    # As text: the parser of pandas 2 is not exact.
    frame = pd.read_csv(path, dtype=str) if suffix == ".csv" else pd.read_parquet(path)
    for name, values in arrays.items():
        columns = [column for column in frame.columns if column.partition("[")[0] == name]
        read = frame[columns].to_numpy().reshape(values.shape)
        np.testing.assert_array_equal(read.astype(values.dtype), values)
    if suffix == ".parquet":
        assert frame["half[0]"].dtype == np.float16


def test_values_that_are_too_many_or_have_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"20,000 numbers for each sample; .* at most {MOST_COLUMNS:,}"):
        feature_maps({"x": floats(1, 20_000)}).to_pandas()
    with pytest.raises(ValueError, match="20,001 columns"):
        feature_maps({"x": floats(1, 10_000), "y": floats(1, 10_000)}).save(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="differ in rows"):
        feature_maps({"x": floats(2, 3), "y": floats(4, 3)}).to_pandas()
    with pytest.raises(ValueError, match="does not have one row"):
        feature_maps({"x": floats(2, 3)}, {"x": ("", "channels")}).to_pandas()
    with pytest.raises(ValueError, match="no values"):
        feature_maps({}).to_pandas()
    assert list(tmp_path.iterdir()) == []


def test_values_of_tokens_are_refused() -> None:
    text = ProcessedInput((ProcessedSample(2), ProcessedSample(3)), 3, False, ("input_ids",), "")
    maps = feature_maps({"x": floats(2, 3, 4)}, {"x": ("batch", "tokens", "channels")}, processed=[text])
    with pytest.raises(ValueError, match="for each token"):
        maps.to_pandas()


@pytest.mark.parametrize(
    ("over", "values", "columns", "rows"),
    [
        ("all", {"mean": 0.5, "nan_count": 2}, ["mean", "nan_count"], 1),
        ("channel", {"mean": np.ones(3)}, ["channel", "mean"], 3),
        ("sample", {"quantiles": np.ones((4, 2))}, ["sample", "quantiles[0]", "quantiles[1]"], 4),
        ("channel", {"covariance": np.eye(2)}, ["channel", "covariance[0]", "covariance[1]"], 2),
    ],
)
def test_statistics_are_tables(over: str, values: Any, columns: list[str], rows: int) -> None:
    frame = trocar.Statistics(values, over=over).to_pandas()
    assert frame.columns.tolist() == columns
    assert len(frame) == rows


def test_histograms_alone_are_no_table() -> None:
    histogram = trocar.Histogram(np.ones(2, np.int64), np.arange(3.0))
    with pytest.raises(ValueError, match="no numbers"):
        trocar.Statistics({"histogram": histogram}).to_pandas()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_blocks_follow_each_other_in_little_memory(tmp_path: Path, suffix: str) -> None:
    def blocks(count: int) -> Iterator[PlainTable]:
        for start in range(count):
            keys = np.array([f"{start},{row}" for row in range(100)], object)
            yield PlainTable({"key": keys, "x": np.full(100, start, np.float32)})

    peaks = []
    for count in (10, 100):
        tracemalloc.start()
        save_blocks(tmp_path / f"x{suffix}", blocks(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000
    path = tmp_path / f"x{suffix}"
    frame = pd.read_csv(path) if suffix == ".csv" else parquet.read_table(path).to_pandas()
    assert len(frame) == 10_000
    assert frame["key"].iloc[-1] == "99,99"


def test_files_of_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.csv or \.parquet"):
        PlainTable({"x": np.ones(1)}).save(tmp_path / "x.xlsx")
