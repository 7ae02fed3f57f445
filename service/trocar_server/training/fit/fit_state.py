"""Fit state: a fit's position, as JSON. With the trainer's own state, enough to resume bit-equal.

text = json.dumps(fit.state().to_json())
state = FitState.from_json(json.loads(text))
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.fit.events import plain

HISTORY = 1000
"""The most epochs in the history of a state; events cover all."""

Phase = Literal["train", "evaluate", "finished"]


@dataclass(frozen=True)
class FitState:
    """State of a fit between two units of work. An interrupted evaluation starts again."""

    phase: Phase = "train"
    """The next phase."""
    epoch: int = 0
    """The current epoch, from 0."""
    batch: int = 0
    """Batches done in this epoch."""
    step: int = 0
    """Batches done over all epochs."""
    update: int = 0
    """Weight updates over all epochs."""
    event: int = 0
    """Number of the next event."""
    loss_sum: float = 0.0
    """Sum of losses over the samples of this epoch."""
    sample_sum: int = 0
    """Samples in that sum."""
    best: float | None = None
    """Best value of the early stop's metric."""
    bad_count: int = 0
    """Evaluations in a row that were not better."""
    checkpoint_update: int = -1
    """Update count at the last checkpoint; -1 without one."""
    ended: str = ""
    """Why it has ended; empty before."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The last `HISTORY` epochs: loss, learning rates and evaluation results."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FitState":
        """Parse the result of `to_json`.

        Raises:
            ServiceError: `CHECKPOINT_CORRUPT`, it is malformed.
        """
        try:
            numbers = {name: values[name] for name in ("loss_sum", "best")}
            read = {name: None if value is None else float(value) for name, value in numbers.items()}
            return cls(**{**values, **read, "history": tuple(values["history"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceError(
                ErrorReason.CHECKPOINT_CORRUPT,
                f"the state of the fit cannot be read ({type(error).__name__}); start a new fit",
            ) from None
