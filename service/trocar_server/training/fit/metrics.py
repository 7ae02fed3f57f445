"""Evaluation metrics: torchmetrics over batches, one result at the end.

    metrics = make_metrics([MetricSpec(name="accuracy")], classes=10)
    metrics.update(logits, labels)          # (batch, 10, ...) and (batch, ...)
    metrics.compute()                       # {"accuracy": 0.97}

torchmetrics is imported when the first metric is created: that takes seconds, and longer than using it.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.training.fit.events import MetricValue
from trocar_server.training.spec.fit_spec import MetricSpec

Task = Literal["multiclass", "multilabel", "binary"]
"""One of several labels per position; several labels at once; or one yes/no output."""

_CLASSES = {
    "accuracy": "Accuracy",
    "top_k": "Accuracy",
    "f1": "F1Score",
    "auroc": "AUROC",
    "confusion_matrix": "ConfusionMatrix",
    "mean_iou": "JaccardIndex",
}
_FILLED_IN = ("self", "num_classes", "num_labels", "validate_args", "kwargs", "multidim_average")
_LONGEST_LIST = 10_000


class Metrics:
    """Metrics of an evaluation; created by `make_metrics`.

    Args:
        members: torchmetrics' objects by the name of their result.
        task: Kind of classification.
        ignored_label: Positions with this label do not count; None for none.
        class_dim: The dimension of the classes in outputs.
    """

    def __init__(
        self, members: dict[str, Any], task: Task, ignored_label: int | None, class_dim: int = 1
    ) -> None:
        self._members = members
        self._task: Task = task
        self._ignored, self._class_dim = ignored_label, class_dim
        self._counts = dict.fromkeys(members, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results."""
        return tuple(self._members)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the results that are one number."""
        return tuple(name for name, member in self._members.items() if _is_scalar(member))

    def reset(self) -> None:
        """Begin a new evaluation."""
        self._counts = dict.fromkeys(self._members, 0)
        for member in self._members.values():
            member.reset()

    @torch.no_grad()
    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            output: What the model returned, before softmax or sigmoid: (batch, classes, ...), or with the
                classes in another dimension.
            target: Labels (batch, ...), or one number per class, of the output's shape.
        """
        if not self._members:
            return
        output = output.detach().float().cpu()
        output, target = _flattened(output, target.detach().cpu(), self._task, self._class_dim)
        if self._task == "multiclass" and self._ignored is not None:
            kept = target != self._ignored
            output, target = output[kept], target[kept]
        if not len(target):
            return
        probabilities = _probabilities(output, self._task)
        for name, member in self._members.items():
            # Softmax values can tie where the logits do not; thresholds need probabilities.
            takes_logits = self._task == "multiclass" and not type(member).__name__.endswith("AUROC")
            member.update(output if takes_logits else probabilities, target)
            self._counts[name] += len(target)

    def compute(self) -> dict[str, MetricValue]:
        """Return the results over all batches; `nan` for a metric without samples."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes without samples: the result shows it
            return {
                name: _number(member.compute()) if self._counts[name] else float("nan")
                for name, member in self._members.items()
            }


def make_metrics(
    specs: Sequence[MetricSpec],
    classes: int,
    task: Task = "multiclass",
    ignored_label: int | None = -100,
    class_dim: int = 1,
) -> Metrics:
    """Build the metrics of a fit.

    A second metric of the same name is called `f1_2`. `accuracy` and `top_k` count every sample alike
    unless `average` says otherwise; `mean_iou` is the mean over the classes of the Jaccard index over all
    pixels.

    Args:
        specs: The metrics, with torchmetrics' own options.
        classes: Number of classes of the model.
        task: Kind of classification.
        ignored_label: A label that does not count, as in the loss; None for none.
        class_dim: The dimension of the classes in outputs.

    Raises:
        ServiceError: `FIT_INVALID`, with every problem and its position in the list.
    """
    metrics, problems = build_metrics(specs, classes, task, ignored_label, class_dim)
    if problems:
        raise ServiceError(ErrorReason.FIT_INVALID, "; ".join(problems))
    return metrics


def build_metrics(
    specs: Sequence[MetricSpec],
    classes: int,
    task: Task = "multiclass",
    ignored_label: int | None = -100,
    class_dim: int = 1,
) -> tuple[Metrics, list[str]]:
    """As `make_metrics`, but return the problems instead of raising them."""
    members: dict[str, Any] = {}
    problems: list[str] = []
    for index, spec in enumerate(specs):
        field = f"metrics[{index}] ({spec.name})"
        kind = _class_of(spec, task)
        outcome = list(_problems_of(spec, kind, classes, task))
        if not outcome:
            member, outcome = _build(spec, kind, classes, task)
            members[_free_name(spec.name, members)] = member
        problems += [f"{field}: {problem}" for problem in outcome]
    return Metrics(members, task, ignored_label, class_dim), problems


def torchmetrics_classification() -> Any:
    """Return torchmetrics' module of classification metrics."""
    import torchmetrics.classification

    return torchmetrics.classification


