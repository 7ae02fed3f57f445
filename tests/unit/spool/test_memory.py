import gc
import weakref

import pytest
import torch

from trocar_server.spool.memory import BufferPool, aligned, as_storage, padded, storage_bytes

SIZES = [1, 4096, 100_000, 1_605_632, 2 << 20, 5_000_000]


@pytest.mark.parametrize("size", SIZES)
def test_buffers_begin_at_a_page_and_are_large_enough(size: int) -> None:
    buffers = [BufferPool(1 << 20).take(size) for _ in range(3)]
    assert all(buffer.ctypes.data % 4096 == 0 for buffer in buffers)
    assert all(buffer.nbytes >= padded(size) for buffer in buffers)


@pytest.mark.parametrize("size", SIZES)
def test_buffers_that_are_alive_do_not_overlap(size: int) -> None:
    pool = BufferPool(1 << 30)
    buffers = [pool.take(size) for _ in range(7)]
    for value, buffer in enumerate(buffers):
        buffer[:] = value
    assert all((buffer == value).all() for value, buffer in enumerate(buffers))


@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_is_used_again_when_its_storage_is_gone(size: int) -> None:
    pool = BufferPool(1 << 30)
    addresses = set()
    for _ in range(50):
        storage = as_storage(pool.take(size))
        addresses.add(storage.data_ptr())
        del storage
    assert len(addresses) <= max(1, (4 << 20) // size)


def test_a_buffer_is_not_used_again_while_a_view_of_its_tensor_lives() -> None:
    pool = BufferPool(1 << 30)
    view = torch.empty(0, dtype=torch.uint8).set_(as_storage(pool.take(8 << 20)))[100:200]
    view.fill_(7)
    others = [pool.take(8 << 20) for _ in range(3)]
    for other in others:
        other[:] = 1
    assert (view == 7).all()


def test_no_more_is_kept_than_was_said() -> None:
    pool = BufferPool(20 << 20)
    lent = [pool.take(8 << 20) for _ in range(5)]
    bases = [weakref.ref(buffer.base) for buffer in lent if buffer.base is not None]
    lent.clear()
    pool.take(1)
    gc.collect()
    assert sum(base() is not None for base in bases) == 2


def test_cleared_memory_is_given_back() -> None:
    pool = BufferPool(1 << 30)
    base = weakref.ref(pool.take(8 << 20).base)
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
