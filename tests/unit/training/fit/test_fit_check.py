from typing import Any

import pytest
import torch

from tests.support.models.trainable_nets import TwoVectors
from tests.unit.training.fits import ArrayReader, dataset, fit_of, run_fit, shown_core
from tests.unit.training.trainers import tiny
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.fit import fit_check
from trocar_server.training.spec.trainer_spec import LossSpec

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


def test_classes_of_other_names() -> None:
    data, evaluation = dataset(10), dataset(10)
    data.categories, evaluation.categories = ("a", "b", "c", "d", "e"), ("b", "z", "c", "d", "e")
    assert "eval_dataset_id: class 0 is 'b' and in the training set 'a'" in refused(data, evaluation)
    evaluation.categories = ("a", "b", "c", "d")
    assert "eval_dataset_id: class 4 is 'missing' and in the training set 'e'" in refused(data, evaluation)
    for names in ((), data.categories):
        evaluation.categories = names
        fit_of(shown_core(**HEAD), data, evaluation)


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


def test_samples_without_a_label_at_the_beginning_are_no_problem() -> None:
    data = relabelled(10, at0=-100, at1=-100)
    fit = fit_of(shown_core(**HEAD), data, data, epochs=1, batch_size=5, shuffle=False)
    (told,) = [event for event in run_fit(fit) if event.kind == "evaluation"]
    assert "accuracy" in (told.metrics or {})


@pytest.mark.parametrize("ignored", [0, 4])
def test_an_ignored_class_may_come_first(ignored: int) -> None:
    data = relabelled(10, at0=ignored, at1=ignored)
    losses = [{"name": "cross_entropy", "options": {"ignore_index": ignored}}]
    fit_of(shown_core(losses=losses, **HEAD), data)


def test_augmented_batches_too_large_for_memory() -> None:
    large = [{"name": "Resize", "options": {"size": 1024}}]
    message = refused(dataset(10), batch_size=128, augmentations=large)
    assert "augmentations[0] (Resize): a batch of 128 samples" in message


PAIRS: dict[str, Any] = {"losses": [{"name": "contrastive", "selector": "fc"}], **HEAD}
IN_ORDER: dict[str, Any] = {"batch_size": 4, "shuffle": False}


@pytest.mark.parametrize(
    ("count", "evaluated", "fields", "message"),
    [
        (16, 0, {"batch_size": 4}, "shuffle: 'contrastive' pairs the halves of a batch"),
        (16, 0, {**IN_ORDER, "batch_size": 5}, "batch_size: 'contrastive' pairs the halves of a batch"),
        (15, 0, IN_ORDER, "dataset_id: the last batch has 3 samples"),
        (16, 11, IN_ORDER, "eval_dataset_id: the last batch has 3 samples"),
        (16, 8, {**IN_ORDER, "eval_split": 0.5}, "eval_split: 'contrastive' pairs the halves of a batch"),
        (16, 0, {**IN_ORDER, "workers": 2}, "workers: 'contrastive' pairs the halves of a batch"),
    ],
)
def test_pairs_that_would_be_torn_apart(
    count: int, evaluated: int, fields: dict[str, Any], message: str
) -> None:
    evaluation = dataset(evaluated) if evaluated else None
    assert message in refused(dataset(count), evaluation, trainer=PAIRS, **fields)


@pytest.mark.parametrize(("count", "fields"), [(16, IN_ORDER), (15, {**IN_ORDER, "drop_last": True})])
def test_pairs_in_order_train(count: int, fields: dict[str, Any]) -> None:
    core = shown_core(**PAIRS)
    events = run_fit(fit_of(core, dataset(count), dataset(6), epochs=1, **fields))
    assert [event.kind for event in events].count("step") == count // 4


def test_values_of_a_model_without_a_main_output_train() -> None:
    losses = [{"name": "cross_entropy", "selector": "fc"}, {"name": "contrastive", "selector": "fc"}]
    core = shown_core(tiny(TwoVectors, (3,)), losses=losses)
    data, evaluation = dataset(16, 4, (3,)), dataset(8, 4, (3,))
    events = run_fit(fit_of(core, data, evaluation, epochs=1, **IN_ORDER))
    assert [event.kind for event in events].count("evaluation") == 1


class ManyClasses(ArrayReader):
    """Tells of its labels, as of very many, the smallest and the largest."""

    def labels(self, target: str) -> tuple[int, int]:
        return int(self.targets.min()), int(self.targets.max())


def test_of_very_many_classes_none_is_said_to_be_missing() -> None:
    data, evaluation = dataset(10), ManyClasses(dataset(10).images, dataset(10).targets)
    evaluation.targets[:] = torch.tensor([1, 70_000])[torch.arange(10) % 2]
    question = fit_check._Question(LossSpec(name="cross_entropy"), "multiclass")
    assert list(fit_check._label_problems(data, evaluation, question, 70_001)) == []
