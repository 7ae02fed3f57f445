"""Page-locked memory is bounded, used again, and never while somebody reads it."""

import gc
import threading

import numpy as np
import pytest
import torch

from trocar_server.engine.transfer.pinned_pool import PinnedPool

SIZE = 1 << 17


class Done:
    """The event of a copy that a test ends."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Memory:
    """Counts what is allocated and let go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.released_count = 0
        self.is_full = False

    def allocate(self, byte_count: int) -> torch.Tensor:
        if self.is_full:
            raise RuntimeError("CUDA error: out of memory")
        self.sizes.append(byte_count)
        return torch.zeros(byte_count, dtype=torch.uint8)

    def release(self) -> None:
        self.released_count += 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


def pool_of(memory: Memory, max_bytes: int = 4 * SIZE) -> PinnedPool:
    return PinnedPool(max_bytes, memory.allocate, memory.release)


@pytest.mark.parametrize(
    ("asked", "given"), [(1, 1 << 16), (1 << 16, 1 << 16), ((1 << 16) + 1, 1 << 17), (SIZE, SIZE)]
)
def test_a_piece_is_a_power_of_two_that_is_large_enough(memory: Memory, asked: int, given: int) -> None:
    piece = pool_of(memory).take(asked)
    assert piece is not None
    assert piece.memory.nbytes == given


def test_a_payload_has_the_bytes_of_its_piece(memory: Memory) -> None:
    pool = pool_of(memory)
    piece = pool.take(SIZE)
    assert piece is not None
    piece.memory.copy_(torch.arange(SIZE) % 251)
    assert np.array_equal(pool.lend(piece, 1000), np.arange(1000) % 251)


def test_a_piece_is_used_again_when_its_payload_is_gone(memory: Memory) -> None:
    pool = pool_of(memory)
    for _ in range(10):
        piece = pool.take(SIZE)
        assert piece is not None
        pool.lend(piece, SIZE)
    assert memory.sizes == [SIZE]


@pytest.mark.parametrize(
    "view",
    [
        lambda payload: payload[10:20],
        lambda payload: payload.data,
        lambda payload: memoryview(payload[4:])[2:],
        lambda payload: payload[:8].view(np.float32),
        lambda payload: np.frombuffer(payload.data, np.uint8),
        torch.from_numpy,
        lambda payload: torch.from_numpy(payload[:16]).view(torch.float32)[1:],
        lambda payload: np.asarray(torch.from_numpy(payload).reshape(2, -1)),
    ],
)
def test_any_view_of_a_payload_keeps_its_piece(memory: Memory, view: object) -> None:
    pool = pool_of(memory)
    piece = pool.take(SIZE)
    assert piece is not None
    held = view(pool.lend(piece, SIZE))  # type: ignore[operator]
    gc.collect()
    assert pool.take(SIZE) is not piece
    del held
    gc.collect()
    assert piece in [pool.take(SIZE) for _ in range(2)]


def test_a_piece_with_a_copy_under_way_is_not_used_again(memory: Memory) -> None:
    pool, event = pool_of(memory), Done()
    piece = pool.take(SIZE)
    assert piece is not None
    piece.event = event
    pool.give_back(piece)
    assert pool.take(SIZE) is not piece
    event.is_done = True
    assert pool.take(SIZE) is piece


def test_the_bound_holds_and_room_comes_back(memory: Memory) -> None:
    pool = pool_of(memory, 2 * SIZE)
    held = [pool.take(SIZE), pool.take(SIZE)]
    assert None not in held
    assert pool.take(SIZE) is None
    assert pool.take(1) is None
    assert pool.byte_count == 2 * SIZE
    first = held.pop()
    assert first is not None
    pool.give_back(first)
    assert pool.take(SIZE) is first


def test_what_is_larger_than_the_bound_is_not_given_and_lets_nothing_go(memory: Memory) -> None:
    pool = pool_of(memory, 2 * SIZE)
    piece = pool.take(SIZE)
    assert piece is not None
    pool.give_back(piece)
    assert pool.take(2 * SIZE + 1) is None
    assert pool.take(SIZE) is piece
    assert memory.released_count == 0


def test_idle_pieces_of_other_sizes_make_room(memory: Memory) -> None:
    pool = pool_of(memory, 2 * SIZE)
    small = [pool.take(SIZE) for _ in range(2)]
    for piece in small:
        assert piece is not None
        pool.give_back(piece)
    large = pool.take(2 * SIZE)
    assert large is not None
    assert pool.byte_count == 2 * SIZE
    assert memory.released_count == 1


def test_pieces_with_copies_under_way_make_no_room(memory: Memory) -> None:
    pool = pool_of(memory, SIZE)
    piece = pool.take(SIZE)
    assert piece is not None
    piece.event = Done()
    pool.give_back(piece)
    assert pool.take(1) is None
    assert pool.byte_count == SIZE


def test_where_no_more_can_be_locked_that_is_the_bound(memory: Memory) -> None:
    pool = pool_of(memory)
    piece = pool.take(SIZE)
    assert piece is not None
    memory.is_full = True
    assert pool.take(SIZE) is None
    memory.is_full = False
    assert pool.take(SIZE) is None
    pool.give_back(piece)
    assert pool.take(SIZE) is piece


def test_a_bound_of_nothing_gives_nothing(memory: Memory) -> None:
    assert pool_of(memory, 0).take(1) is None
    assert memory.sizes == []


def test_a_piece_taken_in_inference_mode_can_be_written_outside(memory: Memory) -> None:
    with torch.inference_mode():
        piece = pool_of(memory).take(SIZE)
    assert piece is not None
    piece.memory[:4].copy_(torch.ones(4))
    assert piece.memory[:5].tolist() == [1, 1, 1, 1, 0]


def test_payloads_may_go_on_any_thread(memory: Memory) -> None:
    """Many threads drop what they were lent while the pool gives out more: no piece is lost or shared."""
    pool = pool_of(memory, 8 * SIZE)
    failures: list[str] = []

    def read(payload: np.ndarray, number: int) -> None:
        if not (payload == number % 251).all():
            failures.append(f"reply {number} was overwritten")

    threads: list[threading.Thread] = []
    for number in range(400):
        piece = pool.take(SIZE)
        while piece is None:
            threads.pop(0).join()
            piece = pool.take(SIZE)
        piece.memory.fill_(number % 251)
        threads.append(threading.Thread(target=read, args=(pool.lend(piece, SIZE), number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    threads.clear()
    assert failures == []
    assert pool.byte_count <= 8 * SIZE
    assert None not in [pool.take(SIZE) for _ in range(8)]
