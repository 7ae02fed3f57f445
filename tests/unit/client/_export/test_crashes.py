"""A run that dies at any operation on the disk: what a later run makes of it is what one run makes.

Every operation that changes the output is counted, and the run is broken off before, or in the middle
of, each in turn. `Killed` is no `Exception`: nothing may handle it.
"""

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client._export.fakes import BAD, COLUMNS, FakeClient, FakeTextClient, tree, write_samples
from trocar._base import replacement
from trocar._export import open_shard
from trocar._export.options import FormatName

FORMATS: list[FormatName] = ["safetensors", "zarr", "parquet", "npy"]
NEVER = 1 << 30


class Killed(BaseException):
    """Stands for SIGKILL."""


class Fuse:
    """Lets so many operations through, then kills; the one that is cut short is half done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = NEVER
        self.count = 0
        for owner, name in (
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (replacement, "_sync"),
        ):
            patch.setattr(owner, name, self._before(getattr(owner, name)))
        patch.setattr(shutil, "rmtree", self._before(shutil.rmtree))
        patch.setattr(open_shard, "_write", self._torn(open_shard._write))

    def burn(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False  # zarr's own threads: an exception there kills nobody
        self.count += 1
        self.left -= 1
        return self.left < 0

    def _before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if self.burn():
                raise Killed
            return real(*given, **named)

        return call

    def _torn(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, data: Any) -> None:
            if self.burn():
                real(file, memoryview(data)[: len(data) // 2])
                raise Killed
            real(file, data)

        return call


@contextmanager
def burning(left: int) -> Iterator[Fuse]:
    with pytest.MonkeyPatch.context() as patch:
        fuse = Fuse(patch)
        fuse.left = left
        yield fuse


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("source") / "photos", 17, {3: BAD, 10: BAD})


def run(photos: Path, out: Path, format: FormatName) -> None:
    client: Any = FakeClient()
    trocar.extract_dataset(
        client,
        "m",
        photos,
        list(COLUMNS),
        out,
        format=format,
        batch=3,
        shard_size=7,
        on_error="skip",
    )


def equal(found: Path, whole: Path) -> None:
    """Compare every file; Parquet and Zarr are as reproducible as the others."""
    assert tree(found) == tree(whole)


@pytest.mark.parametrize("format", FORMATS)
def test_run_killed_at_any_operation_ends_as_one_that_was_not(
    photos: Path, tmp_path: Path, format: FormatName
) -> None:
    with burning(NEVER) as fuse:
        run(photos, tmp_path / "whole", format)
    assert fuse.count > 40
    for left in range(fuse.count):
        out = tmp_path / str(left)
        with burning(left), pytest.raises(Killed):
            run(photos, out, format)
        run(photos, out, format)
        equal(out, tmp_path / "whole")
        shutil.rmtree(out)


def run_texts(out: Path, format: FormatName) -> None:
    client: Any = FakeTextClient()
    lines = [" ".join(f"w{index * 7 % (place + 3)}" for place in range(index % 5 + 1)) for index in range(11)]
    lines[4] += " bad"
    trocar.extract_dataset(
        client,
        "m",
        trocar.texts(lines),
        ["tokens"],
        out,
        format=format,
        batch=3,
        shard_size=6,
        on_error="skip",
    )


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_different_sizes_survive_a_kill_at_any_operation(tmp_path: Path, format: FormatName) -> None:
    with burning(NEVER) as fuse:
        run_texts(tmp_path / "whole", format)
    features = trocar.read_features(tmp_path / "whole")
    assert [row.shape for row in features["tokens"]] == [(n, 3) for n in (1, 2, 3, 4, 1, 2, 3, 4, 5, 1)]
    assert [row.shape for row in features["pattern"]][:3] == [(2, 1, 1), (2, 2, 2), (2, 3, 3)]
    assert features["pooled"].shape == (10, 1)
    assert not any(np.isnan(row).any() for name in ("tokens", "pattern") for row in features[name])
    for left in range(fuse.count):
        out = tmp_path / str(left)
        with burning(left), pytest.raises(Killed):
            run_texts(out, format)
        run_texts(out, format)
        equal(out, tmp_path / "whole")
        shutil.rmtree(out)


@pytest.mark.parametrize("seed", range(20))
def test_run_killed_many_times_ends_as_one_that_was_not(photos: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    format = chance.choice(FORMATS)
    run(photos, tmp_path / "whole", format)
    kills = 0
    while True:
        try:
            with burning(chance.randrange(5, 40)):
                run(photos, tmp_path / "out", format)
            break
        except Killed:
            kills += 1
    assert kills
    equal(tmp_path / "out", tmp_path / "whole")


def test_restart_that_is_killed_can_be_restarted(photos: Path, tmp_path: Path) -> None:
    client: Any = FakeClient()

    def again() -> None:
        trocar.extract_dataset(
            client, "m", photos, list(COLUMNS), out, batch=5, on_error="skip", restart=True
        )

    with burning(NEVER) as fuse:
        out = tmp_path / "whole"
        run(photos, out, "npy")
        begun = fuse.count
        again()
    for left in range(fuse.count - begun):
        out = tmp_path / str(left)
        run(photos, out, "npy")
        with burning(left), pytest.raises(Killed):
            again()
        again()
        equal(out, tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "zeroed", "gone"])
def test_rows_that_a_power_cut_lost_are_computed_again(photos: Path, tmp_path: Path, damage: str) -> None:
    run(photos, tmp_path / "whole", "safetensors")
    with burning(30), pytest.raises(Killed):
        run(photos, tmp_path / "out", "safetensors")
    for column in (tmp_path / "out" / open_shard.FOLDER).glob("column-*.bin"):
        size = column.stat().st_size
        if damage == "gone":
            column.unlink()
        else:
            kept = column.read_bytes()[: size // 2]
            column.write_bytes(kept if damage == "cut" else kept + bytes(size - size // 2))
    run(photos, tmp_path / "out", "safetensors")
    equal(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"samples": 3, "keys": [', b"[]\n", b"\xff\xfe\n"])
def test_line_that_is_not_whole_is_dropped(photos: Path, tmp_path: Path, tail: bytes) -> None:
    run(photos, tmp_path / "whole", "safetensors")
    with burning(30), pytest.raises(Killed):
        run(photos, tmp_path / "out", "safetensors")
    with (tmp_path / "out" / open_shard.FOLDER / "journal.jsonl").open("ab") as journal:
        journal.write(tail)
    run(photos, tmp_path / "out", "safetensors")
    equal(tmp_path / "out", tmp_path / "whole")
