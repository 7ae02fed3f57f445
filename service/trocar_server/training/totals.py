"""What the trainers of this process have done since it began: plain counters, for whoever watches it."""

from dataclasses import dataclass, field
from threading import Lock

from trocar_server.spool.report import Report


@dataclass
class Totals:
    """Counts that only grow, over trainers that are gone, too.

    Attributes:
        step_count: Batches taken, in fits and calls; those that were skipped are not among them.
        row_count: Samples of these.
        compute_s: Seconds of these.
    """

    step_count: int = 0
    row_count: int = 0
    compute_s: float = 0.0
    _reports: list[Report] = field(default_factory=list)
    _gone: Report = field(default_factory=Report)
    _lock: Lock = field(default_factory=Lock)  # a scrape must not see a spool twice or not at all

    def stepped(self, row_count: int, compute_s: float) -> None:
        """Count a batch."""
        self.step_count += 1
        self.row_count += row_count
        self.compute_s += compute_s

    def begin_spool(self, report: Report) -> None:
        """Count what a spool reports, as it goes on."""
        with self._lock:
            self._reports.append(report)

    def end_spool(self, report: Report) -> None:
        """Keep the sums of a spool that is closed; nothing happens for one that is not known."""
        with self._lock:
            if not any(known is report for known in self._reports):
                return
            self._gone.written_bytes += report.written_bytes
            self._gone.read_bytes += report.read_bytes
            self._gone.stall_s += report.stall_s
            self._reports = [known for known in self._reports if known is not report]

    def spooled(self) -> tuple[int, int, float]:
        """Return the bytes that all spools have written and read, and the seconds in which steps waited."""
        with self._lock:
            reports = [self._gone, *self._reports]
            return (
                sum(report.written_bytes for report in reports),
                sum(report.read_bytes for report in reports),
                sum(report.stall_s for report in reports),
            )


TOTALS = Totals()
"""Of this process."""
