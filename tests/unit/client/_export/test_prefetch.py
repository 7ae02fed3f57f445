"""Reading ahead: order, bounds, errors."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.servers.waiting import no_thread_left
from trocar._export.prefetch import ReadAhead


def test_results_are_in_the_order_of_the_items_whatever_ends_first() -> None:
    second_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second_done.wait(30)
        else:
            second_done.set()
        return item * 2

    with ReadAhead(range(50), work, depth=8) as results:
        assert list(results) == [item * 2 for item in range(50)]


def test_no_more_than_the_depth_is_taken_before_somebody_reads() -> None:
    taken: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            if len(taken) == 5:
                enough.set()
            yield item

    with ReadAhead(items(), str, depth=4) as results:
        assert enough.wait(30)
        assert len(taken) == 5  # four in the queue, one waits for a place
        assert next(iter(results)) == "0"


def test_items_are_taken_on_one_thread() -> None:
    threads: set[str] = set()

    def items() -> Iterator[int]:
        for item in range(100):
            threads.add(threading.current_thread().name)
            yield item

    with ReadAhead(items(), str, depth=4) as results:
        assert len(list(results)) == 100
    assert threads == {"trocar-ahead"}


def test_error_of_the_items_comes_after_those_before() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    seen: list[int] = []
    with pytest.raises(ValueError, match="broken"), ReadAhead(items(), int, depth=4) as results:
        seen.extend(results)
    assert seen == [1]


def test_error_of_the_work_comes_in_its_place() -> None:
    with ReadAhead([4, 2, 0, 1], lambda item: 8 // item, depth=4) as results:
        iterator = iter(results)
        assert [next(iterator), next(iterator)] == [2, 4]
        with pytest.raises(ZeroDivisionError):
            next(iterator)


def test_leaving_early_ends_the_threads() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    with no_thread_left(), ReadAhead(endless(), int, depth=4) as results:
        assert next(iter(results)) == 1


def test_reader_on_another_thread_comes_to_an_end() -> None:
    got_first, left = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert left.wait(30)
        yield 2  # nobody wants it any more

    with ReadAhead(items(), int, depth=4) as results:

        def read() -> None:
            for _ in results:
                got_first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert got_first.wait(30)
        threading.Timer(0, left.set).start()
    reader.join(30)
    assert not reader.is_alive()
