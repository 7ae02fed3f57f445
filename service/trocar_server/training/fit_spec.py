"""What a fit is made of, as a client says it; the fields are those of `fit.proto`, by the same names."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trocar_server.training.spec import Options


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AugmentationSpec(_Part):
    """One of torchvision's v2 transforms."""

    name: str
    """Its class, for example `RandomHorizontalFlip`."""
    options: Options = {}
    """Its arguments by name."""


class MetricSpec(_Part):
    """One of torchmetrics' metrics of classification or segmentation."""

    name: Literal["accuracy", "top_k", "f1", "auroc", "confusion_matrix", "mean_iou"]
    """Which."""
    options: Options = {}
    """Its arguments by name: `top_k`, `average`, ..."""


class EarlyStopSpec(_Part):
    """When to end before the last epoch."""

    metric: str = "loss"
    """Of the evaluation: `loss` or the name of a metric that is one number."""
    patience: int = Field(default=3, ge=1)
    """Evaluations in a row that are not better than the best."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much an evaluation must be better."""
    is_higher_better: bool = False
    """Whether more is better."""


class FeatureCacheSpec(_Part):
    """Whether what a frozen prefix computes is kept."""

    mode: Literal["auto", "off"] = "auto"
    """`auto`: where the result is bit-equal to that without."""
    memory_bytes: int = Field(default=1 << 30, ge=0)
    """In memory; what is more lies on disk."""
    disk_bytes: int = Field(default=16 << 30, ge=0)
    """On disk; where that is not enough there is no cache."""


class FitSpec(_Part):
    """Epochs over a dataset."""

    dataset_id: str
    """What to train on."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Times over the dataset."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Samples in a batch; the last of an epoch may have fewer."""
    shuffle: bool = True
    """Whether epoch e takes the samples in the order of `torch.randperm(n, generator=G)`, G seeded with the
    trainer's seed + e (e from 0); else in their own."""
    drop_last: bool = False
    """Whether a last batch of fewer samples is left out."""
    eval_dataset_id: str = ""
    """What to evaluate on after each epoch; nothing when empty."""
    metrics: tuple[MetricSpec, ...] = (MetricSpec(name="accuracy"),)
    """What evaluations tell beside the loss."""
    augmentations: tuple[AugmentationSpec, ...] = ()
    """What is done to training inputs, one sample after another, before the preprocessing's normalisation."""
    early_stop: EarlyStopSpec | None = None
    """When to end early."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Updates between two checkpoints; 0 for one at the end of each epoch."""
    feature_cache: FeatureCacheSpec = FeatureCacheSpec()
    """Whether a frozen prefix runs once."""
