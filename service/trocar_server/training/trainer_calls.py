"""Trainer calls: kinds and results."""

from dataclasses import dataclass
from enum import StrEnum, unique

from trocar_server.training.step.prediction_count import PredictionCount
from trocar_server.training.step.step_result import EvalResult, StepResult


@unique
class CallKind(StrEnum):
    """Kinds of numbered calls."""

    STEP = "a step"
    FORWARD_BACKWARD = "a forward and backward pass"
    OPTIMIZER_STEP = "an optimizer step"


@dataclass(frozen=True)
class Applied:
    """Result of a numbered call."""

    number: int
    result: StepResult
    update_count: int
    """Weight updates so far, this call included."""


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation."""

    result: EvalResult
    predictions: PredictionCount | None
    """Its predictions; None without class indices to compare with."""
