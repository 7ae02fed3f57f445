"""Process-wide training totals: monotonic counters for monitoring."""

from dataclasses import dataclass, field
from threading import Lock

from trocar_server.spool.report import Report


@dataclass
class Totals:
    """Monotonic counters, including closed trainers.

    Attributes:
        step_count: Batches processed in fits and calls, without skipped ones.
        row_count: Samples in these batches.
        compute_s: Compute seconds of these batches.
    """

    step_count: int = 0
    row_count: int = 0
    compute_s: float = 0.0
    _reports: list[Report] = field(default_factory=list)
    _gone: Report = field(default_factory=Report)
    _lock: Lock = field(default_factory=Lock)  # a scrape must count each spool exactly once

    def stepped(self, row_count: int, compute_s: float) -> None:
        """Count a batch."""
        self.step_count += 1
        self.row_count += row_count
        self.compute_s += compute_s

    def begin_spool(self, report: Report) -> None:
        """Include the running report of a spool."""
        with self._lock:
            self._reports.append(report)

    def end_spool(self, report: Report) -> None:
        """Keep the sums of a closed spool; has no effect for an unknown one."""
        with self._lock:
            if not any(known is report for known in self._reports):
                return
            self._gone.written_bytes += report.written_bytes
            self._gone.read_bytes += report.read_bytes
            self._gone.stall_s += report.stall_s
            self._reports = [known for known in self._reports if known is not report]

    def spooled(self) -> tuple[int, int, float]:
        """Return the bytes that all spools have written and read, and the seconds that steps waited."""
        with self._lock:
            reports = [self._gone, *self._reports]
            return (
                sum(report.written_bytes for report in reports),
                sum(report.read_bytes for report in reports),
                sum(report.stall_s for report in reports),
            )


TOTALS = Totals()
"""Of this process."""
