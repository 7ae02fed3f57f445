from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors import safe_open
from safetensors.numpy import load_file

from trocar._base.tensors import Array
from trocar._cli.runs.feature_file import FeatureFile
from trocar.errors import OutputError


def write(path: Path, batches: list[dict[str, Array]], sample_count: int) -> None:
    with FeatureFile(path, sample_count=sample_count, is_one_batch=len(batches) == 1) as file:
        for position, maps in enumerate(batches):
            size = len(next(iter(maps.values())))
            file.append(maps, batch_size=size, batch_name=f"batch {position}", metadata={"images": "[1]"})


def batch(size: int, start: int, *, width: int = 3) -> dict[str, Array]:
    values = np.arange(start, start + size * width, dtype=np.float32).reshape(size, width)
    return {"flags": values[:, :1] > 2, "values": values, "wide": values.astype(np.float64)}


def test_batches_become_one_array_that_safetensors_reads(tmp_path: Path) -> None:
    batches = [batch(2, 0), batch(2, 100), batch(1, 200)]
    write(tmp_path / "f.safetensors", batches, 5)
    found = load_file(tmp_path / "f.safetensors")
    for name in batches[0]:
        np.testing.assert_array_equal(found[name], np.concatenate([maps[name] for maps in batches]))


def test_metadata_is_in_the_header(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", [batch(2, 0)], 2)
    with safe_open(tmp_path / "f.safetensors", "numpy") as file:
        assert file.metadata() == {"images": "[1]"}


def test_one_batch_may_have_any_shape(tmp_path: Path) -> None:
    scalar: dict[str, Array] = {"x": np.array([1.5], np.float32), "turned": np.ones((7, 2), np.float16)}
    write(tmp_path / "f.safetensors", [scalar], 2)
    assert load_file(tmp_path / "f.safetensors")["turned"].shape == (7, 2)


def test_arrays_that_are_not_contiguous_are_written_in_order(tmp_path: Path) -> None:
    turned = np.arange(6, dtype=np.int64).reshape(2, 3).T
    write(tmp_path / "f.safetensors", [{"x": turned}], 3)
    np.testing.assert_array_equal(load_file(tmp_path / "f.safetensors")["x"], turned)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (batch(2, 0, width=4), "one run for each size"),
        ({"values": np.zeros((2, 3), np.float32)}, "not every batch gave flags, wide"),
    ],
)
def test_batches_that_do_not_join_are_refused(
    tmp_path: Path, second: dict[str, Array], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        write(tmp_path / "f.safetensors", [batch(2, 0), second], 4)
    assert message in capsys.readouterr().err


def test_rows_that_are_not_the_batch_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(typer.Exit),
        FeatureFile(tmp_path / "f.safetensors", sample_count=4, is_one_batch=False) as file,
    ):
        file.append({"x": np.ones((7, 2))}, batch_size=2, batch_name="a.jpg to b.jpg", metadata={})
    assert "its first dimension is not the batch of 2" in capsys.readouterr().err


def test_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="complex128"):
        write(tmp_path / "f.safetensors", [{"x": np.ones(2, np.complex128)}], 2)


def test_failed_run_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    with (
        pytest.raises(typer.Exit),
        FeatureFile(path, sample_count=4, is_one_batch=False) as file,
    ):
        file.append(batch(2, 0), batch_size=3, batch_name="a", metadata={})
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.safetensors"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f.safetensors"
    path.touch()
    path.chmod(mode)
    write(path, [batch(2, 0)], 2)
    assert path.stat().st_mode & 0o777 == mode


def test_two_runs_to_one_file_do_not_share_what_is_unfinished(tmp_path: Path) -> None:
    path, runs = tmp_path / "f.safetensors", [batch(2, 0), batch(2, 100)]
    with FeatureFile(path, sample_count=2, is_one_batch=True) as first:
        first.append(runs[0], batch_size=2, batch_name="a", metadata={})
        write(path, [runs[1]], 2)
        np.testing.assert_array_equal(load_file(path)["values"], runs[1]["values"])
    np.testing.assert_array_equal(load_file(path)["values"], runs[0]["values"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.safetensors"]


def test_a_folder_that_is_missing_is_told_by_the_files_own_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "f.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        write(path, [batch(2, 0)], 2)
    assert caught.value.filename == str(path)


def test_the_shapes_are_those_of_all_samples(tmp_path: Path) -> None:
    with FeatureFile(tmp_path / "f.safetensors", sample_count=4, is_one_batch=False) as file:
        for number in range(2):
            file.append(batch(2, number), batch_size=2, batch_name=f"batch {number}", metadata={})
        assert file.shapes == {"flags": (4, 1), "values": (4, 3), "wide": (4, 3)}
