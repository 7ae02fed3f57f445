"""What a fit is made of, and its request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trocar._trainer_options import (
    flag,
    made_by,
    number,
    options_to_wire,
    several,
    text,
    whole,
)
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
    *,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    metrics: Metric | str | Sequence[Metric | str],
    augment: Augmentation | str | Sequence[Augmentation | str],
    stop: EarlyStop | None,
    checkpoint_every: int,
    feature_cache: bool,
) -> pb.FitSpec:
    """Build a fit's spec, without its data sets; see `AsyncTrainer.fit` for the arguments.

    Raises:
        TypeError: An argument is not what `fit` takes.
        ValueError: A number is not finite, or does not fit into its field.
    """
    chosen = [Metric(entry) if isinstance(entry, str) else entry for entry in several(metrics, "metrics")]
    changes = [Augmentation(e) if isinstance(e, str) else e for e in several(augment, "augment")]
    for entry in chosen:
        made_by("metrics", entry, Metric, "give names, or trocar.metric('f1', average='macro')")
    for change in changes:
        made_by("augment", change, Augmentation, "give names, or trocar.augmentation('RandomCrop', size=32)")
    message = pb.FitSpec(
        epochs=whole("epochs", epochs, bits=32),
        batch_size=whole("batch_size", batch_size, bits=32),
        shuffle=flag("shuffle", shuffle),
        drop_last=flag("drop_last", drop_last),
        metrics=[pb.MetricSpec(name=m.name, options=options_to_wire(m.options)) for m in chosen],
        augmentations=[pb.AugmentationSpec(name=a.name, options=options_to_wire(a.options)) for a in changes],
        checkpoint_every=whole("checkpoint_every", checkpoint_every, bits=32),
        feature_cache=pb.FeatureCacheSpec(mode="auto" if flag("feature_cache", feature_cache) else "off"),
    )
    if stop is not None:
        made_by("early_stop", stop, EarlyStop, "make it with trocar.early_stop('loss', patience=3)")
        message.early_stop.CopyFrom(
            pb.EarlyStopSpec(
                metric=text("metric", stop.metric),
                patience=whole("patience", stop.patience, bits=32),
                min_delta=number("min_delta", stop.min_delta),
                is_higher_better=stop.is_higher_better,
            )
        )
    return message
