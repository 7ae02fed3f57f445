"""Files that are short, gone or altered: backward fails with an error that says so, the next step works."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.spool.steps import (
    are_equal,
    batch,
    files,
    gradients,
    open_spool,
    small_model,
    wait_until_written,
)
from trocar_server.spool import SpoolReadError
from trocar_server.spool.files.chunks import HEADER_BYTES


def truncated(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + 4096)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [truncated, emptied])
def test_a_short_file_fails_backward(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        with spool:
            loss = model(batch()).square().sum()
        wait_until_written(spool)
        for path in files(tmp_path):
            damage(path)
        with pytest.raises(SpoolReadError, match=r"\.safetensors was truncated"):
            loss.backward()
        del loss
        gc.collect()
        wait_until_written(spool)
        spool.report()
        assert files(tmp_path) == []
        assert are_equal(gradients(model, spool), expected)


def test_a_deleted_file_does_no_harm(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        for _ in range(3):
            model.zero_grad()
            with spool:
                loss = model(batch()).square().sum()
            wait_until_written(spool)
            for path in files(tmp_path):
                path.unlink()
            loss.backward()
            del loss
            assert are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)


@pytest.mark.parametrize("checksum", [True, False])
def test_altered_bytes_are_found_by_the_checksum(tmp_path: Path, checksum: bool) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, checksum=checksum, keep=[model]) as spool:
        model.zero_grad()
        with spool:
            loss = model(batch()).square().sum()
        wait_until_written(spool)
        for path in files(tmp_path):
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES)
                file.write(b"\0" * (path.stat().st_size - HEADER_BYTES))
        if checksum:
            with pytest.raises(
                SpoolReadError, match="was modified: the checksum of its saved tensors does not match"
            ):
                loss.backward()
            del loss
            assert are_equal(gradients(model, spool), expected)
        else:
            loss.backward()
            assert not are_equal([p.grad for p in model.parameters() if p.grad is not None], expected)
