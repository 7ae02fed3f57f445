"""Fit spec, as a client sends it; with the fields of `fit.proto`, by the same names."""

from typing import Annotated, Literal

from pydantic import Field

from trocar_server.training.spec.trainer_spec import Options, SpecPart


class AugmentationSpec(SpecPart):
    """A torchvision v2 transform."""

    name: str
    """Class name, for example `RandomHorizontalFlip`."""
    options: Options = Field(default_factory=dict)
    """Its arguments by name."""


class MetricSpec(SpecPart):
    """A torchmetrics metric of classification or segmentation."""

    name: Literal["accuracy", "top_k", "f1", "auroc", "confusion_matrix", "mean_iou"]
    """The metric."""
    options: Options = Field(default_factory=dict)
    """Its arguments by name: `top_k`, `average`, ..."""


class EarlyStopSpec(SpecPart):
    """Early stopping, before the last epoch."""

    metric: str = "loss"
    """The monitored value: `loss` or the name of a metric that is one number."""
    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without improvement, after which the fit ends."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The minimum improvement that counts."""
    is_higher_better: bool = False
    """Whether higher is better."""


class FeatureCacheSpec(SpecPart):
    """Caching of a frozen prefix's features."""

    mode: Literal["auto", "off"] = "auto"
    """`auto`: cache where the result is bit-equal to that without a cache."""
    memory_bytes: int = Field(default=1 << 30, ge=0)
    """Budget in memory; the rest is stored on disk."""
    disk_bytes: int = Field(default=16 << 30, ge=0)
    """Budget on disk; if it is not enough there is no cache."""


class FitSpec(SpecPart):
    """Epochs over a data set."""

    dataset_id: str
    """The training data set."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Passes over the data set."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Samples in a batch; the last of an epoch may have fewer."""
    shuffle: bool = True
    """Whether epoch e takes the samples in the order of `torch.randperm(n, generator=G)`, G seeded with the
    trainer's seed + e (e from 0); otherwise in stored order."""
    drop_last: bool = False
    """Whether to leave out a last, smaller batch."""
    eval_dataset_id: str = ""
    """The data set to evaluate on after each epoch; none when empty."""
    metrics: tuple[MetricSpec, ...] = (MetricSpec(name="accuracy"),)
    """Metrics of evaluations, beside the loss."""
    augmentations: tuple[AugmentationSpec, ...] = ()
    """Transforms of training inputs, per sample, before the preprocessing's normalisation."""
    early_stop: EarlyStopSpec | None = None
    """Early stopping; None for all epochs."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Updates between two checkpoints; 0 for one at the end of each epoch."""
    feature_cache: FeatureCacheSpec = FeatureCacheSpec()
    """Whether a frozen prefix runs only once per sample."""
    max_tokens: int | None = Field(default=None, ge=1, le=(1 << 31) - 1)
    """The most tokens of a text; what the model takes when None."""
    eval_split: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
    """The share of the data set that is kept from training and evaluated after each epoch; see
    `order.split_order`."""
    truncate: bool = False
    """Whether longer texts are cut, and their labels of tokens with them; otherwise the fit fails there."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that each batch is spread over, the server included; see Note: [Ranks of a fit]."""
