"""What a fit is made of, and its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trocar._trainer_parts import options_to_wire
from trocar_api.v1 import fit_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Augmentation:
    """One of torchvision's v2 transforms; made by `augmentation`."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)


def augmentation(name: str, **options: object) -> Augmentation:
    """Return a change to training inputs: `augmentation("RandomCrop", size=32, padding=4)`.

    Args:
        name: The class of one of torchvision's v2 transforms.
        **options: Its arguments.
    """
    return Augmentation(name, options)


@dataclass(frozen=True)
class Metric:
    """One of torchmetrics' metrics; made by `metric`."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)


def metric(name: str, **options: object) -> Metric:
    """Return what evaluations tell beside the loss.

    Args:
        name: "accuracy", "top_k", "f1", "auroc", "confusion_matrix" or "mean_iou".
        **options: torchmetrics' own: top_k, average, ...
    """
    return Metric(name, options)


@dataclass(frozen=True)
class EarlyStop:
    """When a fit ends before its last epoch; made by `early_stop`."""

    metric: str
    patience: int
    min_delta: float
    is_higher_better: bool


def early_stop(
    metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, higher_is_better: bool | None = None
) -> EarlyStop:
    """Return when a fit ends before its last epoch.

    Args:
        metric: Of the evaluation: "loss", or the name of a metric that is one number.
        patience: Evaluations in a row that are not better than the best.
        min_delta: By how much one must be better.
        higher_is_better: Whether more is better; for everything but the loss when None.
    """
    better = metric != "loss" if higher_is_better is None else higher_is_better
    return EarlyStop(metric, patience, min_delta, better)


def fit_spec(  # noqa: PLR0913 - options of one fit, by keyword
    dataset_id: str,
    *,
    epochs: int,
    batch_size: int,
    eval_dataset_id: str,
    shuffle: bool,
    drop_last: bool,
    metrics: Sequence[Metric | str],
    augment: Sequence[Augmentation | str],
    stop: EarlyStop | None,
    checkpoint_every: int,
    feature_cache: bool,
) -> pb.FitSpec:
    """Build a fit's spec; see `AsyncTrainer.fit` for the arguments."""
    chosen = [Metric(entry) if isinstance(entry, str) else entry for entry in metrics]
    changes = [Augmentation(entry) if isinstance(entry, str) else entry for entry in augment]
    message = pb.FitSpec(
        dataset_id=dataset_id,
        epochs=epochs,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        eval_dataset_id=eval_dataset_id,
        metrics=[pb.MetricSpec(name=m.name, options=options_to_wire(m.options)) for m in chosen],
        augmentations=[pb.AugmentationSpec(name=a.name, options=options_to_wire(a.options)) for a in changes],
        checkpoint_every=checkpoint_every,
        feature_cache=pb.FeatureCacheSpec(mode="auto" if feature_cache else "off"),
    )
    if stop is not None:
        message.early_stop.CopyFrom(
            pb.EarlyStopSpec(
                metric=stop.metric,
                patience=stop.patience,
                min_delta=stop.min_delta,
                is_higher_better=stop.is_higher_better,
            )
        )
    return message
