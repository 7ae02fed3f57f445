"""What a fit tells while it runs: numbered events, from 0, without a gap.

Event(number=7, kind="step", step=8, epoch=0, loss=1.25).to_json()
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
"""One number, one for each class, or a matrix as rows."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. Fields that do not belong to its kind are None and are not sent."""

    number: int
    """Counts the events of the fit, from 0."""
    kind: EventKind
    """What happened."""
    step: int
    """Training batches done so far in the whole fit."""
    epoch: int
    """Which epoch it belongs to, from 0."""
    time: float | None = None
    """When, in seconds since 1970 by the server's clock."""
    update: int | None = None
    """Updates of the weights so far in the whole fit."""
    loss: float | None = None
    """Of the batch; of an epoch or an evaluation the mean over its samples."""
    terms: Mapping[str, float] | None = None
    """The parts of the loss."""
    metrics: Mapping[str, MetricValue] | None = None
    """Of an evaluation."""
    is_best: bool | None = None
    """Whether this evaluation is better than all before, by the metric of the early stop."""
    learning_rates: tuple[float, ...] | None = None
    """For each parameter group, as this step used them."""
    gradient_norm: float | None = None
    """Euclidean norm of all gradients before `clip_norm`; of steps that update."""
    changed: Mapping[str, int] | None = None
    """Changed gradient elements by rule: its place in the list, from 0, as text."""
    is_skipped: bool | None = None
    """Whether the step was left out because something in it was not finite."""
    sample_count: int | None = None
    """Samples in the batch, or in the epoch or evaluation."""
    samples_per_s: float | None = None
    """Moving average of training samples for each second of work."""
    seconds_left: float | None = None
    """Estimate for the rest of the fit, without pauses."""
    memory_bytes: int | None = None
    """Of the process on a CPU, of the device's allocator on a GPU."""
    saved_bytes: int | None = None
    """Saved tensors that went through the spool in this step."""
    written_bytes: int | None = None
    """Of those, bytes written to disk."""
    done: int | None = None
    """Of a cache: samples that are in it."""
    total: int | None = None
    """Of a cache: samples that it will have."""
    checkpoint: int | None = None
    """Number of the checkpoint."""
    message: str | None = None
    """For a person: why there is no cache, why the fit ended."""
    reason: str | None = None
    """Stable reason of a failure."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set; what is not finite becomes text, as in protobuf's JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: plain(value) for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
