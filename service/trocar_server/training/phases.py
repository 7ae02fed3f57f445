"""Phases of trainers and fits: every state, every event, and what follows, as tables.

    fit = Machine(FIT, FitPhase.RUNNING)
    fit.send(FitSignal.PAUSE)         # Effect.RECORD; fit.phase is FitPhase.PAUSED

A machine is the only writer of its phase. `as_markdown` gives the tables of the documentation.
"""

from collections.abc import Mapping
from enum import StrEnum, unique
from typing import Generic, TypeVar


@unique
class Effect(StrEnum):
    """What a change of phase asks of its owner."""

    NOTHING = ""
    RECORD = "record the pause, tell it"
    """Write it into the trainer's record, and tell it as an event."""
    SAVE = "save"
    """Save a checkpoint once the current unit of work has ended."""


@unique
class FitPhase(StrEnum):
    """Phase of a fit in this server."""

    RUNNING = "running"
    PAUSED = "paused"
    """By its user; a restart keeps this."""
    HELD = "held"
    """By a draining server."""
    PAUSED_AND_HELD = "paused, held"
    CANCELLED = "cancelled"
    """The current unit is its last."""
    STOPPING = "stopping"
    """The server stops; the next start resumes it."""
    STOPPING_PAUSED = "stopping, paused"
    OVER = "over"


