"""Clocks that only move when they are told to."""

from dataclasses import dataclass, field


@dataclass
class FakeClock:
    """Time passes when somebody waits, or where `pass_` says so."""

    time_s: float = 0.0
    waits: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time_s += seconds

    def pass_(self, seconds: float) -> None:
        self.time_s += seconds
