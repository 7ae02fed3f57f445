"""Schedule of an open loop: due times of calls at a fixed rate, independent of the server."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

POISSON, FIXED = "poisson", "fixed"
_SWEEP_POINTS = 6
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(x?)"
_ONE, _RANGE = re.compile(_NUMBER), re.compile(rf"{_NUMBER}\.\.{_NUMBER}")


class Clock(Protocol):
    """Time and sleep; tests pass a fake one."""

    def now(self) -> float:
        """Return the present moment, in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class MachineClock:
    """The clock shared by all processes of a machine."""

    def now(self) -> float:
        """Return the present moment, in seconds since some moment that is the same for all processes."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Rate:
    """One rate of an open loop."""

    value: float
    """Calls per second; or a multiple, where `is_multiple`."""
    is_multiple: bool = False
    """Whether it counts in what a closed loop reached just before."""

    def per_second(self, capacity: float) -> float:
        """Return it in calls per second, given the closed loop's `capacity`."""
        return self.value * capacity if self.is_multiple else self.value


def parse_rates(text: str) -> list[Rate]:
    """Read `50`, `10,20,50`, `0.5x` or `0.5x..3x`; a range stands for six rates at equal distances.

    Raises:
        ValueError: It is none of these, or a rate is 0; the message says so.
    """
    rates: list[Rate] = []
    for part in text.replace(" ", "").split(","):
        rates += _parse(part)
    if any(rate.value <= 0 for rate in rates):
        raise ValueError(f"{text!r} has a rate that is not positive")
    return rates


def _parse(part: str) -> list[Rate]:
    if match := _RANGE.fullmatch(part):
        low, low_unit, high, high_unit = match.groups()
        if low_unit == high_unit and float(low) < float(high):
            values = np.linspace(float(low), float(high), _SWEEP_POINTS)
            return [Rate(float(value), bool(low_unit)) for value in values]
    elif match := _ONE.fullmatch(part):
        return [Rate(float(match[1]), bool(match[2]))]
    raise ValueError(f"{part!r} is not a rate; write for example 50, 10,20,50, 0.5x or 0.5x..3x")


def arrivals(rate: float, duration_s: float, kind: str, seed: int) -> list[float]:
    """Return due times of calls, in seconds from the start, ascending; at least one.

    Args:
        rate: Calls per second.
        duration_s: No call is due later.
        kind: `POISSON` for gaps that are independent and exponentially distributed, as those of many
            independent callers; `FIXED` for equal gaps.
        seed: Of the gaps.
    """
    if kind == FIXED:
        return [index / rate for index in range(max(int(duration_s * rate), 1))]
    random = np.random.default_rng(seed)
    due: list[float] = [0.0]
    while (later := due[-1] + float(random.exponential(1 / rate))) < duration_s:
        due.append(later)
    return due


def dispatch(due: Sequence[float], start_s: float, submit: Callable[[float], object], clock: Clock) -> None:
    """Submit one call at each moment, never waiting for an earlier one.

    A late call does not delay those after it: if the machine fell behind, all due calls are made at once.

    Args:
        due: Ascending, in seconds from the start.
        start_s: The start, on the clock.
        submit: Called with the due time of the call, on the clock; returns without waiting for it.
        clock: The clock.
    """
    for offset in due:
        if (wait := start_s + offset - clock.now()) > 0:
            clock.sleep(wait)
        submit(start_s + offset)
