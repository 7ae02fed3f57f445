"""Validation of a fit before it begins: every problem in one error.

parts = check_fit(core, train, evaluation, spec)
parts.augmentation, parts.metrics
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import nearest
from trocar_server.late_imports import late_imports
from trocar_server.surgery import PassGuard
from trocar_server.training.datasets.dataset_schema import MAX_LABELS
from trocar_server.training.datasets.order import batch_count, padded_count
from trocar_server.training.fit.augmentations import Augmentation, build_augmentation, torchvision_v2
from trocar_server.training.fit.fit_data import Core, Reader, named_target
from trocar_server.training.fit.metrics import Metrics, Task, build_metrics, torchmetrics_classification
from trocar_server.training.fit.small_batches import single_sample_problems
from trocar_server.training.fit.worker_check import worker_problems
from trocar_server.training.losses.batch import Batch
from trocar_server.training.losses.loss_function import NoLabelsError
from trocar_server.training.spec.fit_spec import FitSpec, MetricSpec
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import LossSpec

_SHOWN_LABELS = 10
_IGNORED = -100
_DEFAULT_METRICS = FitSpec.model_fields["metrics"].default
_EVALUATIONS = "set `eval_dataset_id` or `eval_split` (`eval=` or `eval_split=` in Python)"


@dataclass(frozen=True)
class FitParts:
    """Validated parts of a fit.

    Attributes:
        augmentation: Augmentation of training inputs.
        metrics: Metrics of evaluations.
        target: Name of the target that the metrics compare with.
        update_count: Weight updates over all epochs, if no step is skipped.
    """

    augmentation: Augmentation
    metrics: Metrics
    target: str
    update_count: int


@dataclass(frozen=True)
class _Question:
    """The classification task: the loss term that has labels."""

    loss: LossSpec
    task: Task

    @property
    def ignored(self) -> int:
        value = self.loss.options.get("ignore_index", _IGNORED)
        return value if isinstance(value, int) else _IGNORED


def import_parts(core: Core, spec: FitSpec) -> None:
    """Import what the parts of a fit need. It takes seconds: not for the thread that owns the device."""
    with late_imports:
        if spec.augmentations:
            torchvision_v2()
        if spec.metrics and _wants_metrics(spec) and _question(core) is not None:
            torchmetrics_classification()


def _wants_metrics(spec: FitSpec) -> bool:
    """Whether metrics are computed, or were asked for: a fit without evaluations has none by default."""
    is_asked = spec.metrics != _DEFAULT_METRICS
    return is_asked or bool(spec.eval_dataset_id or spec.eval_split or spec.early_stop)


def check_fit(
    core: Core, train: Reader, evaluation: Reader | None, spec: FitSpec, room_problem: str = ""
) -> FitParts:
    """Validate a fit.

    A batch of one or two samples of each data set runs through the model, without side effects.

    Args:
        core: The trainer.
        train: The training data.
        evaluation: The data to evaluate on, or None.
        spec: The fit's spec.
        room_problem: Why there can never be so many workers here; empty if there can.

    Raises:
        ServiceError: `FIT_INVALID`, with all problems.
    """
    problems = Problems()
    _note(problems, _size_problems(core, train, evaluation, spec))
    if any(loss.name == "contrastive" for loss in core.spec.losses):
        _note(problems, _pair_problems(train, evaluation, spec))
    if spec.workers > 1:
        _note(problems, worker_problems(core.spec, core.module, len(train), spec, room_problem))
    shape = _output_shape(core, train, "dataset_id", problems)
    separate = None if spec.eval_split else evaluation  # a part of one data set has its shapes and labels
    if separate is not None:
        _output_shape(core, separate, "eval_dataset_id", problems)
    if shape is not None:
        _note(problems, single_sample_problems(core, train, evaluation, spec))
    augmentation = _augmentation(core, train, spec, problems)
    question = _question(core)
    dim = core.class_dim(len(shape)) if shape is not None and len(shape) > 1 else 1
    classes = shape[dim] if shape is not None and len(shape) > 1 else 1
    if question is not None and question.task == "multilabel" and classes == 1:
        question = _Question(question.loss, "binary")
    if shape is not None and question is not None and question.task == "multiclass":
        _note(problems, _label_problems(train, separate, question, classes))
    is_evaluated = evaluation is not None or _wants_metrics(spec)
    metrics = _metrics(spec, question, classes if shape is not None and is_evaluated else 0, dim, problems)
    _note(problems, _stop_problems(core, evaluation, spec, metrics))
    problems.raise_any(ErrorReason.FIT_INVALID, "the fit cannot begin")
    target = question.loss.target if question else ""
    return FitParts(augmentation, metrics, target, _update_count(core, train, spec))


def _note(problems: Problems, outcome: Iterator[tuple[str, str]]) -> None:
    for field, message in outcome:
        problems.add(field, message)


def _size_problems(
    core: Core, train: Reader, evaluation: Reader | None, spec: FitSpec
) -> Iterator[tuple[str, str]]:
    if not len(train):
        yield "dataset_id", "the data set is empty"
    elif not epoch_batch_count(len(train), spec):
        yield (
            "batch_size",
            f"{spec.batch_size} is more than the {len(train)} samples, and drop_last leaves out smaller ones",
        )
    elif not _update_count(core, train, spec):
        yield (
            "epochs",
            f"there would be no update: the trainer accumulates {core.spec.accumulation} batches, and the "
            f"fit has {spec.epochs * epoch_batch_count(len(train), spec)}",
        )
    if spec.eval_split and spec.eval_dataset_id:
        yield "eval_split", "there is a data set to evaluate on, `eval_dataset_id`; set one of the two"
    elif spec.eval_split and evaluation is not None and not len(evaluation):
        yield "eval_split", f"{spec.eval_split:g} of {len(train)} samples is less than one"
    elif evaluation is not None and not len(evaluation):
        yield "eval_dataset_id", "the data set is empty"


def _pair_problems(train: Reader, evaluation: Reader | None, spec: FitSpec) -> Iterator[tuple[str, str]]:
    """Yield settings that would separate the pairs of `contrastive`: samples i and i + n / 2 of n."""
    what = "'contrastive' pairs the halves of a batch"
    if spec.shuffle:
        yield "shuffle", f"{what}; order the samples so, and set it to false"
    if spec.workers > 1:
        yield "workers", f"{what}, and several workers take every other sample; use one"
    if spec.eval_split:
        yield "eval_split", f"{what}, and it takes single samples; use `eval_dataset_id`"
    if spec.batch_size % 2:
        yield "batch_size", f"{what}; use an even number"
        return
    lasts = {"dataset_id": 0 if spec.drop_last else len(train) % spec.batch_size}
    if evaluation is not None and not spec.eval_split:
        lasts["eval_dataset_id"] = len(evaluation) % spec.batch_size
    for field, last in lasts.items():
        if last % 2:
            yield field, f"the last batch has {last} samples, and {what}; leave one out"


def epoch_batch_count(sample_count: int, spec: FitSpec) -> int:
    """Return the number of training batches of an epoch, after it is filled up for the workers."""
    filled_up = padded_count(sample_count, spec.workers)
    return batch_count(filled_up, spec.batch_size, drop_last=spec.drop_last)


def _update_count(core: Core, train: Reader, spec: FitSpec) -> int:
    steps = spec.epochs * epoch_batch_count(len(train), spec)
    return (core.accumulated_count + steps) // core.spec.accumulation


def _output_shape(core: Core, reader: Reader, field: str, problems: Problems) -> tuple[int, ...] | None:
    """Return the shape of the model's output for one or two samples; None without one, or if the pass fails.

    There is none where every loss has a selector.
    """
    if not len(reader):
        return None
    with problems.noting(field):
        batch = reader.batch(torch.arange(min(2, len(reader))))
        try:
            output = core.evaluate(batch, PassGuard()).output
        except NoLabelsError:
            output = core.evaluate(_labelled(core, batch), PassGuard()).output
        return None if output is None else tuple(output.shape)
    return None


def _labelled(core: Core, batch: Batch) -> Batch:
    """Return a batch with one class that counts for all labels: of its first samples all may be ignored."""
    ignored = [loss.options.get("ignore_index") for loss in core.spec.losses]
    label = next(label for label in range(len(ignored) + 1) if label not in ignored)
    targets = {
        name: target if target.is_floating_point() else torch.full_like(target, label)
        for name, target in batch.targets.items()
    }
    return replace(batch, targets=targets)


def _augmentation(core: Core, train: Reader, spec: FitSpec, problems: Problems) -> Augmentation:
    if spec.augmentations and not train.input_shape:
        problems.add("augmentations", "they change images, and the data set has none")
        return build_augmentation(())[0]
    augmentation, result = build_augmentation(spec.augmentations, train.input_shape, spec.batch_size)
    for problem in result:
        problems.add("", problem)
    if augmentation.is_geometric and len(train) and not result:
        targets = train.batch(torch.arange(1)).targets
        images = [name for name, value in targets.items() if _is_image(value, train.input_shape)]
        if images:
            problems.add(
                "augmentations", "they move pixels, and targets that are images would have to move with them"
            )
    return augmentation


def _is_image(target: Tensor, input_shape: tuple[int, ...]) -> bool:
    return target.dim() >= 3 and tuple(target.shape[-2:]) == tuple(input_shape[-2:])


def _question(core: Core) -> _Question | None:
    tasks: dict[str, Task] = {"cross_entropy": "multiclass", "bce_with_logits": "multilabel"}
    for loss in core.spec.losses:
        if loss.name in tasks and not loss.selector and loss.teacher is None:
            return _Question(loss, tasks[loss.name])
    return None


def _label_problems(
    train: Reader, evaluation: Reader | None, question: _Question, classes: int
) -> Iterator[tuple[str, str]]:
    if evaluation is not None and train.categories and evaluation.categories not in ((), train.categories):
        yield "eval_dataset_id", _other_classes(train.categories, evaluation.categories)
        return
    readers = {"dataset_id": train} | ({"eval_dataset_id": evaluation} if evaluation is not None else {})
    result: dict[str, set[int]] = {}
    for field, reader in readers.items():
        labels = reader.labels(question.loss.target) if len(reader) else None
        if labels is None:
            return
        result[field] = {label for label in labels if label != question.ignored}
        wrong = sorted(label for label in result[field] if not 0 <= label < classes)
        if wrong:
            yield field, f"labels {_shown(wrong)} are out of range: the model has classes 0 to {classes - 1}"
        if _are_bounds(labels):
            return
        if not result[field]:
            yield field, f"all labels are {question.ignored}, which the loss ignores"
    if evaluation is None or _is_dense(evaluation, question):
        return
    missing = sorted(result["dataset_id"] - result["eval_dataset_id"])
    if missing:
        yield (
            "eval_dataset_id",
            f"classes {_shown(missing)} are in the training set and never in the evaluation set; add samples",
        )


def _other_classes(names: Sequence[str], others: Sequence[str]) -> str:
    pairs = zip_longest(names, others, fillvalue="missing")
    number, own, other = next((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"class {number} is {other!r} and in the training set {own!r}; both need the same classes in order"


def _are_bounds(labels: Collection[int]) -> bool:
    """Whether these are only the smallest and the largest of very many labels."""
    return len(labels) == 2 and max(labels) - min(labels) >= MAX_LABELS


def _is_dense(reader: Reader, question: _Question) -> bool:
    """Whether each pixel has a label; then a class may legitimately be missing."""
    target = named_target(reader.batch(torch.arange(1)).targets, question.loss.target)
    return target is None or target.dim() > 1


def _shown(labels: Collection[int]) -> str:
    listed = list(labels)
    more = f" and {len(listed) - _SHOWN_LABELS} more" if len(listed) > _SHOWN_LABELS else ""
    return ", ".join(map(str, listed[:_SHOWN_LABELS])) + more


def _metrics(
    spec: FitSpec, question: _Question | None, classes: int, class_dim: int, problems: Problems
) -> Metrics:
    if question is None:
        if spec.metrics not in ((), _DEFAULT_METRICS):
            problems.add(
                "metrics", "they need labels: a term of the loss that is cross_entropy or bce_with_logits"
            )
        return build_metrics((), 0)[0]
    specs: tuple[MetricSpec, ...] = spec.metrics if classes else ()
    metrics, result = build_metrics(specs, classes, question.task, question.ignored, class_dim)
    for problem in result:
        problems.add("", problem)
    return metrics


def _stop_problems(
    core: Core, evaluation: Reader | None, spec: FitSpec, metrics: Metrics
) -> Iterator[tuple[str, str]]:
    if core.spec.schedule.name == "plateau" and evaluation is None:
        yield (
            "eval_dataset_id",
            f"the trainer's plateau schedule needs evaluations; {_EVALUATIONS}",
        )
    if spec.early_stop is None:
        return
    if evaluation is None:
        yield "early_stop", f"it needs evaluations; {_EVALUATIONS}"
    name = spec.early_stop.metric
    if name != "loss" and name not in metrics.scalars:
        near = nearest(name, metrics.names) or ["loss", *metrics.scalars]
        what = "is not one number" if name in metrics.names else "is not one of the fit's metrics"
        yield "early_stop.metric", f"'{name}' {what}; use one of {', '.join(dict.fromkeys(near))}"
