import gc
import weakref

import pytest
import torch

from trocar_server.spool.files.direct_memory import BufferPool, aligned, as_storage, storage_bytes

SIZES = [1, 4096, 100_000, 1_605_632, 2 << 20, 5_000_000]


@pytest.mark.parametrize("size", SIZES)
def test_buffers_begin_at_a_page_and_are_large_enough(size: int) -> None:
    buffers = [BufferPool(1 << 20).take(0, size)[1] for _ in range(3)]
    assert all(buffer.ctypes.data % 4096 == 0 for buffer in buffers)
    assert all(buffer.nbytes == size for buffer in buffers)


@pytest.mark.parametrize("size", SIZES)
def test_buffers_that_are_alive_do_not_overlap(size: int) -> None:
    pool = BufferPool(1 << 30)
    buffers = [pool.take(64, size)[1] for _ in range(7)]
    for value, buffer in enumerate(buffers):
        buffer[:] = value
    assert all((buffer == value).all() for value, buffer in enumerate(buffers))


def test_the_bytes_lie_in_their_pages_behind_a_phase() -> None:
    pages, array = BufferPool(0).take(100, 5000)
    assert pages.nbytes == 8192
    array[:] = 7
    assert bytes(pages[100:5100]) == bytes([7]) * 5000


@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_is_used_again_when_its_storage_is_gone(size: int) -> None:
    pool = BufferPool(1 << 30)
    addresses = set()
    for _ in range(50):
        storage = as_storage(pool.take(128, size)[1])
        addresses.add(storage.data_ptr())
        del storage
    assert len(addresses) <= max(1, (4 << 20) // size)


def test_a_buffer_is_not_used_again_while_a_view_of_its_tensor_lives() -> None:
    pool = BufferPool(1 << 30)
    view = torch.empty(0, dtype=torch.uint8).set_(as_storage(pool.take(4032, 8 << 20)[1]))[100:200]
    view.fill_(7)
    others = [pool.take(0, 8 << 20)[1] for _ in range(3)]
    for other in others:
        other[:] = 1
    assert (view == 7).all()


def test_no_more_is_kept_than_was_said() -> None:
    pool = BufferPool(20 << 20)
    lent = [pool.take(0, 8 << 20)[1] for _ in range(5)]
    bases = [weakref.ref(buffer.base) for buffer in lent if buffer.base is not None]
    lent.clear()
    pool.take(0, 1)
    gc.collect()
    assert sum(base() is not None for base in bases) == 2


def test_memory_of_another_size_makes_room() -> None:
    pool = BufferPool(20 << 20)
    bases = []
    for size in (8 << 20, 9 << 20, 10 << 20, 11 << 20):
        bases.append(weakref.ref(pool.take(0, size)[1].base))
    gc.collect()
    assert [base() is not None for base in bases] == [False, False, False, True]


def test_what_is_lent_counts() -> None:
    pool = BufferPool(20 << 20)
    lent = [pool.take(0, 8 << 20)[1] for _ in range(4)]
    base = weakref.ref(lent.pop().base)
    pool.take(0, 1)
    gc.collect()
    assert base() is None  # the others take more than may be kept


def test_cleared_memory_is_given_back() -> None:
    pool = BufferPool(1 << 30)
    base = weakref.ref(pool.take(0, 8 << 20)[1].base)
    assert base() is not None
    pool.clear()
    gc.collect()
    assert base() is None


def test_the_bytes_of_a_storage_are_those_of_its_tensor() -> None:
    values = torch.arange(6, dtype=torch.int32)
    assert bytes(storage_bytes(values.untyped_storage(), 24)) == values.numpy().tobytes()


def test_aligned_memory_is_zero() -> None:
    memory, start = aligned(8192)
    assert (memory.ctypes.data + start) % 4096 == 0
    assert not memory[start : start + 8192].any()
