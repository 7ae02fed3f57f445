"""Predictions that are counted against NumPy: labels that the loss ignores are no predictions."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trocar_server.training.spec.trainer_spec import LossSpec
from trocar_server.training.step.prediction_count import PredictionCount, prediction_count

CLASSES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, -100, 3, 1, 2])
MAPS = torch.randint(0, 4, (2, 3, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("output", "target", "options"),
    [
        (CLASSES, LABELS, {}),
        (CLASSES, LABELS.masked_fill(LABELS == -100, 2), {"ignore_index": 1}),
        (PIXELS, MAPS, {}),
        (PIXELS, MAPS, {"ignore_index": 3}),
    ],
)
def test_labels_that_count_are_counted(output: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    count = prediction_count([LossSpec(name="cross_entropy", options=options)], output, {"": target})
    counted = target.numpy() != options.get("ignore_index", -100)
    is_correct = np.argmax(output.numpy(), 1) == target.numpy()
    assert count == PredictionCount(int((is_correct & counted).sum()), int(counted.sum()))


@pytest.mark.parametrize(("label", "options"), [(156, {}), (255, {"ignore_index": -1})])
def test_no_label_of_8_bits_is_the_negative_one_that_the_loss_ignores(
    label: int, options: dict[str, Any]
) -> None:
    """-100 and -1 are 156 and 255 in uint8."""
    target = torch.tensor([label, 3], dtype=torch.uint8)
    output = torch.eye(256)[[label, label]]
    count = prediction_count([LossSpec(name="cross_entropy", options=options)], output, {"": target})
    assert count == PredictionCount(correct_count=1, label_count=2)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("mse", CLASSES),
        ("cross_entropy", CLASSES.softmax(1)),
        ("cross_entropy", LABELS[:, None].repeat(1, 2)),
    ],
)
def test_without_a_class_for_each_prediction_nothing_is_counted(loss: Any, target: Tensor) -> None:
    assert prediction_count([LossSpec(name=loss)], CLASSES, {"": target}) is None
