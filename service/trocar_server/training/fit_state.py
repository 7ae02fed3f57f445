"""Where a fit is, as JSON; with the trainer's own state all that it takes to go on bit-equal.

text = json.dumps(fit.state().to_json())
state = FitState.from_json(json.loads(text))
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.events import plain

HISTORY = 1000
"""Epochs that a state remembers; events tell of all."""

Phase = Literal["train", "evaluate", "finished"]


@dataclass(frozen=True)
class FitState:
    """A fit at rest between two units of work. An evaluation that was interrupted begins anew."""

    phase: Phase = "train"
    """What comes next."""
    epoch: int = 0
    """Which epoch, from 0."""
    batch: int = 0
    """Batches of this epoch that are done."""
    step: int = 0
    """Batches of the whole fit that are done."""
    update: int = 0
    """Updates of the weights in the whole fit."""
    event: int = 0
    """Number of the next event."""
    loss_sum: float = 0.0
    """Over the samples of this epoch."""
    sample_sum: int = 0
    """Samples in that."""
    best: float | None = None
    """Best value of the early stop's metric."""
    bad_count: int = 0
    """Evaluations in a row that were not better."""
    checkpoint_update: int = -1
    """Updates at the last checkpoint; -1 when there is none yet."""
    ended: str = ""
    """Why it is finished."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The last `HISTORY` epochs: loss, learning rates, and what the evaluation told."""

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FitState":
        """Return what `to_json` made.

        Raises:
            ServiceError: `CHECKPOINT_CORRUPT`, it did not make this.
        """
        try:
            numbers = {name: values[name] for name in ("loss_sum", "best")}
            read = {name: None if value is None else float(value) for name, value in numbers.items()}
            return cls(**{**values, **read, "history": tuple(values["history"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceError(
                ErrorReason.CHECKPOINT_CORRUPT,
                f"the state of the fit cannot be read ({type(error).__name__}); start it anew",
            ) from None
