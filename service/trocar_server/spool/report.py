"""Spool report: counters, and a table of them."""

from dataclasses import dataclass, field, fields

_MIB = 1 << 20
_MOST_NOTES = 32


@dataclass
class Report:
    """Counters of a spool so far; `print(report)` shows them as a table.

    Attributes:
        saved_bytes: Of all tensors that autograd saved, each time counted.
        unique_bytes: Of their blocks, each once.
        kept_bytes: Of what always stays: parameters, small tensors, kinds that cannot be written.
        offloaded_bytes: Of blocks that were copied from other devices to host memory.
        written_bytes: To disk.
        read_bytes: From disk.
        lossy_bytes: Of blocks that were stored with less precision, before they were: gradients are not
            exact.
        packed_bytes: Of blocks of booleans that were stored as bits, before they were.
        peak_bytes: The most that blocks took in memory at once, those read ahead included.
        disk_peak_bytes: The most that files took at once.
        stall_count: How often forward or backward waited for the disk.
        stall_s: How long, in seconds.
        file_count: The most files at once.
        step_count: How often the context was entered.
        notes: Notes for the user: options that cost precision, a filesystem without direct I/O,
            faults.
    """

    saved_bytes: int = 0
    unique_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    lossy_bytes: int = 0
    packed_bytes: int = 0
    peak_bytes: int = 0
    disk_peak_bytes: int = 0
    stall_count: int = 0
    stall_s: float = 0.0
    file_count: int = 0
    step_count: int = 0
    notes: list[str] = field(default_factory=list)

    def stalled(self, seconds: float) -> None:
        """Count a time that forward or backward waited for the disk."""
        self.stall_count += 1
        self.stall_s += seconds

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(text)

    def __str__(self) -> str:
        rows = [(_label(entry.name), _value(entry.name, getattr(self, entry.name))) for entry in fields(self)]
        shown = [(label, value) for label, value in rows if label != "notes"]
        width = max(len(label) for label, _ in shown)
        size = max(len(value) for _, value in shown)
        lines = [f"{label:<{width}}  {value:>{size}}" for label, value in shown]
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])


def _label(name: str) -> str:
    """Return the words for a field: the unit goes to the value."""
    base, _, unit = name.rpartition("_")
    words = {"count": f"{base}s", "bytes": base, "s": f"{base} time"}.get(unit, name)
    return words.replace("_", " ")


def _value(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / _MIB:,.1f} MiB"
    return f"{value:,.3f} s" if name.endswith("_s") else f"{value:,}" if name != "notes" else ""
