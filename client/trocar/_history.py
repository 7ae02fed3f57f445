"""What happened in a fit: events, and what to do with them afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure

    from trocar_api.v1 import fit_pb2 as pb

LAST_KINDS = frozenset({"finished", "failed", "cancelled"})
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class FitEvent:
    """One thing that happened in a fit."""

    number: int
    """Counts up by one over all fits of the trainer."""
    kind: str
    """`started`, `cache`, `step`, `epoch`, `evaluation`, `checkpoint`, `paused`, `resumed`, `finished`,
    `failed` or `cancelled`."""
    time_s: float
    """When, in seconds since 1970."""
    facts: Mapping[str, Any]
    """What there is to tell: step, epoch, loss, metrics, learning_rates, gradient_norm, ..."""

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a fact, or the default where there is none."""
        return self.facts.get(name, default)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"number": self.number, "kind": self.kind, "time_s": self.time_s, **self.facts})


def fit_event(message: pb.FitEvent) -> FitEvent:
    """Convert an event; whole numbers become ints."""
    facts = {name: _plain(value) for name, value in MessageToDict(message.facts).items()}
    return FitEvent(message.number, message.kind, message.time_s, facts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return _WORDS.get(value, value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


class History(Sequence[FitEvent]):
    """The events of a fit, in order.

    history.losses                     # of every step
    history.evaluations[-1]["metrics"]["accuracy"]
    history.plot().savefig("fit.png")
    """

    def __init__(self, events: Sequence[FitEvent] = ()) -> None:
        self._events = list(events)

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __iter__(self) -> Iterator[FitEvent]:
        return iter(self._events)

    def __repr__(self) -> str:
        return f"History({len(self.losses)} steps, {len(self.evaluations)} evaluations, {self.outcome})"

    def add(self, event: FitEvent) -> None:
        """Take an event in."""
        self._events.append(event)

    def of_kind(self, kind: str) -> list[FitEvent]:
        """Return the events of one kind."""
        return [event for event in self._events if event.kind == kind]

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [float(event["loss"]) for event in self.of_kind("step")]

    @property
    def evaluations(self) -> list[FitEvent]:
        """One event for each evaluation."""
        return self.of_kind("evaluation")

    @property
    def outcome(self) -> str:
        """`finished`, `failed` or `cancelled`; `running` while it is none of them."""
        is_over = bool(self._events) and self._events[-1].kind in LAST_KINDS
        return self._events[-1].kind if is_over else "running"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events as JSON lines."""
        lines = "".join(event.to_json() + "\n" for event in self._events)
        Path(path).write_text(lines, encoding="utf-8")

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write a TensorBoard log: loss, rates and gradient norm by step, evaluations by epoch.

        Raises:
            ImportError: tensorboardX is missing: pip install "trocar[tensorboard]".
        """
        from trocar._history_tensorboard import write  # needs tensorboardX, which is an extra

        write(self, folder)

    def plot(self) -> Figure:
        """Return a matplotlib figure: the loss of the steps, and what evaluations gave.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._history_plot import draw  # needs matplotlib, which is an extra

        return draw(self)


def numbers(event: FitEvent) -> list[tuple[str, float]]:
    """Return the metrics of an evaluation that are one number."""
    found = event.get("metrics") or {}
    return [(name, float(value)) for name, value in found.items() if isinstance(value, int | float)]
