import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.fit.metrics import Task, make_metrics
from trocar_server.training.spec.fit_spec import MetricSpec

CLASSES = 5


def spec(name: Any, **options: Any) -> MetricSpec:
    return MetricSpec(name=name, options=options)


def outputs(count: int = 203, *places: int) -> tuple[Tensor, Tensor]:
    """Return logits that are right more often than by chance, and labels."""
    made = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (count, *places), generator=made)
    output = torch.randn(count, CLASSES, *places, generator=made)
    return output + torch.nn.functional.one_hot(target, CLASSES).movedim(-1, 1), target


def computed(specs: list[MetricSpec], output: Tensor, target: Tensor, task: Task = "multiclass") -> Any:
    made = make_metrics(specs, output.shape[1] if output.dim() > 1 else 1, task)
    for a, b in zip(output.split(32), target.split(32), strict=True):
        made.update(a, b)
    return made.compute()


def test_results_are_those_of_scikit_learn() -> None:
    output, target = outputs()
    told = computed(
        [
            spec("accuracy"),
            spec("accuracy", average="macro"),
            spec("top_k", top_k=2),
            spec("f1"),
            spec("f1", average="none"),
            spec("auroc"),
            spec("confusion_matrix"),
            spec("mean_iou"),
        ],
        output,
        target,
    )
    labels, guesses = target.numpy(), output.argmax(1).numpy()
    chances = output.double().softmax(1).numpy()

    assert told["accuracy"] == pytest.approx(oracle.accuracy_score(labels, guesses), rel=1e-6)
    assert told["accuracy_2"] == pytest.approx(oracle.balanced_accuracy_score(labels, guesses), rel=1e-6)
    assert told["top_k"] == pytest.approx(oracle.top_k_accuracy_score(labels, output.numpy(), k=2), rel=1e-6)
    assert told["f1"] == pytest.approx(oracle.f1_score(labels, guesses, average="macro"), rel=1e-6)
    each: Any = oracle.f1_score(labels, guesses, average=None)  # type: ignore[arg-type,unused-ignore]
    assert told["f1_2"] == pytest.approx(each, rel=1e-6)
    assert told["auroc"] == pytest.approx(oracle.roc_auc_score(labels, chances, multi_class="ovr"), rel=1e-5)
    assert told["confusion_matrix"] == oracle.confusion_matrix(labels, guesses).tolist()
    assert told["mean_iou"] == pytest.approx(oracle.jaccard_score(labels, guesses, average="macro"), rel=1e-6)


def test_small_logits_are_no_probabilities() -> None:
    made = torch.Generator().manual_seed(1)
    output, target = torch.rand(64, 3, generator=made), torch.randint(3, (64,), generator=made)
    told = computed([spec("auroc")], output, target)
    expected = oracle.roc_auc_score(target.numpy(), output.double().softmax(1).numpy(), multi_class="ovr")
    assert told["auroc"] == pytest.approx(expected, rel=1e-5)


def test_segmentation_counts_pixels_and_leaves_out_what_is_ignored() -> None:
    output, target = outputs(12, 7, 6)
    target[:, 0] = -100
    told = computed([spec("mean_iou"), spec("accuracy")], output, target)
    kept = (target != -100).numpy()
    labels, guesses = target.numpy()[kept], output.argmax(1).numpy()[kept]

    assert told["mean_iou"] == pytest.approx(oracle.jaccard_score(labels, guesses, average="macro"), rel=1e-6)
    assert told["accuracy"] == pytest.approx(oracle.accuracy_score(labels, guesses), rel=1e-6)


def test_several_labels_at_once() -> None:
    made = torch.Generator().manual_seed(2)
    target = torch.randint(2, (80, 4), generator=made)
    output = torch.randn(80, 4, generator=made) + target
    told = computed([spec("f1"), spec("auroc"), spec("accuracy")], output, target.float(), "multilabel")
    labels, guesses = target.numpy(), (output > 0).long().numpy()

    assert told["f1"] == pytest.approx(oracle.f1_score(labels, guesses, average="macro"), rel=1e-6)
    assert told["auroc"] == pytest.approx(oracle.roc_auc_score(labels, output.numpy()), rel=1e-5)
    assert told["accuracy"] == pytest.approx(float((labels == guesses).mean()), rel=1e-6)


def test_yes_or_no() -> None:
    made = torch.Generator().manual_seed(3)
    target = torch.randint(2, (50, 1), generator=made)
    output = torch.randn(50, 1, generator=made) + target
    told = computed([spec("auroc"), spec("f1")], output, target.float(), "binary")
    labels, guesses = target.ravel().numpy(), (output > 0).long().ravel().numpy()

    assert told["auroc"] == pytest.approx(oracle.roc_auc_score(labels, output.ravel().numpy()), rel=1e-5)
    assert told["f1"] == pytest.approx(oracle.f1_score(labels, guesses), rel=1e-6)


@pytest.mark.parametrize(("task", "width"), [("multilabel", 4), ("binary", 1)])
def test_smoothed_targets_count_as_the_nearer_label(task: Task, width: int) -> None:
    made = torch.Generator().manual_seed(4)
    target = torch.randint(2, (80, width), generator=made)
    output = torch.randn(80, width, generator=made) + target
    specs = [spec("f1"), spec("auroc"), spec("accuracy")]
    assert computed(specs, output, target * 0.9 + 0.05, task) == computed(specs, output, target.float(), task)


def test_cut_into_batches_makes_no_difference() -> None:
    output, target = outputs()
    specs = [spec("f1"), spec("auroc"), spec("mean_iou")]
    whole = make_metrics(specs, CLASSES)
    whole.update(output, target)
    assert whole.compute() == computed(specs, output, target)


def test_a_new_evaluation_forgets_the_last() -> None:
    output, target = outputs()
    made = make_metrics([spec("accuracy")], CLASSES)
    made.update(output, (target + 1) % CLASSES)
    made.reset()
    made.update(output, target)
    expected = np.mean(output.argmax(1).numpy() == target.numpy())
    assert made.compute()["accuracy"] == pytest.approx(expected, rel=1e-6)


def test_nothing_seen_is_not_a_number() -> None:
    made = make_metrics([spec("accuracy")], CLASSES)
    made.update(torch.zeros(2, CLASSES), torch.tensor([-100, -100]))
    value = made.compute()["accuracy"]
    assert isinstance(value, float)
    assert math.isnan(value)


def test_all_problems_come_at_once() -> None:
    wrong = [
        spec("accuracy", colour=1),
        spec("top_k", top_k=9),
        spec("top_k", top_k=True),
        spec("f1", average="best"),
        spec("auroc", thresholds=10**9),
        spec("confusion_matrix", num_classes=3),
    ]
    with pytest.raises(ServiceError) as failure:
        make_metrics(wrong, CLASSES)
    assert failure.value.reason is ErrorReason.FIT_INVALID
    assert all(f"metrics[{index}]" in failure.value.message for index in range(len(wrong)))


def test_numbers_and_lists_are_told_apart() -> None:
    made = make_metrics([spec("accuracy"), spec("confusion_matrix"), spec("f1", average="none")], CLASSES)
    assert made.names == ("accuracy", "confusion_matrix", "f1")
    assert made.scalars == ("accuracy",)
