"""Counts over all trainers of a process: they only grow."""

from trocar_server.spool.report import Report
from trocar_server.training.step.totals import Totals


def test_steps_add_up() -> None:
    totals = Totals()
    totals.stepped(4, 0.5)
    totals.stepped(2, 0.25)
    assert (totals.step_count, totals.row_count, totals.compute_s) == (2, 6, 0.75)


def test_spools_are_counted_as_they_go_on_and_when_they_are_gone() -> None:
    totals, one, other = Totals(), Report(), Report(written_bytes=5)
    totals.begin_spool(one)
    totals.begin_spool(other)
    one.written_bytes, one.read_bytes = 10, 3
    one.stalled(0.5)
    assert totals.spooled() == (15, 3, 0.5)
    totals.end_spool(one)
    assert totals.spooled() == (15, 3, 0.5)
    one.written_bytes = 100  # it is closed: whatever it counts now is nobody's
    other.read_bytes = 1
    assert totals.spooled() == (15, 4, 0.5)


def test_a_spool_that_ends_twice_counts_once() -> None:
    totals, report = Totals(), Report(written_bytes=7)
    totals.begin_spool(report)
    totals.end_spool(report)
    totals.end_spool(report)
    assert totals.spooled() == (7, 0, 0.0)


def test_equal_reports_are_not_mixed_up() -> None:
    totals, one, other = Totals(), Report(), Report()
    totals.begin_spool(one)
    totals.begin_spool(other)
    totals.end_spool(other)
    one.written_bytes = 9
    assert totals.spooled()[0] == 9
