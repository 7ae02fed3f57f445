import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.spool.steps import files
from trocar_server.spool.files.chunks import HEADER_BYTES, ChunkFile
from trocar_server.spool.files.direct_memory import aligned
from trocar_server.spool.files.file_pool import ChunkPool
from trocar_server.spool.files.header import Item
from trocar_server.spool.spool_errors import SpoolError, SpoolFullError

MIB = 1 << 20


def put(pool: ChunkPool, size: int) -> ChunkFile:
    """Place and write a block."""
    chunk, offset = pool.place(Item("1", torch.uint8, 0, size), 0)
    memory, start = aligned(-(-size // 4096) * 4096)
    chunk.write(offset, [memory.data[start : start + -(-size // 4096) * 4096]])
    return chunk


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ChunkPool]:
    pool = ChunkPool(tmp_path)
    yield pool
    pool.close()


def test_blocks_share_a_file_until_it_is_full(pool: ChunkPool) -> None:
    chunks = [put(pool, 20 * MIB) for _ in range(4)]
    assert chunks[0] is chunks[1] is chunks[2]
    assert chunks[3] is not chunks[2]


def test_a_file_is_used_again_when_its_blocks_are_gone(pool: ChunkPool, tmp_path: Path) -> None:
    for _ in range(20):
        chunks = [put(pool, 40 * MIB) for _ in range(2)]
        for chunk in chunks:
            pool.leave(chunk)
    assert len(files(tmp_path)) == pool.file_count == 2
    assert pool.peak_files == 2


def test_a_file_with_a_living_block_is_not_used_again(pool: ChunkPool) -> None:
    kept = put(pool, 30 * MIB)
    for _ in range(5):
        pool.leave(put(pool, 40 * MIB))
    assert kept.used == 30 * MIB
    assert kept.live == 1


def test_a_block_larger_than_a_file_gets_one_of_its_own(pool: ChunkPool) -> None:
    assert put(pool, 100 * MIB).capacity == 100 * MIB


def test_files_grow_when_there_are_many(tmp_path: Path, pool: ChunkPool) -> None:
    for _ in range(40):
        pool.place(Item("1", torch.uint8, 0, 60 * MIB), 0)  # not written: the files stay small
    assert len(files(tmp_path)) < 25


@pytest.mark.parametrize("quota", [0, 4096, HEADER_BYTES, HEADER_BYTES + MIB - 1])
def test_a_block_over_the_quota_is_refused(tmp_path: Path, quota: int) -> None:
    pool = ChunkPool(tmp_path, quota)
    with pytest.raises(SpoolFullError, match=f"{quota:,} bytes on disk, the quota"):
        pool.place(Item("1", torch.uint8, 0, MIB), 0)
    assert files(tmp_path) == []
    pool.close()


def test_what_fits_the_quota_exactly_is_taken(tmp_path: Path) -> None:
    pool = ChunkPool(tmp_path, HEADER_BYTES + 3 * MIB)
    for _ in range(3):
        put(pool, MIB)
    with pytest.raises(SpoolFullError):
        put(pool, 1)
    pool.close()


def test_files_never_take_more_than_the_quota(tmp_path: Path) -> None:
    quota = 30 * MIB
    pool = ChunkPool(tmp_path, quota)
    generator = torch.Generator().manual_seed(0)
    alive: list[ChunkFile] = []
    refused = 0
    for _ in range(300):
        size = int(torch.randint(1, 6 * MIB, (), generator=generator))
        try:
            alive.append(put(pool, size))
        except SpoolFullError:
            refused += 1
            for chunk in alive:
                pool.leave(chunk)
            alive.clear()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= quota
        assert sum(chunk.size for chunk in set(alive)) <= quota
    assert 0 < refused < 100
    assert pool.peak_bytes <= quota
    pool.close()


def test_free_files_stay_for_a_while_and_then_go_but_for_a_few(pool: ChunkPool, tmp_path: Path) -> None:
    for chunk in [put(pool, 40 * MIB) for _ in range(5)]:
        pool.leave(chunk)
    pool.rest(now=100.0)
    pool.rest(now=104.0)
    assert len(files(tmp_path)) == 5
    pool.rest(now=105.0)
    assert len(files(tmp_path)) == pool.file_count == 2


def test_the_while_begins_anew_with_every_step(pool: ChunkPool, tmp_path: Path) -> None:
    for start in range(0, 100, 4):
        for chunk in [put(pool, 40 * MIB) for _ in range(3)]:
            pool.leave(chunk)
        pool.rest(now=start)
        pool.rest(now=start + 3.9)
    assert len(files(tmp_path)) == 3


def test_nothing_goes_while_a_graph_lives(pool: ChunkPool, tmp_path: Path) -> None:
    chunks = [put(pool, 40 * MIB) for _ in range(5)]
    for chunk in chunks[1:]:
        pool.leave(chunk)
    for now in (0.0, 1000.0, 2000.0):
        pool.rest(now)
    assert len(files(tmp_path)) == 5


def test_the_open_file_gets_its_header_at_rest(pool: ChunkPool) -> None:
    chunk = put(pool, 100)
    assert b'"1":' not in chunk.path.read_bytes()[:HEADER_BYTES]
    pool.rest(0.0)
    assert b'"1":' in chunk.path.read_bytes()[:HEADER_BYTES]
    assert put(pool, 100) is chunk


def test_condemned_files_go_with_their_last_block(pool: ChunkPool, tmp_path: Path) -> None:
    first, second = put(pool, 40 * MIB), put(pool, 40 * MIB)
    pool.leave(put(pool, 40 * MIB))
    pool.condemn()
    assert len(files(tmp_path)) == 2  # the free one is gone
    third = put(pool, 40 * MIB)  # of the same step
    assert third not in (first, second)
    for chunk in (first, second, third):
        pool.leave(chunk)
    assert files(tmp_path) == []
    pool.forgive()
    fourth = put(pool, 40 * MIB)
    pool.leave(fourth)
    assert files(tmp_path) == [fourth.path]


def test_one_file_can_be_condemned(pool: ChunkPool, tmp_path: Path) -> None:
    first, second = put(pool, 40 * MIB), put(pool, 40 * MIB)
    pool.condemn(first)
    pool.leave(first)
    pool.leave(second)
    assert files(tmp_path) == [second.path]


def test_a_file_that_somebody_deleted_or_cut_is_not_used_again(pool: ChunkPool, tmp_path: Path) -> None:
    first, second = put(pool, 40 * MIB), put(pool, 40 * MIB)
    first.path.unlink()
    os.truncate(second.path, 4096)
    pool.leave(first)
    pool.leave(second)
    assert files(tmp_path) == []
    assert pool.file_count == 0


def test_a_folder_that_somebody_deleted_is_made_again(pool: ChunkPool, tmp_path: Path) -> None:
    put(pool, 60 * MIB)
    shutil.rmtree(files(tmp_path)[0].parent)
    put(pool, 60 * MIB)
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    pool = ChunkPool(tmp_path / "file")
    with pytest.raises(SpoolError, match="cannot write saved tensors: File exists"):
        put(pool, 1)


def test_a_file_without_room_for_its_header_is_not_left_behind(
    pool: ChunkPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(SpoolFullError, match="No space left on device"):
        pool.place(Item("1", torch.uint8, 0, 5), 0)
    assert files(tmp_path) == []


def test_without_direct_io_the_owner_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = ChunkFile.create

    def buffered(path: Path, capacity: int) -> ChunkFile:
        chunk = create(path, capacity)
        chunk.is_direct = False
        return chunk

    monkeypatch.setattr(ChunkFile, "create", buffered)
    notes: list[str] = []
    pool = ChunkPool(tmp_path, note=notes.append)
    put(pool, 1)
    assert notes == ["the filesystem has no direct I/O: writes also fill the page cache"]
    pool.close()


def test_after_closing_nothing_is_left_and_nothing_is_taken(tmp_path: Path) -> None:
    pool = ChunkPool(tmp_path)
    chunk = put(pool, MIB)
    pool.close()
    pool.leave(chunk)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpoolError, match="the spool is closed"):
        put(pool, MIB)
