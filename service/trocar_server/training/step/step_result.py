"""Step and evaluation results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """Result of a step, or of a half step.

    Attributes:
        loss: The loss of the batch, regularisers included, before it is divided for accumulation; NaN for an
            update alone.
        terms: Its terms by name, before their weights.
        learning_rates: Rates of the parameter groups, as used by the update or, without one, by the next.
        gradient_norm: The Euclidean norm of all gradients that were accumulated so far, after the rules and
            before `clip_norm`; NaN if gradients are freed during the pass.
        changed: How many elements each gradient edit changed, by its position.
        is_update: Whether weights were changed.
        is_skipped: Whether the loss or a gradient was not finite and the batch was rolled back.
        sample_count: Samples of the batch.
        compute_s: Seconds.
        saved_bytes: Bytes that the spool received from autograd; 0 without one.
        written_bytes: Bytes that it wrote to disk.
    """

    loss: float
    terms: Mapping[str, float] = field(default_factory=dict)
    learning_rates: Sequence[float] = ()
    gradient_norm: float = float("nan")
    changed: Mapping[int, int] = field(default_factory=dict)
    is_update: bool = False
    is_skipped: bool = False
    sample_count: int = 0
    compute_s: float = 0.0
    saved_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, eq=False)
class EvalResult:
    """Result of an evaluation of one batch.

    Attributes:
        loss: The loss, without regularisers.
        terms: Its terms by name, before their weights.
        output: The model's main output, (batch, ...), on the model's device; None if every loss has a
            selector.
        sample_count: Samples of the batch.
        compute_s: Seconds.
    """

    loss: float
    terms: Mapping[str, float]
    output: Tensor | None
    sample_count: int = 0
    compute_s: float = 0.0
