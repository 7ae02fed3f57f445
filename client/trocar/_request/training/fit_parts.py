"""Parts of a fit, and its request."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from trocar._base.delegation import explained
from trocar._request.training.trainer_options import (
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


@explained
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


@explained
def metric(name: str, **options: object) -> Metric:
    """Return a metric of evaluations, in addition to the loss.

    Args:
        name: "accuracy", "top_k", "f1", "auroc", "confusion_matrix" or "mean_iou".
        **options: torchmetrics' own: top_k, average, ...
    """
    return Metric(name, options)


@dataclass(frozen=True)
class EarlyStop:
    """Early stopping of a fit before its last epoch; made by `early_stop`."""

    metric: str
    patience: int
    min_delta: float
    is_higher_better: bool


@explained
def early_stop(
    metric: str = "loss", *, patience: int = 3, min_delta: float = 0.0, higher_is_better: bool | None = None
) -> EarlyStop:
    """Return the condition for early stopping before the last epoch.

    Args:
        metric: The metric of the evaluation: "loss", or the name of a metric that is one number.
        patience: Evaluations in a row that are not better than the best.
        min_delta: Minimum improvement.
        higher_is_better: Whether larger is better; when None, for everything except the loss.
    """
    better = metric != "loss" if higher_is_better is None else higher_is_better
    return EarlyStop(metric, patience, min_delta, better)


@dataclass(frozen=True)
class FitOptions:
    """Arguments of a fit; `Trainer.fit` documents them."""

    dataset: object
    _: KW_ONLY
    epochs: int = 1
    batch_size: int = 32
    eval: object | None = None
    eval_split: float = 0.0
    shuffle: bool = True
    drop_last: bool = False
    metrics: Metric | str | Sequence[Metric | str] = ("accuracy",)
    augment: Augmentation | str | Sequence[Augmentation | str] = ()
    early_stop: EarlyStop | None = None
    checkpoint_every: int = 0
    feature_cache: bool = True
    max_tokens: int | None = None
    truncate: bool = False
    workers: int = 1


def fit_spec(options: FitOptions) -> pb.FitSpec:
    """Build a fit's spec, without its data sets.

    Raises:
        TypeError: An argument is not what `Trainer.fit` takes.
        ValueError: A number is not finite, or does not fit into its field.
    """
    chosen = [Metric(e) if isinstance(e, str) else e for e in several(options.metrics, "metrics")]
    changes = [Augmentation(e) if isinstance(e, str) else e for e in several(options.augment, "augment")]
    for entry in chosen:
        made_by("metrics", entry, Metric, "give names, or trocar.training.metric('f1', average='macro')")
    for change in changes:
        made_by(
            "augment",
            change,
            Augmentation,
            "give names, or trocar.training.augmentation('RandomCrop', size=32)",
        )
    cache_mode = "auto" if flag("feature_cache", options.feature_cache) else "off"
    eval_split = number("eval_split", options.eval_split)
    if eval_split and options.eval is not None:
        raise ValueError("eval and eval_split: give the data to evaluate on, or a share of the training data")
    message = pb.FitSpec(
        epochs=whole("epochs", options.epochs, bits=32),
        batch_size=whole("batch_size", options.batch_size, bits=32),
        shuffle=flag("shuffle", options.shuffle),
        drop_last=flag("drop_last", options.drop_last),
        metrics=[pb.MetricSpec(name=m.name, options=options_to_wire(m.options)) for m in chosen],
        augmentations=[pb.AugmentationSpec(name=a.name, options=options_to_wire(a.options)) for a in changes],
        checkpoint_every=whole("checkpoint_every", options.checkpoint_every, bits=32),
        feature_cache=pb.FeatureCacheSpec(mode=cache_mode),
        max_tokens=None if options.max_tokens is None else whole("max_tokens", options.max_tokens, bits=32),
        truncate=flag("truncate", options.truncate),
        eval_split=eval_split or None,
        workers=None if options.workers == 1 else whole("workers", options.workers, bits=32),
    )
    stop = options.early_stop
    if stop is not None:
        made_by(
            "early_stop", stop, EarlyStop, "create it with trocar.training.early_stop('loss', patience=3)"
        )
        message.early_stop.CopyFrom(
            pb.EarlyStopSpec(
                metric=text("metric", stop.metric),
                patience=whole("patience", stop.patience, bits=32),
                min_delta=number("min_delta", stop.min_delta),
                is_higher_better=stop.is_higher_better,
            )
        )
    return message