@unique
class FitSignal(StrEnum):
    """What may happen to a fit."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    HOLD = "drain"
    RELEASE = "undrain"
    STOP = "shutdown"
    END = "end"
    """The last unit has run, the fit has failed, or another server has taken it over."""


@unique
class TrainerPhase(StrEnum):
    """Phase of a trainer in this server."""

    READY = "ready"
    FITTING = "fitting"
    """A fit is active; no other call may change the weights."""
    PAUSED = "paused"
    """As `FITTING`; its user paused the fit."""
    CLOSED = "closed"
    """Closed by its owner, expired, or taken over by another server."""


@unique
class TrainerSignal(StrEnum):
    """What may happen to a trainer."""

    BEGIN_FIT = "fit begins"
    PAUSE_FIT = "fit is paused"
    RESUME_FIT = "fit is resumed"
    END_FIT = "fit ends"
    CLOSE = "close, expiry, takeover"


@unique
class FitsPhase(StrEnum):
    """Phase of all fits of a server."""

    OPEN = "open"
    HOLDING = "holding"
    """Fits that begin are held."""
    STOPPED = "stopped"
    """No fit begins or is resumed."""


@unique
class FitsSignal(StrEnum):
    """What may happen to all fits of a server."""

    HOLD = "drain"
    RELEASE = "undrain"
    STOP = "shutdown"


Phase = TypeVar("Phase", bound=StrEnum)
Signal = TypeVar("Signal", bound=StrEnum)
Table = Mapping[tuple[Phase, Signal], tuple[Phase, Effect]]
"""By phase and signal: the phase that follows, and what it asks of the owner."""

_SAVE, _RECORD = Effect.SAVE, Effect.RECORD


def _table(
    phases: type[Phase],
    signals: type[Signal],
    changes: Mapping[Phase, Mapping[Signal, Phase | tuple[Phase, Effect]]],
) -> Table[Phase, Signal]:
    """Return a table; a signal that is not given for a phase changes nothing."""
    table: dict[tuple[Phase, Signal], tuple[Phase, Effect]] = {}
    for phase in phases:
        for signal in signals:
            given = changes.get(phase, {}).get(signal, phase)
            table[phase, signal] = given if isinstance(given, tuple) else (given, Effect.NOTHING)
    return table


_F, _S = FitPhase, FitSignal
FIT: Table[FitPhase, FitSignal] = _table(
    FitPhase,
    FitSignal,
    {
        _F.RUNNING: {
            _S.PAUSE: (_F.PAUSED, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.HOLD: (_F.HELD, _SAVE),
            _S.STOP: (_F.STOPPING, _SAVE),
            _S.END: _F.OVER,
        },
        _F.PAUSED: {
            _S.RESUME: (_F.RUNNING, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.HOLD: (_F.PAUSED_AND_HELD, _SAVE),
            _S.STOP: (_F.STOPPING_PAUSED, _SAVE),
            _S.END: _F.OVER,
        },
        _F.HELD: {
            _S.PAUSE: (_F.PAUSED_AND_HELD, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.HOLD: (_F.HELD, _SAVE),  # again, if it could not be saved before
            _S.RELEASE: _F.RUNNING,
            _S.STOP: (_F.STOPPING, _SAVE),
            _S.END: _F.OVER,
        },
        _F.PAUSED_AND_HELD: {
            _S.RESUME: (_F.HELD, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.HOLD: (_F.PAUSED_AND_HELD, _SAVE),
            _S.RELEASE: _F.PAUSED,
            _S.STOP: (_F.STOPPING_PAUSED, _SAVE),
            _S.END: _F.OVER,
        },
        # Even if the server stops, too: a cancellation may be acknowledged.
        _F.CANCELLED: {_S.STOP: (_F.CANCELLED, _SAVE), _S.END: _F.OVER},
        _F.STOPPING: {
            _S.PAUSE: (_F.STOPPING_PAUSED, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.END: _F.OVER,
        },
        _F.STOPPING_PAUSED: {
            _S.RESUME: (_F.STOPPING, _RECORD),
            _S.CANCEL: _F.CANCELLED,
            _S.END: _F.OVER,
        },
    },
)
_T, _G = TrainerPhase, TrainerSignal
TRAINER: Table[TrainerPhase, TrainerSignal] = _table(
    TrainerPhase,
    TrainerSignal,
    {
        _T.READY: {_G.BEGIN_FIT: _T.FITTING, _G.CLOSE: _T.CLOSED},
        _T.FITTING: {_G.PAUSE_FIT: _T.PAUSED, _G.END_FIT: _T.READY, _G.CLOSE: _T.CLOSED},
        _T.PAUSED: {_G.RESUME_FIT: _T.FITTING, _G.END_FIT: _T.READY, _G.CLOSE: _T.CLOSED},
    },
)
FITS: Table[FitsPhase, FitsSignal] = _table(
    FitsPhase,
    FitsSignal,
    {
        FitsPhase.OPEN: {FitsSignal.HOLD: FitsPhase.HOLDING, FitsSignal.STOP: FitsPhase.STOPPED},
        FitsPhase.HOLDING: {FitsSignal.RELEASE: FitsPhase.OPEN, FitsSignal.STOP: FitsPhase.STOPPED},
    },
)

WAITING = frozenset({FitPhase.PAUSED, FitPhase.HELD, FitPhase.PAUSED_AND_HELD})
"""A fit does no further unit of work, and waits."""
PAUSED = frozenset({FitPhase.PAUSED, FitPhase.PAUSED_AND_HELD, FitPhase.STOPPING_PAUSED})
"""Its user has paused a fit."""
HELD = frozenset({FitPhase.HELD, FitPhase.PAUSED_AND_HELD})
"""A draining server holds a fit."""
STOPPING = frozenset({FitPhase.STOPPING, FitPhase.STOPPING_PAUSED})
"""A fit ends here without an event, and goes on at the next start."""
ENDING = frozenset({FitPhase.CANCELLED, FitPhase.OVER})
"""A fit ends, or has ended."""
TOLD: Mapping[FitSignal, TrainerSignal] = {
    FitSignal.PAUSE: TrainerSignal.PAUSE_FIT,
    FitSignal.RESUME: TrainerSignal.RESUME_FIT,
}
"""What a recorded change of a fit is to its trainer. Its end comes when its resources are released."""


class Machine(Generic[Phase, Signal]):
    """A phase, changed by signals alone.

    Args:
        table: What follows.
        phase: The first one.
    """

    __slots__ = ("_table", "phase")

    def __init__(self, table: Table[Phase, Signal], phase: Phase) -> None:
        self._table = table
        self.phase = phase
        """The current one; nothing but `send` writes it."""

    def send(self, signal: Signal) -> Effect:
        """Change the phase as the table says, and return what that asks of the owner."""
        self.phase, effect = self._table[self.phase, signal]
        return effect


def as_markdown(table: Table[Phase, Signal]) -> str:
    """Return a table for people: a row for each phase, a column for each signal; `-`: nothing changes."""
    phases, signals = (list(dict.fromkeys(part)) for part in zip(*table, strict=True))
    lines = [
        "| | " + " | ".join(f"*{signal}*" for signal in signals) + " |",
        "|---" * (len(signals) + 1) + "|",
    ]
    for phase in phases:
        cells = [_cell(phase, *table[phase, signal]) for signal in signals]
        lines.append(f"| **{phase}** | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(phase: StrEnum, following: StrEnum, effect: Effect) -> str:
    if following is phase and effect is Effect.NOTHING:
        return "-"
    return f"{following}; {effect}" if effect else str(following)
