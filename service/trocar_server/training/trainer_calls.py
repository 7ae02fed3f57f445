"""What calls of a trainer are, and what they give."""

from dataclasses import dataclass
from enum import StrEnum, unique

from trocar_server.training.step_result import EvalResult, StepResult


@unique
class TrainerActivity(StrEnum):
    """What a trainer does."""

    READY = "ready"
    FITTING = "fitting"
    PAUSED = "paused"
    BROKEN = "broken"


@unique
class Kind(StrEnum):
    """Numbered calls."""

    STEP = "a step"
    FORWARD_BACKWARD = "a forward and backward pass"
    OPTIMIZER_STEP = "an optimizer step"


@dataclass(frozen=True)
class Applied:
    """What became of a numbered call."""

    number: int
    result: StepResult
    update_count: int
    """Updates of the weights by then."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation gave."""

    result: EvalResult
    correct_count: int | None
    """Right predictions, where there are class indices to compare with."""
