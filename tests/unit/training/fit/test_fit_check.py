from typing import Any

import pytest
import torch

from tests.unit.training.fits import ArrayReader, dataset, fit_of, shown_core
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

HEAD: dict[str, Any] = {"trainable": ["fc"]}


def refused(train: ArrayReader, evaluation: ArrayReader | None = None, **fields: Any) -> str:
    trainer = fields.pop("trainer", HEAD)
    core = shown_core(**trainer)
    before = {name: value.clone() for name, value in core.module.state_dict().items()}
    with pytest.raises(ServiceError) as failure:
        fit_of(core, train, evaluation, **fields)
    assert failure.value.reason is ErrorReason.FIT_INVALID
    assert core.step_count == 0
    assert all(torch.equal(before[name], value) for name, value in core.module.state_dict().items())
    return failure.value.message


def relabelled(count: int, **changes: int) -> ArrayReader:
    data = dataset(count)
    for place, label in changes.items():
        data.targets[int(place.removeprefix("at"))] = label
    return data


def test_labels_out_of_range() -> None:
    message = refused(relabelled(10, at3=5, at4=-1))
    assert "dataset_id: labels -1, 5 are out of range" in message
    assert "0 to 4" in message


def test_ignored_labels_are_not_out_of_range() -> None:
    fit_of(shown_core(**HEAD), relabelled(10, at3=-100))


def test_evaluation_labels_unknown_to_the_head() -> None:
    assert "eval_dataset_id: labels 7" in refused(dataset(10), relabelled(10, at0=7))


def test_class_missing_from_the_evaluation_set() -> None:
    evaluation = dataset(10)
    evaluation.targets[evaluation.targets == 3] = 2
    assert "classes 3 are in the training set and never" in refused(dataset(10), evaluation)


def test_wrong_target_shape() -> None:
    data = dataset(10)
    data.targets = data.targets.reshape(10, 1).repeat(1, 2)
    assert "dataset_id" in refused(data)


def test_wrong_input_shape() -> None:
    assert "dataset_id" in refused(dataset(10, shape=(1, 8, 8)))


def test_empty_data_sets() -> None:
    message = refused(dataset(0), dataset(0))
    assert "dataset_id: the data set is empty" in message
    assert "eval_dataset_id: the data set is empty" in message


def test_batch_larger_than_the_data_set_with_drop_last() -> None:
    assert "batch_size: 64" in refused(dataset(10), batch_size=64, drop_last=True)
    fit_of(shown_core(**HEAD), dataset(10), batch_size=64)


def test_accumulation_that_never_ends() -> None:
    assert "no update" in refused(dataset(10), batch_size=10, trainer={**HEAD, "accumulation": 4})


def test_a_split_beside_an_evaluation_set() -> None:
    message = refused(dataset(10), dataset(10), eval_dataset_id="e", eval_split=0.1)
    assert "eval_split: there is a data set to evaluate on" in message


def test_a_split_without_a_sample() -> None:
    assert "eval_split: 0.05 of 10 samples is less than one" in refused(
        dataset(10), dataset(0), eval_split=0.05
    )


def test_a_split_need_not_have_every_class() -> None:
    evaluation = dataset(10)
    evaluation.targets[evaluation.targets == 3] = 2
    fit_of(shown_core(**HEAD), dataset(10), evaluation, eval_split=0.5)


def test_early_stop_needs_a_number_of_an_evaluation() -> None:
    stop = {"metric": "acuracy"}
    assert "accuracy" in refused(dataset(10), dataset(10), early_stop=stop)
    matrix: dict[str, Any] = {
        "early_stop": {"metric": "confusion_matrix"},
        "metrics": [{"name": "confusion_matrix"}],
    }
    assert "not one number" in refused(dataset(10), dataset(10), **matrix)
    assert "it needs evaluations" in refused(dataset(10), early_stop={"metric": "loss"})


def test_plateau_needs_evaluations() -> None:
    assert "plateau" in refused(dataset(10), trainer={**HEAD, "schedule": {"name": "plateau"}})


def test_metrics_of_labels_need_labels() -> None:
    data = dataset(10)
    data.targets = torch.rand(10, 5)
    trainer: dict[str, Any] = {**HEAD, "losses": [{"name": "mse"}]}
    assert "metrics" in refused(data, data, trainer=trainer, metrics=[{"name": "f1"}])
    fit_of(shown_core(**trainer), data, data)


def test_all_problems_come_in_one_error() -> None:
    message = refused(
        relabelled(10, at3=9),
        dataset(0),
        batch_size=16,
        drop_last=True,
        augmentations=[{"name": "Lambda"}, {"name": "RandomCrop"}],
        metrics=[{"name": "f1", "options": {"colour": 1}}],
        early_stop={"metric": "speed"},
    )
    for part in (
        "batch_size",
        "labels 9",
        "eval_dataset_id",
        "augmentations[0]",
        "augmentations[1]",
        "metrics[0]",
        "early_stop.metric",
    ):
        assert part in message