def _class_of(spec: MetricSpec, task: Task) -> Any:
    return getattr(torchmetrics_classification(), task.capitalize() + _CLASSES[spec.name])


def _problems_of(spec: MetricSpec, kind: Any, classes: int, task: Task) -> Iterator[str]:
    if spec.name == "top_k" and task != "multiclass":
        yield "it needs labels, one for each sample"
        return
    if task == "multiclass" and classes < 2:
        yield "it needs at least two classes"
        return
    known = [name for name in inspect.signature(kind.__init__).parameters if name not in _FILLED_IN]
    for name in sorted(set(spec.options) - set(known)):
        yield f"no option '{name}'; it has {', '.join(nearest(name, known) or known)}"
    top = _top_k(spec, classes)
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= classes:
        yield f"option 'top_k' is a whole number from 1 to the number of classes, {classes}"
    thresholds = spec.options.get("thresholds")
    length = len(thresholds) if isinstance(thresholds, list) else thresholds
    if isinstance(length, (int, float)) and not 2 <= length <= _LONGEST_LIST:
        yield f"option 'thresholds' is from 2 to {_LONGEST_LIST}"


def _top_k(spec: MetricSpec, classes: int) -> object:
    return spec.options.get("top_k", min(5, classes) if spec.name == "top_k" else 1)


def _build(spec: MetricSpec, kind: Any, classes: int, task: Task) -> tuple[Any, list[str]]:
    options: dict[str, Any] = {}
    if task != "binary":
        options["num_classes" if task == "multiclass" else "num_labels"] = classes
    if task == "multiclass" and spec.name in ("accuracy", "top_k"):
        options |= {"average": "micro", "top_k": _top_k(spec, classes)}
    try:
        return kind(**(options | spec.options)), []
    except Exception as error:  # noqa: BLE001 - torchmetrics may raise anything on a bad value
        return None, [f"torchmetrics rejects its options: {first_line(error)}"]


def _free_name(name: str, taken: dict[str, Any]) -> str:
    count = sum(other == name or other.startswith(f"{name}_") for other in taken)
    return f"{name}_{count + 1}" if name in taken else name


def _is_scalar(member: Any) -> bool:
    if type(member).__name__.endswith("ConfusionMatrix"):
        return False
    return getattr(member, "average", "micro") not in (None, "none")


def _flattened(output: Tensor, target: Tensor, task: Task, class_dim: int) -> tuple[Tensor, Tensor]:
    """Return (places, classes) and (places,), or twice (places, classes); binary twice (places,)."""
    if task == "binary":
        return output.reshape(-1), _labels(target.reshape(-1))
    if output.dim() > 2:
        output = output.movedim(class_dim, -1)
        target = target.movedim(class_dim, -1) if target.dim() == output.dim() else target
    output = output.reshape(-1, output.shape[-1])
    if task == "multilabel":
        return output, _labels(target.reshape(output.shape))
    if target.dim() > 1 and target.is_floating_point():  # class probabilities
        return output, target.reshape(output.shape).argmax(1)
    return output, target.reshape(-1).long()


def _labels(target: Tensor) -> Tensor:
    """Return 0 or 1 for each target of a binary loss, which may be any probability: smoothed, for example."""
    return (target >= 0.5).long()


def _probabilities(output: Tensor, task: Task) -> Tensor:
    return output.softmax(1) if task == "multiclass" else output.sigmoid()


def _number(value: Tensor) -> MetricValue:
    result: MetricValue = value.tolist()
    return float(result) if isinstance(result, int) else result
