"""What `Client.train` and `fit` refuse before anything is sent, and how a batch goes on the wire."""

import math
from typing import Any

import numpy as np
import pytest

import trocar
from trocar._request.training.fit_parts import FitOptions, fit_spec
from trocar._wire.trainer_requests import Batches, TrainerOptions, trainer_spec, wire_batch
from trocar_api.v1 import tensor_pb2
from trocar_api.v1 import trainer_pb2 as pb

IMAGES = np.zeros((2, 3, 4, 4), np.float32)
FIT: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 8,
    "shuffle": True,
    "drop_last": False,
    "metrics": (),
    "augment": (),
    "early_stop": None,
    "checkpoint_every": 0,
    "feature_cache": True,
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"head": "10"}, "head is '10'; give the number of classes"),
        ({"head": True}, "head is True; give the number of classes"),
        ({"head": trocar.training.head("10")}, "classes is '10'; give a whole number"),  # type: ignore[arg-type]
        ({"head": trocar.training.head(10, hidden=[2.5])}, "hidden is 2.5"),  # type: ignore[list-item]
        ({"trainable": 3}, "trainable is 3; give one selector or a list"),
        ({"trainable": ["fc", None]}, "trainable is a list; give one selector"),
        ({"trainable": None}, "trainable is None"),
        ({"losses": [3]}, "losses is 3; give names, or trocar.training.loss_term"),
        ({"losses": {"mse": 1}}, "losses is a dict; give one or a list"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; create one with trocar.training.sgd"),
        ({"optimizer": trocar.training.adam}, "optimizer is a function; create one"),
        ({"schedule": "cosine"}, "schedule is 'cosine'; create one with trocar.training.schedule"),
        (
            {"gradient_edits": "fc.*"},
            "gradient_edits is 'fc.*'; create rules with trocar.training.gradient_edit",
        ),
        ({"gradient_edits": [("fc.*", -1, 1)]}, "gradient_edits is a tuple; create rules"),
        ({"saved_tensors": "spool"}, "saved_tensors is 'spool'; give trocar.training.save_on_disk"),
        ({"regularizers": 0.1}, "regularizers is 0.1; create them with trocar.training.regularizer"),
        ({"accumulation": 1.5}, "accumulation is 1.5; give a whole number"),
        ({"accumulation": True}, "accumulation is True; give a whole number"),
        ({"clip_norm": "1"}, "clip_norm is '1'; give a number"),
        ({"precision": 16}, "precision is 16; give a string"),
        ({"deterministic": 1}, "deterministic is 1; give True or False"),
        ({"seed": "x" * 99}, "seed is a str; give a whole number"),
        ({"model_id": 3}, "model_id is 3; give a string"),
    ],
)
def test_a_wrong_type_is_answered_with_what_to_give(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        trainer_spec(TrainerOptions(**{"model_id": "resnet18", **options}))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip_norm": math.nan}, "clip_norm is nan; give a finite number"),
        ({"ttl_s": math.inf}, "ttl_s is inf"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808, which is out of range"),
        ({"accumulation": 1 << 31}, "out of range"),
        ({"optimizer": trocar.training.sgd(lr=math.nan)}, "option lr is nan"),
        (
            {"gradient_edits": trocar.training.gradient_edit("fc", "clamp", -math.inf, 1)},
            "option low is -inf",
        ),
    ],
)
def test_a_number_that_cannot_be_sent_is_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        trainer_spec(TrainerOptions("resnet18", **options))


