"""TensorBoard log of a fit; needs tensorboardX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._result.history import numbers

try:
    from tensorboardX import SummaryWriter
except ImportError as error:
    raise ImportError('a TensorBoard log needs tensorboardX: pip install "trocar[tensorboard]"') from error

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from trocar._result.history import FitEvent, History


def write(history: History, folder: str | os.PathLike[str]) -> None:
    """Write every number of a fit, at its step and its time."""
    with SummaryWriter(str(folder)) as writer:
        for event in history:
            for tag, value in _scalars(event):
                writer.add_scalar(tag, value, event["step"], walltime=event.time_s)


def _scalars(event: FitEvent) -> Iterator[tuple[str, float]]:
    if event.kind == "step":
        yield "train/loss", float(event["loss"])
        if event.get("gradient_norm") is not None:
            yield "train/gradient_norm", float(event["gradient_norm"])
        for index, rate in enumerate(event.get("learning_rates") or ()):
            yield f"train/learning_rate/{index}", float(rate)
    if event.kind == "evaluation":
        for name, value in numbers(event):
            yield f"evaluation/{name}", value
