"""A thread that works when poked and does not keep its owner alive."""

import gc
import queue
import threading
import weakref

from trocar_server.spool.blocks.background_thread import Worker


class Owner:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def work(self, is_idle: bool) -> None:
        self.calls.put(is_idle)


def test_it_works_when_poked_and_not_before() -> None:
    owner = Owner()
    worker = Worker(owner, Owner.work, "test")
    assert owner.calls.empty()
    for _ in range(3):
        worker.poke()
        assert owner.calls.get(timeout=60) is False
    worker.stop()
    worker.join(60)
    assert not worker.is_alive


def test_a_poke_while_it_works_makes_it_work_again() -> None:
    entered, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def work(_: Owner, __: bool) -> None:
        entered.release()
        assert goes_on.acquire(timeout=60)

    owner = Owner()
    worker = Worker(owner, work, "test")
    worker.poke()
    assert entered.acquire(timeout=60)
    for _ in range(5):
        worker.poke()
    goes_on.release(2)
    assert entered.acquire(timeout=60)
    worker.stop()
    worker.join(60)
    assert not entered.acquire(blocking=False)


def test_it_works_now_and_then_when_nobody_pokes() -> None:
    owner = Owner()
    worker = Worker(owner, Owner.work, "test", rest_s=0.001)
    assert owner.calls.get(timeout=60) is True
    worker.stop()


def test_it_does_not_keep_its_owner() -> None:
    owner = Owner()
    worker = Worker(owner, Owner.work, "test")
    worker.poke()
    owner.calls.get(timeout=60)
    gone = threading.Event()
    weakref.finalize(owner, gone.set)
    del owner
    gc.collect()
    assert gone.wait(60)
    worker.join(60)
    assert not worker.is_alive


def test_it_may_be_stopped_and_poked_from_anywhere() -> None:
    """From a finaliser that comes while the same thread is inside of a poke, among others."""
    owner = Owner()
    worker = Worker(owner, Owner.work, "test")

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            worker.poke()

    for _ in range(20_000):
        Cycle()
        worker.poke()
    assert owner.calls.get(timeout=60) is False
    worker.stop()
    worker.join(60)