def test_parts_of_parts_are_checked_where_they_are_made() -> None:
    with pytest.raises(TypeError, match="groups is a dict; create groups with"):
        trocar.training.sgd(groups=[{"params": "fc"}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="teacher is 3; give the id of a model"):
        trocar.training.loss_term("mse", teacher=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weights of the classes are class_weights="):
        trocar.training.loss_term("cross_entropy", weight=[1, 2, 0.5])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one number for each class"):
        trocar.training.loss_term("cross_entropy", class_weights=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        trocar.training.loss_term("cross_entropy", class_weights=[1, -2])
    with pytest.raises(TypeError, match="parameters is 3"):
        trocar.training.regularizer(3, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"epochs": 1.5}, "epochs is 1.5; give a whole number"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"shuffle": "no"}, "shuffle is 'no'; give True or False"),
        ({"metrics": [3]}, "metrics is 3; give names, or trocar.training.metric"),
        ({"metrics": None}, "metrics is None; give one or a list"),
        (
            {"augment": [len]},
            "augment is a builtin_function_or_method; give names, or trocar.training.augmentation",
        ),
        ({"early_stop": 3}, "early_stop is 3; create it with trocar.training.early_stop"),
        ({"early_stop": trocar.training.early_stop(3)}, "metric is 3; give a string"),  # type: ignore[arg-type]
        ({"checkpoint_every": 2.0}, "checkpoint_every is 2.0"),
    ],
)
def test_a_fit_of_wrong_types_is_answered_with_what_to_give(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        fit_spec(FitOptions("d", **{**FIT, **options}))
    assert expected in str(caught.value)


def test_one_part_need_not_be_in_a_list() -> None:
    rule, term, penalty = (
        trocar.training.gradient_edit("fc", "clamp", -1),
        trocar.training.loss_term("mse"),
        trocar.training.regularizer("fc", 1),
    )
    alone = trainer_spec(
        TrainerOptions("m", trainable="fc", gradient_edits=rule, losses=term, regularizers=penalty)
    )
    listed = trainer_spec(
        TrainerOptions("m", trainable=["fc"], gradient_edits=[rule], losses=[term], regularizers=[penalty])
    )
    assert alone == listed
    assert trainer_spec(TrainerOptions("m", losses="mse")) == trainer_spec(
        TrainerOptions("m", losses=("mse",))
    )
    assert fit_spec(FitOptions("d", **{**FIT, "metrics": "f1"})) == fit_spec(
        FitOptions("d", **{**FIT, "metrics": ["f1"]})
    )


def test_a_clamp_may_have_one_limit() -> None:
    assert dict(trocar.training.gradient_edit("fc", "clamp", high=0.5).to_wire().options) == {"high": 0.5}
    assert dict(trocar.training.gradient_edit("fc", "clamp", -0.5).to_wire().options) == {"low": -0.5}


def head_of(targets: object, inputs: object = IMAGES) -> tuple[pb.TrainRequest, list[bytes]]:
    call = wire_batch(inputs, targets).call("t", pb.TRAIN_KIND_STEP, 7)
    return pb.TrainRequest.FromString(call.head), [bytes(payload) for payload in call.payloads]


def test_a_batch_goes_with_its_number_and_its_targets_last() -> None:
    head, payloads = head_of([1, 0])
    assert (head.trainer_id, head.kind, head.number) == ("t", pb.TRAIN_KIND_STEP, 7)
    (target,) = head.targets
    assert (target.name, target.tensor.dtype, list(target.tensor.shape)) == ("", tensor_pb2.DTYPE_INT64, [2])
    assert payloads == [IMAGES.tobytes(), np.array([1, 0], np.int64).tobytes()]


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (np.full((2, 3, 8, 8), -0.0, np.float32), [1, 0]),
        (np.ones((2, 3, 8, 8), np.float32), np.array([1, 0])),
        (np.ones((3, 3, 8, 8), np.float32), [1, 0, 2]),
        (np.ones((2, 3, 8, 8), np.float64), [1, 0]),
        (np.ones((2, 3, 8, 8), ">f4"), [1, 0]),
        (np.ones((8, 8, 3, 2), np.float32).T, [1, 0]),
        (np.ones((2, 3, 8, 8), np.float32), [1.0, 0.5]),
        (np.ones((2, 3, 8, 8), np.float32), np.arange(4)[::2]),
        (np.ones((2, 3, 8, 8), np.float32), {"label": [1, 0]}),
        (np.ones((2, 3, 8, 8), np.float32), None),
        (np.ones((2, 8, 8, 3), np.uint8), [1, 0]),
        (np.ones((1, 8, 8, 3), np.uint8), [1]),
        (["a cat", "a dog"], [1, 0]),
    ],
)
def test_a_batch_of_a_layout_that_came_before_is_the_batch_as_converted(inputs: Any, targets: object) -> None:
    batches = Batches()
    for first in (np.zeros((2, 3, 8, 8), np.float32), np.zeros((1, 8, 8, 3), np.uint8), inputs):
        batches.convert(first, targets if first is inputs else [0] * len(first))
    expected, found = wire_batch(inputs, targets), batches.convert(inputs, targets)
    assert found.described == expected.described
    assert [bytes(payload) for payload in found.payloads] == [bytes(each) for each in expected.payloads]


def test_the_arrays_of_a_batch_are_sent_without_a_copy() -> None:
    batches, labels = Batches(), np.array([1, 0])
    for _ in range(2):
        batch = batches.convert(IMAGES, labels)
        sent = [np.frombuffer(payload, np.uint8).ctypes.data for payload in batch.payloads]
        assert sent == [IMAGES.ctypes.data, labels.ctypes.data]


def test_descriptions_of_batches_are_bounded() -> None:
    batches = Batches()
    for size in range(1, 600):
        batches.convert(np.zeros((1, size), np.float32), [0])
    assert len(batches._described) <= 256


def test_several_targets_have_names() -> None:
    depth = np.ones((2, 4, 4), np.float32)
    head, payloads = head_of({"label": np.array([1, 0], np.int32), "depth": depth})
    assert [target.name for target in head.targets] == ["label", "depth"]
    assert payloads[1:] == [np.array([1, 0], np.int32).tobytes(), depth.tobytes()]


def test_a_loss_may_do_without_targets() -> None:
    head, payloads = head_of(None)
    assert (len(head.targets), len(payloads)) == (0, 1)


def test_an_evaluation_has_no_number() -> None:
    call = wire_batch(IMAGES, [0, 1]).call("t", pb.TRAIN_KIND_EVALUATE)
    assert not pb.TrainRequest.FromString(call.head).HasField("number")


@pytest.mark.parametrize(
    ("targets", "kind", "expected"),
    [
        ("cat", TypeError, "targets: a str; give labels or numbers"),
        (3, TypeError, "targets: a int"),
        (["cat", "dog"], TypeError, "targets: a list of"),
        ([[1, 2], [3]], ValueError, "targets: the entries of the list have different lengths"),
        ({"label": "cat"}, TypeError, "target 'label': a str"),
        ({3: [1, 2]}, TypeError, "the name of a target is 3"),
        ({1, 2}, TypeError, "targets: a set"),
    ],
)
def test_targets_that_are_none_are_refused(targets: Any, kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        wire_batch(IMAGES, targets)
