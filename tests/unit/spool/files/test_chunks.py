import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from trocar_server.spool.files.chunks import HEADER_BYTES, UNPUBLISHED, ChunkFile
from trocar_server.spool.files.direct_memory import aligned
from trocar_server.spool.files.header import Item
from trocar_server.spool.spool_errors import SpoolReadError

PAGE = 4096
pwritev, preadv, os_open = os.pwritev, os.preadv, os.open


def pages(data: bytes) -> memoryview:
    memory, start = aligned(len(data))
    view = memory.data[start : start + len(data)]
    view[:] = data
    return view


def put(chunk: ChunkFile, name: str, data: bytes, dtype: torch.dtype = torch.uint8) -> int:
    offset = chunk.place(Item(name, dtype, 0, len(data)), 0)
    chunk.write(offset, [pages(data.ljust(-(-len(data) // PAGE) * PAGE, b"-"))])
    return offset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"file-000001{UNPUBLISHED}"


def test_a_file_is_its_owners_alone(path: Path) -> None:
    old = os.umask(0)
    try:
        ChunkFile.create(path, 1 << 20)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o7777 == 0o600


def test_the_library_reads_what_was_written(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    values = torch.randn(3000)
    put(chunk, "1", values.numpy().tobytes(), torch.float32)
    put(chunk, "2", b"abc")
    chunk.publish()
    with safe_open(chunk.path, "pt") as file:
        assert torch.equal(file.get_tensor("1"), values)
        assert bytes(file.get_tensor("2")) == b"abc"


def test_a_file_can_go_on_after_its_header_was_written(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    put(chunk, "1", b"abc")
    chunk.publish()
    assert not path.exists()
    assert chunk.withdraw()
    assert chunk.path == path
    put(chunk, "2", b"defg")
    chunk.publish()
    with safe_open(chunk.path, "pt") as file:
        assert [bytes(file.get_tensor(name)) for name in ("1", "2")] == [b"abc", b"defg"]


def test_a_shorter_content_of_a_used_file_is_valid_too(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    put(chunk, "1", bytes(100_000))
    chunk.publish()
    assert chunk.withdraw()
    chunk.reset(1 << 20)
    put(chunk, "2", b"new")
    chunk.publish()
    with safe_open(chunk.path, "pt") as file:
        assert {name for name in file.keys() if not name.startswith("gap")} == {"2"}  # noqa: SIM118
        assert bytes(file.get_tensor("2")) == b"new"
    assert chunk.path.stat().st_size == HEADER_BYTES + 25 * PAGE


def test_there_is_room_for_bytes_and_for_names(path: Path) -> None:
    chunk = ChunkFile.create(path, 3 * PAGE)
    item = Item("1", torch.uint8, 0, PAGE)
    assert chunk.has_room(3 * PAGE, item)
    assert not chunk.has_room(4 * PAGE, item)
    many = ChunkFile.create(path.with_name(f"file-000002{UNPUBLISHED}"), 1 << 40)
    many.reserve_header()
    count = 0
    while many.has_room(0, Item(str(count), torch.uint8, 0, 0)):
        many.place(Item(str(count), torch.uint8, 0, 0), 0)
        count += 1
    many.publish()
    with safe_open(many.path, "pt") as file:
        assert len(file.keys()) == count
    assert count > 400


def test_a_filesystem_without_direct_io_is_used_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os_open(name, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    chunk = ChunkFile.create(path, 1 << 20)
    offset = put(chunk, "1", b"x" * PAGE)
    target = pages(bytes(PAGE))
    chunk.read(offset, target)
    assert not chunk.is_direct
    assert bytes(target) == b"x" * PAGE


def test_direct_io_that_is_refused_later_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    chunk.is_direct = True

    def refuse(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        if chunk.is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(number, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    offset = put(chunk, "1", b"y" * PAGE)
    target = pages(bytes(PAGE))
    chunk.read(offset, target)
    assert bytes(target) == b"y" * PAGE


def test_transfers_cut_short_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_page(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pwritev(number, [buffers[0][:PAGE]], offset)

    def read_a_page(number: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(number, [buffers[0][:PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", write_a_page)
    monkeypatch.setattr(os, "preadv", read_a_page)
    chunk = ChunkFile.create(path, 1 << 20)
    data = os.urandom(5 * PAGE)
    offset = chunk.place(Item("1", torch.uint8, 0, len(data)), 0)
    chunk.write(offset, [pages(data[:PAGE]), pages(data[PAGE : 3 * PAGE]), pages(data[3 * PAGE :])])
    target = pages(bytes(5 * PAGE))
    chunk.read(offset, target)
    assert bytes(target) == data


def test_a_file_that_was_truncated_is_named(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    offset = put(chunk, "1", bytes(2 * PAGE))
    os.truncate(path, offset + PAGE)
    assert not chunk.is_whole()
    with pytest.raises(SpoolReadError, match=r"file-000001\.part was truncated"):
        chunk.read(offset, pages(bytes(2 * PAGE)))


def test_a_file_that_was_deleted_can_still_be_read_but_is_not_whole(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    offset = put(chunk, "1", b"z" * PAGE)
    assert chunk.is_whole()
    path.unlink()
    target = pages(bytes(PAGE))
    chunk.read(offset, target)
    assert bytes(target) == b"z" * PAGE
    assert not chunk.is_whole()


def test_a_removed_file_is_never_read(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    offset = put(chunk, "1", bytes(PAGE))
    chunk.remove()
    chunk.remove()
    assert not path.exists()
    assert not chunk.is_whole()
    with pytest.raises(SpoolReadError, match="was closed"):
        chunk.read(offset, pages(bytes(PAGE)))


def test_descriptors_are_closed_with_the_file(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    chunk = ChunkFile.create(path, 1 << 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    chunk.remove()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_link_in_the_place_of_a_file_is_not_followed(path: Path) -> None:
    target = path.with_name("precious")
    target.write_bytes(b"data")
    path.symlink_to(target)
    with pytest.raises(OSError, match=r"exist|symbolic"):
        ChunkFile.create(path, 1 << 20)
    assert target.read_bytes() == b"data"


def test_a_published_name_says_step_and_blocks(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    for number in (34, 120):
        offset = chunk.place(Item(f"{number}", torch.uint8, 0, PAGE, step=12, number=number), 0)
        chunk.write(offset, [pages(bytes(PAGE))])
    chunk.publish()
    assert [file.name for file in path.parent.iterdir()] == [chunk.path.name]
    assert chunk.path.name == "step-000012-blocks-000034-000120-file-000001.safetensors"


def published(path: Path) -> ChunkFile:
    chunk = ChunkFile.create(path, 1 << 20)
    put(chunk, "1", b"abc")
    chunk.publish()
    return chunk


def test_a_file_that_somebody_has_open_is_not_written_again(path: Path) -> None:
    chunk = published(path)
    name = chunk.path
    with name.open("rb"):
        assert not chunk.withdraw()
        assert [name] == list(path.parent.iterdir())
    assert chunk.withdraw()


def test_a_file_that_somebody_has_mapped_is_not_written_again(path: Path) -> None:
    chunk = published(path)
    with chunk.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert not chunk.withdraw()
    mapped.close()
    assert chunk.withdraw()


def test_without_leases_a_published_file_is_not_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    chunk = published(path)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not chunk.withdraw()
    assert [chunk.path] == list(path.parent.iterdir())


def test_a_published_file_that_was_deleted_is_not_written_again(path: Path) -> None:
    chunk = published(path)
    chunk.path.unlink()
    assert not chunk.withdraw()


def test_a_file_that_a_fault_left_short_is_not_published(path: Path) -> None:
    chunk = ChunkFile.create(path, 1 << 20)
    chunk.place(Item("1", torch.uint8, 0, PAGE), 0)  # and not written
    chunk.publish()
    assert chunk.path == path
