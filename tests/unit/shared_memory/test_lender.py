"""Who may have how much shared memory, and what is left when it is taken back."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.shared_memory import Lender, open_lender
from trocar_server.shared_memory.lender import MAX_SEGMENTS, TOTAL_FACTOR, UNUSED_S

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def lender(tmp_path: Path) -> Lender:
    return Lender(64 * PAGE, tmp_path)


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def reason_of(caught: pytest.ExceptionInfo[ServiceError]) -> ErrorReason:
    return caught.value.reason


def test_bytes_go_in_and_come_out(lender: Lender) -> None:
    data = np.arange(PAGE, dtype=np.uint8)
    with lender.loan("alice") as loan:
        segment = loan.open(2 * PAGE)
        segment.write(100, data)
        out = np.zeros(PAGE, np.uint8)
        segment.read(100, out)
    assert np.array_equal(out, data)


def test_a_name_lasts_until_the_caller_has_mapped_it(lender: Lender, tmp_path: Path) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(1)
        assert [path.name for path in tmp_path.iterdir()] == [segment.name]
        loan.release_name(segment.id)
        assert list(tmp_path.iterdir()) == []


def test_every_byte_has_its_room_from_the_start(lender: Lender, tmp_path: Path) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(10 * PAGE)
        assert (tmp_path / segment.name).stat().st_blocks * 512 >= 10 * PAGE


def test_a_segment_that_is_not_mapped_cannot_be_used(lender: Lender) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(1)
        with pytest.raises(ServiceError) as caught, lender.borrow("alice", segment.id):
            pass
    assert reason_of(caught) is ErrorReason.UNKNOWN_SEGMENT


def test_nobody_elses_and_absent_read_the_same(lender: Lender) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(1)
        loan.release_name(segment.id)
        texts = []
        for principal, segment_id in (("bob", segment.id), ("alice", "0" * 32), ("alice", "")):
            with pytest.raises(ServiceError) as caught, lender.borrow(principal, segment_id):
                pass
            texts.append((reason_of(caught), caught.value.message, caught.value.details))
    assert texts[0] == texts[1] == texts[2]


def test_another_stream_of_the_same_caller_cannot_close_it(lender: Lender) -> None:
    with lender.loan("alice") as loan, lender.loan("alice") as other:
        segment = loan.open(1)
        other.close(segment.id)
        loan.release_name(segment.id)
        with pytest.raises(ServiceError):
            other.release_name(segment.id)
        with lender.borrow("alice", segment.id) as found:
            assert found is segment


def test_a_borrowed_segment_outlives_its_stream(lender: Lender) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(1)
        loan.release_name(segment.id)
        borrowed = lender.borrow("alice", segment.id)
        found = borrowed.__enter__()
    found.write(0, np.full(PAGE, 7, np.uint8))
    out = np.zeros(PAGE, np.uint8)
    found.read(0, out)
    borrowed.__exit__(None, None, None)
    assert out.min() == 7
    assert found.retain() is False


def test_a_closed_segment_counts_until_its_last_call_has_ended(lender: Lender) -> None:
    loan = lender.loan("alice")
    segment = loan.open(40 * PAGE)
    loan.release_name(segment.id)
    with lender.borrow("alice", segment.id) as borrowed:
        assert borrowed.retain()  # a thread that copies after its call was cancelled
        loan.end()
        assert lender.byte_count_of("alice") == 40 * PAGE
        with pytest.raises(ServiceError) as caught:
            lender.make("alice", 40 * PAGE)
        assert reason_of(caught) is ErrorReason.QUOTA_EXCEEDED
    assert lender.byte_count == 40 * PAGE
    borrowed.release()
    assert lender.byte_count == 0


def test_a_caller_has_no_more_than_his_share(lender: Lender) -> None:
    with lender.loan("alice") as loan, lender.loan("alice") as again, lender.loan("bob") as other:
        loan.open(40 * PAGE)
        with pytest.raises(ServiceError) as caught:
            again.open(25 * PAGE)
        again.open(24 * PAGE)
        other.open(64 * PAGE)
    assert reason_of(caught) is ErrorReason.QUOTA_EXCEEDED
    assert lender.byte_count == 0


def test_all_callers_together_have_no_more_than_the_total(lender: Lender) -> None:
    loans = [lender.loan(f"caller-{number}") for number in range(TOTAL_FACTOR + 1)]
    for loan in loans[:-1]:
        loan.open(64 * PAGE)
    with pytest.raises(ServiceError) as caught:
        loans[-1].open(1)
    assert reason_of(caught) is ErrorReason.QUOTA_EXCEEDED
    for loan in loans:
        loan.end()
    assert lender.byte_count == 0


def test_many_tiny_segments_are_refused(tmp_path: Path) -> None:
    lender = Lender(1 << 30, tmp_path)
    with lender.loan("alice") as loan:
        for _ in range(MAX_SEGMENTS):
            loan.open(1)
        with pytest.raises(ServiceError) as caught:
            loan.open(1)
    assert reason_of(caught) is ErrorReason.QUOTA_EXCEEDED


def test_callers_at_once_stay_within_the_limit(lender: Lender) -> None:
    loan = lender.loan("alice")
    opened: list[object] = []
    refused: list[ErrorReason] = []
    start = threading.Barrier(16)

    def open_one() -> None:
        start.wait()
        try:
            opened.append(loan.open(8 * PAGE))
        except ServiceError as error:
            refused.append(error.reason)

    threads = [threading.Thread(target=open_one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loan.end()
    assert (len(opened), refused) == (8, [ErrorReason.QUOTA_EXCEEDED] * 8)


@pytest.mark.parametrize("byte_count", [0, -1, -(1 << 63)])
def test_sizes_below_one_are_refused(lender: Lender, byte_count: int) -> None:
    with lender.loan("alice") as loan, pytest.raises(ServiceError) as caught:
        loan.open(byte_count)
    assert reason_of(caught) is ErrorReason.INVALID_ARGUMENT


def test_a_size_beyond_everything_is_refused(lender: Lender, tmp_path: Path) -> None:
    with lender.loan("alice") as loan, pytest.raises(ServiceError) as caught:
        loan.open((1 << 63) - 1)
    assert reason_of(caught) is ErrorReason.QUOTA_EXCEEDED
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = Lender(1 << 40, tmp_path)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with lender.loan("alice") as loan:
        before = descriptor_count()
        with pytest.raises(ServiceError) as too_large:  # more than half of what is free
            loan.open(1 << 39)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ServiceError) as too_full:  # somebody else was faster
            loan.open(PAGE)
        assert descriptor_count() == before
    assert (reason_of(too_large), reason_of(too_full)) == (ErrorReason.STORAGE_FULL,) * 2
    assert list(tmp_path.iterdir()) == []
    assert lender.byte_count == 0


def test_two_hundred_segments_leave_no_descriptor_and_no_name(lender: Lender, tmp_path: Path) -> None:
    before = descriptor_count()
    for number in range(200):
        with lender.loan("alice") as loan:
            segment = loan.open(PAGE)
            if number % 2:
                loan.release_name(segment.id)
            if number % 3:
                loan.close(segment.id)
    assert descriptor_count() == before
    assert list(tmp_path.iterdir()) == []
    assert lender.byte_count == 0


def test_a_segment_that_nobody_maps_goes(lender: Lender) -> None:
    with lender.loan("alice") as loan:
        waiting, ready = loan.open(PAGE), loan.open(PAGE)
        loan.release_name(ready.id)
        loan.expire(waiting.id)
        loan.expire(ready.id)
        assert lender.byte_count == PAGE


def test_a_mapped_segment_that_no_call_uses_goes(tmp_path: Path) -> None:
    now_s = 1000.0
    lender = Lender(64 * PAGE, tmp_path, clock=lambda: now_s)
    with lender.loan("alice") as loan:
        used, unused = loan.open(PAGE), loan.open(PAGE)
        loan.release_name(used.id)
        loan.release_name(unused.id)
        now_s += UNUSED_S - 1
        with lender.borrow("alice", used.id):
            pass
        assert loan.expire(unused.id) == 1
        now_s += 1
        assert loan.expire(unused.id) is None
        assert loan.expire(used.id) == UNUSED_S - 1
        with pytest.raises(ServiceError) as caught, lender.borrow("alice", unused.id):
            pass
        assert reason_of(caught) is ErrorReason.UNKNOWN_SEGMENT
        assert lender.byte_count == PAGE


def test_a_segment_in_a_long_call_stays(tmp_path: Path) -> None:
    now_s = 0.0
    lender = Lender(64 * PAGE, tmp_path, clock=lambda: now_s)
    with lender.loan("alice") as loan:
        segment = loan.open(PAGE)
        loan.release_name(segment.id)
        with lender.borrow("alice", segment.id):
            now_s += 10 * UNUSED_S
            assert loan.expire(segment.id) == UNUSED_S
        assert loan.expire(segment.id) == UNUSED_S


def test_what_is_opened_after_the_end_goes_at_once(lender: Lender, tmp_path: Path) -> None:
    loan = lender.loan("alice")
    loan.end()
    loan.open(PAGE)
    assert lender.byte_count == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_made_shorter_is_an_error_and_no_signal(lender: Lender, tmp_path: Path) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(4 * PAGE)
        os.truncate(tmp_path / segment.name, PAGE)
        with pytest.raises(ServiceError) as reading:
            segment.read(0, np.zeros(4 * PAGE, np.uint8))
        with pytest.raises(ServiceError) as writing:
            segment.write(2 * PAGE, np.zeros(PAGE, np.uint8))
    assert (reason_of(reading), reason_of(writing)) == (ErrorReason.INVALID_ARGUMENT,) * 2


def test_one_writer_at_a_time(lender: Lender) -> None:
    with lender.loan("alice") as loan:
        segment = loan.open(PAGE)
        assert (segment.claim(), segment.claim()) == (True, False)
        segment.unclaim()
        assert segment.claim()


def test_without_a_folder_or_a_limit_nothing_is_lent(tmp_path: Path) -> None:
    assert open_lender(0, tmp_path) is None
    assert open_lender(1, tmp_path / "nowhere") is None
    assert open_lender(1, tmp_path) is not None
