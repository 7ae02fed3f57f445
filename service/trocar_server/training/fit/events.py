"""Fit events: numbered from 0, without gaps.

FitEvent(number=7, kind="step", step=8, epoch=0, loss=1.25).to_json()
# {"number": 7, "kind": "step", "step": 8, "epoch": 0, "loss": 1.25}
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

EventKind = Literal[
    "started", "step", "epoch", "evaluation", "checkpoint", "cache", "paused", "resumed", "finished",
    "failed", "cancelled",
]  # fmt: skip
MetricValue = float | list[Any]
"""A number, a number per class, or a matrix as rows."""


@dataclass(frozen=True, kw_only=True)
class FitEvent:
    """An event of a fit. Fields that do not apply to its kind are None and are not sent."""

    number: int
    """Counts the events of the fit, from 0."""
    kind: EventKind
    """Kind of the event."""
    step: int
    """Training batches done so far, over all epochs."""
    epoch: int
    """Its epoch, from 0."""
    time: float | None = None
    """Seconds since 1970, by the server's clock."""
    update: int | None = None
    """Weight updates so far, over all epochs."""
    loss: float | None = None
    """Loss of the batch; for an epoch or an evaluation the mean over its samples."""
    terms: Mapping[str, float] | None = None
    """The terms of the loss."""
    metrics: Mapping[str, MetricValue] | None = None
    """Metrics of an evaluation."""
    is_best: bool | None = None
    """Whether this evaluation is the best so far, by the metric of the early stop."""
    learning_rates: tuple[float, ...] | None = None
    """Learning rates of the parameter groups, as used by this step."""
    gradient_norm: float | None = None
    """Euclidean norm of all gradients before `clip_norm`; of steps that update."""
    changed: Mapping[str, int] | None = None
    """Changed gradient elements by rule; the key is its index in the list, from 0, as text."""
    is_skipped: bool | None = None
    """Whether the step was skipped because of a non-finite value."""
    sample_count: int | None = None
    """Samples in the batch, or in the epoch or evaluation."""
    samples_per_s: float | None = None
    """Moving average of training samples per second of compute."""
    seconds_left: float | None = None
    """Estimated seconds for the rest of the fit, without pauses."""
    memory_bytes: int | None = None
    """Memory of the process on a CPU, of the device's allocator on a GPU."""
    saved_bytes: int | None = None
    """Bytes of saved tensors that went through the spool in this step."""
    written_bytes: int | None = None
    """Of those, bytes written to disk."""
    done: int | None = None
    """Of a cache: samples filled so far."""
    total: int | None = None
    """Of a cache: samples in total."""
    checkpoint: int | None = None
    """Number of the checkpoint."""
    message: str | None = None
    """Text for people: why there is no cache, why the fit ended."""
    reason: str | None = None
    """Stable reason of a failure."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set; non-finite numbers become text, as in protobuf's JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: plain(value) for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a value as JSON-compatible data."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
