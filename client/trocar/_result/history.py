"""History: the events of a fit, with tables, plots and logs of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from google.protobuf.json_format import MessageToDict

from trocar._base.replacement import write_file
from trocar._base.tables import MOST_ROWS, first_lines, html_table, number_text
from trocar._base.text_tables import text_table
from trocar.errors import EXCEPTIONS, TrainerError
from trocar_api.reasons import ErrorReason

if TYPE_CHECKING:
    import os
    from typing import Self

    from matplotlib.figure import Figure

    from trocar.errors import TrocarError
    from trocar_api.v1 import fit_pb2 as pb

LAST_KINDS = frozenset({"finished", "failed", "cancelled"})
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclass(frozen=True)
class FitEvent:
    """Event of a fit."""

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
        """Return a fact, or the default."""
        return self.facts.get(name, default)

    def to_json(self) -> str:
        """Return one line of JSON; non-finite numbers are text, as in protobuf's JSON."""
        own = {"number": self.number, "kind": self.kind, "time_s": self.time_s}
        return json.dumps(_strict({**self.facts, **own}), allow_nan=False)


def fit_event(message: pb.FitEvent) -> FitEvent:
    """Convert an event; whole numbers become ints."""
    facts = {name: _plain(value) for name, value in MessageToDict(message.facts).items()}
    return FitEvent(message.number, message.kind, message.time_s, facts)


def event_from_json(line: str) -> FitEvent:
    """Load an event written by `FitEvent.to_json`.

    Raises:
        ValueError: It is not an event.
    """
    try:
        facts = {name: _plain(value) for name, value in json.loads(line).items()}
        number, kind, time_s = (facts.pop(name) for name in ("number", "kind", "time_s"))
        if type(number) is int and isinstance(kind, str) and isinstance(time_s, int | float):
            return FitEvent(number, kind, float(time_s), facts)
    except (ValueError, AttributeError, KeyError, RecursionError):
        pass
    raise ValueError("it is not an event of a fit")


def failure(event: FitEvent) -> TrocarError:
    """Return the exception for a fit that failed."""
    reason = ErrorReason.__members__.get(str(event.get("reason")))
    kind = TrainerError if reason is None else EXCEPTIONS[reason]
    return kind(str(event.get("message") or "the fit failed"))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(word for word, meant in _WORDS.items() if meant == value or math.isnan(meant))
    return value


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

    history.losses                                   # of every step
    history.best("accuracy")["epoch"]
    history.save("fit.jsonl")
    history.plot().savefig("fit.png")
    """

    def __init__(self, events: Sequence[FitEvent] = ()) -> None:
        self._events = list(events)

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> FitEvent: ...

    @overload
    def __getitem__(self, index: slice) -> History: ...

    def __getitem__(self, index: int | slice) -> FitEvent | History:
        result = self._events[index]
        return History(result) if isinstance(result, list) else result

    def __eq__(self, other: object) -> bool:
        return self._events == other._events if isinstance(other, History) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # events are added

    def __iter__(self) -> Iterator[FitEvent]:
        return iter(self._events)

    def __repr__(self) -> str:
        return f"History({len(self.losses)} steps, {len(self.evaluations)} evaluations, {self.outcome})"

    def __str__(self) -> str:
        head, rows = self._table()
        return "\n".join([first_lines(text_table(head, rows, head), MOST_ROWS), repr(self)])

    def _repr_html_(self) -> str:
        """Show a row for each epoch in a notebook: its loss, and its evaluation."""
        head, rows = self._table()
        return html_table(head, rows, repr(self))

    def _table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        result: dict[int, dict[str, str]] = {}
        for event in self.of_kind("epoch"):
            loss = event.get("loss")
            result.setdefault(event["epoch"], {})["loss"] = "" if loss is None else number_text(float(loss))
        for event in self.evaluations:
            named = {f"eval {name}": number_text(value) for name, value in numbers(event)}
            result.setdefault(event["epoch"], {}).update(named)
        titles = dict.fromkeys(title for row in result.values() for title in row)
        rows = [[str(epoch + 1), *(row.get(title, "") for title in titles)] for epoch, row in result.items()]
        return ("epoch", *titles), rows

    def add(self, event: FitEvent) -> None:
        """Add an event."""
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

    def best(self, metric: str = "loss", *, higher_is_better: bool | None = None) -> FitEvent:
        """Return the best evaluation, the first if there are several.

        Args:
            metric: "loss", or the name of a metric that is one number.
            higher_is_better: Whether larger is better; when None, for everything except the loss.

        Raises:
            ValueError: No evaluation has such a number.
        """
        result = [(event, dict(numbers(event)).get(metric, math.nan)) for event in self.evaluations]
        result = [(event, value) for event, value in result if not math.isnan(value)]
        if not result:
            names = sorted({name for event in self.evaluations for name, _ in numbers(event)})
            raise ValueError(
                f"no evaluation has a number {metric!r}; available: {', '.join(names) or 'none'}"
            )
        is_higher = metric != "loss" if higher_is_better is None else higher_is_better
        return (max if is_higher else min)(result, key=lambda entry: entry[1])[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events as JSON lines, which `load` reads."""
        lines = "".join(event.to_json() + "\n" for event in self._events)
        write_file(Path(path), lines)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a file written by `save`.

        Raises:
            ValueError: A line is not an event.
        """
        events = []
        for position, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                events.append(event_from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {position}: {error}") from None
        return cls(events)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write a TensorBoard log: loss, rates and gradient norm by step, evaluations by epoch.

        Raises:
            ImportError: tensorboardX is missing: pip install "trocar[tensorboard]".
        """
        from trocar._result.history_tensorboard import write  # needs tensorboardX, which is an extra

        write(self, folder)

    def plot(self) -> Figure:
        """Return a matplotlib figure: the loss of the steps, and the evaluations.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._result.history_plot import draw  # needs matplotlib, which is an extra

        return draw(self)


def numbers(event: FitEvent) -> list[tuple[str, float]]:
    """Return the loss of an evaluation, and the metrics that are one number."""
    result = {"loss": event.get("loss"), **(event.get("metrics") or {})}
    return [(name, float(value)) for name, value in result.items() if isinstance(value, int | float)]
