"""Which source a name stands for, and several of them one after another."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.client._export.fakes import write_samples
from trocar._sources.source_opening import kind_of, open_source
from trocar.errors import SourceError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_samples(tmp_path / "photos", 3)
    (tmp_path / "one.png").write_bytes(b"one")
    np.save(tmp_path / "rows.npy", np.zeros((2, 4), np.float32))
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for index in range(2):
                archive.addfile(tarfile.TarInfo(f"{name}{index}.jpg"), io.BytesIO())
    return tmp_path


def opened(given: Any) -> Any:
    return open_source(given, decode="server", sample_rank=1)


def keys(given: Any, start: int = 0) -> list[str]:
    return [sample.key for sample in opened(given).samples(start)]


def test_kinds_are_told_by_name(place: Path) -> None:
    names = ["photos", "one.png", "rows.npy", "a.tar", "A.TAR", "nothing"]
    kinds = ["folder", "file", "array", "archive", "archive", "file"]
    assert [kind_of(place / name) for name in names] == kinds
    assert [kind_of(given) for given in ("torch:a:b", "hf:x", np.zeros(1), [np.zeros(1)])] == [
        "torch",
        "huggingface",
        "array",
        "object",
    ]


def test_one_folder_has_relative_keys_and_several_their_names(place: Path) -> None:
    assert keys(place / "photos") == ["000.jpg", "001.jpg", "002.jpg"]
    assert keys([place / "photos", place / "one.png"])[0] == f"{place}/photos/000.jpg"


def test_sources_follow_one_another_and_any_sample_can_be_first(place: Path) -> None:
    given = [place / name for name in ("one.png", "a.tar", "b.tar", "rows.npy", "photos")]
    whole = keys(given)
    assert [key.removeprefix(f"{place}/") for key in whole] == [
        "one.png", "a0", "a1", "b0", "b1", "rows.npy[0]", "rows.npy[1]",
        "photos/000.jpg", "photos/001.jpg", "photos/002.jpg",
    ]  # fmt: skip
    for start in range(12):
        assert keys(given, start) == whole[start:]


def test_fraction_runs_over_all_sources_that_can_be_counted(place: Path) -> None:
    counted = opened([place / "one.png", place / "rows.npy", place / "one.png"])
    assert counted.count == 4
    assert [sample.fraction for sample in counted.samples(0)] == [0.25, 0.5, 0.75, 1.0]
    uncounted = opened([place / "a.tar", place / "one.png"])
    assert uncounted.count is None
    assert {sample.fraction for sample in uncounted.samples(0)} == {None}


def test_list_of_anything_but_names_is_a_dataset() -> None:
    assert opened([(np.zeros(4), 1), (np.ones(4), 0)]).description["kind"] == "dataset"


def test_empty_list_is_refused() -> None:
    with pytest.raises(SourceError, match="name at least one"):
        opened([])
