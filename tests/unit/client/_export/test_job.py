"""Whole runs with a client that needs no server."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client._export.fakes import (
    BAD,
    COLUMNS,
    WIDE,
    FakeClient,
    StreamingClient,
    computed,
    tree,
    write_samples,
)
from trocar._export.job import Progress
from trocar.errors import (
    DatasetError,
    InvalidImageError,
    OutputError,
    ServerBusyError,
    SourceError,
    UnknownModuleError,
)

FORMATS = ["safetensors", "zarr", "parquet", "npy"]


def run(source: object, out: Path, client: FakeClient | None = None, **options: Any) -> trocar.DatasetReport:
    given: Any = client or FakeClient()
    return trocar.extract_dataset(given, "m", source, list(COLUMNS), out, **{"batch": 4, **options})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "photos", 23)


def expected(folder: Path, batch: int) -> dict[str, Any]:
    """Compute every batch as one call would."""
    contents = [path.read_bytes() for path in sorted(folder.iterdir())]
    parts = [computed(contents[start : start + batch]) for start in range(0, len(contents), batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("client", [FakeClient, StreamingClient])
def test_rows_are_those_of_the_batches_in_the_order_of_the_source(
    photos: Path, tmp_path: Path, format: str, client: type[FakeClient]
) -> None:
    report = run(photos, tmp_path / "out", client(), format=format, shard_size=10)
    features = trocar.read_features(tmp_path / "out")
    for name, values in expected(photos, 4).items():
        np.testing.assert_array_equal(np.asarray(features[name]), values)
        assert features[name].dtype == values.dtype
    assert features.sample_keys == [f"{index:03}.jpg" for index in range(23)]
    assert (report.row_count, report.shard_count, report.resumed_at) == (23, 3, 0)
    assert report.shapes == {"wide/in": (23, 5), "code": (23, 1)}


def test_shards_hold_whole_batches_and_no_more_samples_than_asked(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", shard_size=10)
    assert [len(part) for part in trocar.read_features(tmp_path / "out")["code"].parts] == [8, 8, 7]


def test_batch_larger_than_a_shard_is_a_shard(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", shard_size=2)
    assert [len(part) for part in trocar.read_features(tmp_path / "out")["code"].parts] == [4] * 5 + [3]


def test_finished_run_does_nothing_when_run_again(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = FakeClient()
    report = run(photos, tmp_path / "out", again)
    assert again.calls == []
    assert report.resumed_at == report.sample_count == 23
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("kind", [FakeClient, StreamingClient])
@pytest.mark.parametrize("fail_at", range(6))
def test_run_that_failed_goes_on_with_the_batch_that_failed(
    photos: Path, tmp_path: Path, fail_at: int, kind: type[FakeClient]
) -> None:
    run(photos, tmp_path / "whole", shard_size=10)
    with pytest.raises(ServerBusyError) as caught:
        run(photos, tmp_path / "out", kind(fail_at=fail_at, error=ServerBusyError("no")), shard_size=10)
    assert f"while extracting {fail_at * 4:03}.jpg to" in caught.value.__notes__[0]
    again = FakeClient()
    report = run(photos, tmp_path / "out", again, shard_size=10)
    assert report.resumed_at == fail_at * 4
    assert len(again.calls) == 6 - fail_at
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 5}, "batch: was 4, is now 5"),
        ({"shard_size": 7}, "shard_size: was 10000, is now 7"),
        ({"format": "npy"}, 'format: was "safetensors", is now "npy"'),
        ({"limit": 9}, "limit: was null, is now 9"),
    ],
)
def test_another_job_in_the_same_folder_is_refused_and_says_what_differs(
    photos: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run(photos, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(OutputError) as caught:
        run(photos, tmp_path / "out", **change)
    assert message in str(caught.value)
    assert "restart" in str(caught.value)
    assert tree(tmp_path / "out") == before


def with_components(*seeds: int) -> list[Any]:
    """Return taps with a PCA each, whose components are made anew for every call."""
    arrays = [np.random.default_rng(seed).standard_normal((2, 5), np.float32) for seed in seeds]
    return [trocar.tap(COLUMNS[0], reduce=[trocar.pca(array)]) for array in arrays]


def test_a_run_goes_on_with_equal_components_and_not_with_others(photos: Path, tmp_path: Path) -> None:
    def extract(taps: list[Any]) -> trocar.DatasetReport:
        client: Any = FakeClient()
        return trocar.extract_dataset(client, "m", photos, taps, tmp_path / "out", batch=4)

    equal = with_components(0, 0)  # two arrays, so that they differ in their addresses
    extract(equal[:1])
    assert extract(equal[1:]).resumed_at == 23
    with pytest.raises(OutputError, match="sha256"):
        extract(with_components(1))


def test_a_run_does_not_go_on_with_other_weights(photos: Path, tmp_path: Path) -> None:
    """The id and the label of the weights are the same after a model was published again."""
    with pytest.raises(ServerBusyError):
        run(photos, tmp_path / "out", FakeClient(digest="a", fail_at=2, error=ServerBusyError("no")))
    before = tree(tmp_path / "out")
    with pytest.raises(OutputError, match=r'model\.digest: was "a", is now "b"'):
        run(photos, tmp_path / "out", FakeClient(digest="b"))
    assert tree(tmp_path / "out") == before
    assert run(photos, tmp_path / "out", FakeClient(digest="a")).resumed_at == 8
    with pytest.raises(OutputError, match=r"model\.digest"):
        run(photos, tmp_path / "out", FakeClient(digest="b"))


def test_run_that_stopped_at_a_bad_sample_may_go_on_by_skipping_it(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 12, {9: BAD})
    run(photos, tmp_path / "whole", on_error="skip")
    with pytest.raises(InvalidImageError):
        run(photos, tmp_path / "out")
    assert run(photos, tmp_path / "out", on_error="skip").resumed_at == 8
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_run_that_failed_at_once_leaves_nothing_in_the_way_of_another(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownModuleError):
        run(
            photos,
            tmp_path / "out",
            FakeClient(fail_at=0, error=UnknownModuleError("no module 'x'")),
            batch=3,
        )
    run(photos, tmp_path / "out")
    run(photos, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_source_that_changed_is_refused(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out")
    (photos / "005.jpg").write_bytes(b"other and longer than it was before, by far")
    with pytest.raises(OutputError, match=r"source\.fingerprint"):
        run(photos, tmp_path / "out")


def test_restart_throws_away_what_the_manifest_names_and_nothing_else(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(photos, out, shard_size=4)
    (out / "notes.txt").write_text("mine")
    run(photos, out, shard_size=100, restart=True)
    assert sorted(tree(out)) == ["features-00000.safetensors", "manifest.json", "notes.txt"]


def test_folder_with_other_files_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"holds 000\.jpg, 001\.jpg, 002\.jpg and more, but no manifest"):
        run(photos, photos)


def test_shard_that_was_deleted_is_noticed(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", shard_size=8)
    (tmp_path / "out" / "features-00001.safetensors").unlink()
    with pytest.raises(OutputError, match="missing or was changed"):
        run(photos, tmp_path / "out", shard_size=8)
    with pytest.raises(OutputError, match="is gone"):
        trocar.read_features(tmp_path / "out")


def test_limit_takes_the_first_samples(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "out", limit=6)
    assert trocar.read_features(tmp_path / "out").sample_keys == [f"{index:03}.jpg" for index in range(6)]


def test_bad_sample_stops_the_run_and_what_was_done_stays(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 12, {9: BAD})
    with pytest.raises(InvalidImageError) as caught:
        run(photos, tmp_path / "out")
    notes = "\n".join(caught.value.__notes__)
    assert "while extracting 008.jpg to 011.jpg" in notes
    assert "--on-error skip" in notes
    assert "8 samples are done" in notes


def test_skipped_samples_have_no_row_and_are_in_the_manifest(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 12, {5: BAD, 9: BAD})
    client = FakeClient()
    report = run(photos, tmp_path / "out", client, on_error="skip", shard_size=8)
    assert [(failure.index, failure.key, failure.reason) for failure in report.failed] == [
        (5, "005.jpg", "INVALID_IMAGE"),
        (9, "009.jpg", "INVALID_IMAGE"),
    ]
    features = trocar.read_features(tmp_path / "out")
    assert features.sample_keys == [f"{index:03}.jpg" for index in range(12) if index not in (5, 9)]
    assert features.failed == report.failed
    contents = [path.read_bytes() for path in sorted(photos.iterdir())]
    parts = [contents[:4], contents[4:5], contents[6:7], contents[7:8]]
    parts += [contents[8:9], contents[10:11], contents[11:12]]
    for name in COLUMNS:
        np.testing.assert_array_equal(
            features[name], np.concatenate([computed(part)[name] for part in parts])
        )


def test_file_that_cannot_be_read_is_a_failed_sample(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 6)
    dataset = [(path, "label") for path in sorted(photos.iterdir())]
    (photos / "002.jpg").unlink()
    with pytest.raises(SourceError, match="2: No such file or directory"):
        run(dataset, tmp_path / "out")
    report = run(dataset, tmp_path / "skipped", on_error="skip")
    assert [(failure.key, failure.reason) for failure in report.failed] == [("2", "FileNotFoundError")]
    contents = [path.read_bytes() for path in sorted(photos.iterdir())]
    found = trocar.read_features(tmp_path / "skipped")["code"][:3]
    np.testing.assert_array_equal(found, computed(contents[:3])["code"])  # the others stay one batch


def test_rows_of_another_shape_stop_the_run_or_are_skipped(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 8, dict.fromkeys(range(4, 8), WIDE))
    with pytest.raises(OutputError, match=r"'wide/in' has rows of shape \(6,\)"):
        run(photos, tmp_path / "stopped")
    report = run(photos, tmp_path / "skipped", on_error="skip")
    assert [failure.index for failure in report.failed] == [4, 5, 6, 7]
    assert report.shapes["wide/in"] == (4, 5)


def test_run_whose_samples_all_fail_has_no_row(tmp_path: Path) -> None:
    photos = write_samples(tmp_path / "photos", 5, dict.fromkeys(range(5), BAD))
    report = run(photos, tmp_path / "out", on_error="skip")
    assert (report.row_count, len(report.failed), report.shapes) == (0, 5, {})
    assert dict(trocar.read_features(tmp_path / "out")) == {}


def test_fault_that_is_not_the_datas_stops_the_run_even_when_skipping(photos: Path, tmp_path: Path) -> None:
    client = FakeClient(fail_at=0, error=UnknownModuleError("no module 'x'"))
    with pytest.raises(UnknownModuleError):
        run(photos, tmp_path / "out", client, on_error="skip")


def test_dataset_that_raises_is_named(tmp_path: Path) -> None:
    class Broken:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise RuntimeError("no such row")
            return np.zeros((2, 3), np.float32)

    with pytest.raises(SourceError, match="1: no such row"):
        run(Broken(), tmp_path / "out")
    assert [f.message for f in run(Broken(), tmp_path / "skip", on_error="skip").failed] == ["no such row"]


def test_iterable_that_breaks_off_keeps_what_it_gave(tmp_path: Path) -> None:
    def rows() -> Any:
        for index in range(6):
            yield np.full((2, 3), index, np.float32)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        run(rows(), tmp_path / "out", batch=2)
    with pytest.raises(OutputError, match="source"):
        run(np.zeros((6, 2, 3), np.float32), tmp_path / "out", batch=2)


def test_arrays_of_different_dtypes_do_not_share_a_batch(tmp_path: Path) -> None:
    rows = [np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64)]
    with pytest.raises(SourceError, match=r"must have one shape and dtype.*use --batch 1"):
        run(rows, tmp_path / "out", batch=2)


def test_empty_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="empty; name at least one"):
        run([], tmp_path / "out")
    with pytest.raises(SourceError, match="no sample"):
        run(np.zeros((0, 2, 3), np.float32), tmp_path / "out2")


def test_batch_over_the_servers_limit_is_refused_at_once(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="limit, 64"):
        run(photos, tmp_path / "out", batch=65)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"shard_size": 0},
        {"shard_size": 100_001},
        {"limit": 0},
        {"format": "csv"},
        {"decode": "me"},
    ],
)
def test_option_out_of_range_is_refused(photos: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        run(photos, tmp_path / "out", **options)


def test_progress_counts_samples_and_failures(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(write_samples(tmp_path / "p", 10, {1: BAD}), tmp_path / "out", on_error="skip", progress=seen.append)
    assert [(one.sample_count, one.failed_count) for one in seen] == [(0, 0), (4, 1), (8, 1), (10, 1)]
    assert [one.fraction for one in seen[1:]] == [0.4, 0.8, 1.0]
    assert {one.total for one in seen} == {10}


def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    class Rows:
        def __len__(self) -> int:
            return 2000

        def __getitem__(self, index: int) -> Any:
            return np.full((2, 3, 2000), index, np.float32)  # 48 kB each, 96 MB together

    tracemalloc.start()
    try:
        run(Rows(), tmp_path / "out", shard_size=200)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
