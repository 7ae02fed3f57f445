"""`.npz` files made to hurt: our errors and little memory."""

import io
import random
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trocar._uploads.shards import SHARD_BYTES
from trocar._uploads.upload_opening import opened_upload
from trocar.errors import SourceError

GROWTH_BYTES = 32 << 20


def upload(path: Path) -> None:
    with opened_upload(str(path), None, "", None, SHARD_BYTES) as plan:
        list(plan.shards())


def test_an_archive_that_becomes_much_more_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("inputs.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (300 << 18,)}
        )
        for _ in range(300):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"over 50 times its size; .* np.savez"):
            upload(path)
        assert tracemalloc.get_traced_memory()[1] < GROWTH_BYTES
    finally:
        tracemalloc.stop()


def test_other_arrays_are_not_read_and_not_all_listed(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {f"a{index}": np.zeros(1) for index in range(2_000)}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(SourceError, match="and 1,995 more") as caught:
        upload(tmp_path / "x.npz")
    assert len(str(caught.value)) < 500


def test_mutated_archives_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, inputs=np.arange(24, dtype=np.float32).reshape(4, 6), targets=np.arange(4))
    whole, chance, path, refused = buffer.getvalue(), random.Random(6), tmp_path / "x.npz", 0
    for _ in range(1_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.1 else data)
        try:
            upload(path)
        except (SourceError, TypeError, ValueError):  # a dtype that cannot be stored, another count
            refused += 1
    assert 300 < refused < 1_000
