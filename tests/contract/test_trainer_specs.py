"""What `Client.train` and `fit` are given arrives as it was, by way of the server's own reader."""

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trocar
from trocar._request.training.fit_parts import FitOptions, fit_spec
from trocar._request.training.trainer_options import options_to_wire
from trocar._wire.trainer_requests import TrainerOptions, trainer_spec
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import fit_pb2, trainer_pb2
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec import trainer_specs

FIT: dict[str, Any] = {
    "epochs": 5,
    "batch_size": 16,
    "shuffle": False,
    "drop_last": True,
    "metrics": ["accuracy", trocar.training.metric("top_k", top_k=2)],
    "augment": [trocar.training.augmentation("RandomCrop", size=[32, 32], padding=4), "RandomHorizontalFlip"],
    "early_stop": trocar.training.early_stop("accuracy", patience=7, min_delta=0.25),
    "checkpoint_every": 11,
    "feature_cache": False,
    "eval_split": 0.25,
    "workers": 2,
}


def read(**options: Any) -> Any:
    return trainer_specs.trainer_spec(trainer_spec(TrainerOptions("resnet18", **options)))


def test_a_trainer_arrives_with_every_option() -> None:
    found = read(
        head=trocar.training.head(10, hidden=[256, 64], dropout=0.5, init="xavier", bias=False, path="fc"),
        trainable=["layer4", "fc"],
        losses=[
            trocar.training.loss_term("cross_entropy", weight=2, label_smoothing=0.1, ignore_index=-1),
            trocar.training.loss_term(
                "mse", at="layer3", teacher=trocar.training.teacher("resnet50", "layer3")
            ),
            trocar.training.loss_term("kl_div", teacher="resnet50", temperature=4.0),
            trocar.training.loss_term("l1", target="depth"),
        ],
        optimizer=trocar.training.adamw(
            lr=1e-3,
            betas=(0.9, 0.98),
            amsgrad=True,
            foreach=None,
            groups=[trocar.training.parameter_group(["layer4", "layer3"], lr=1e-4)],
            in_backward=True,
        ),
        schedule=trocar.training.schedule(
            "step", per="epoch", warmup=3, warmup_start=0.5, step_size=10, gamma=0.5
        ),
        gradient_edits=[
            trocar.training.gradient_edit("fc.*", "clamp", -0.1, 0.1),
            trocar.training.gradient_edit("layer4/grad_out", "zero"),
        ],
        saved_tensors=trocar.training.save_on_disk(
            "1TiB", modules="layer4", min_bytes=7, store_dtype="bf16", device_bytes="1KiB"
        ),
        regularizers=trocar.training.regularizer("fc.weight", 0.5, norm="l1"),
        train_mode="layer1",
        activation_checkpointing=["layer2"],
        clip_norm=1.5,
        accumulation=4,
        precision="bf16",
        ema_decay=0.999,
        seed=1 << 62,
        deterministic=True,
        on_nonfinite="skip",
        ttl_s=60.5,
    )
    dumped = found.model_dump(mode="json")
    assert dumped["head"] == {
        "classes": 10, "hidden": [256, 64], "dropout": 0.5, "init": "xavier", "bias": False, "path": "fc",
        "of": "",
    }  # fmt: skip
    assert dumped["trainable"] == ["layer4", "fc"]
    losses = dumped["losses"]
    assert [term["name"] for term in losses] == ["cross_entropy", "mse", "kl_div", "l1"]
    assert losses[0]["options"] == {"label_smoothing": 0.1, "ignore_index": -1}
    assert [term["teacher"] and tuple(term["teacher"].values()) for term in losses] == [
        None, ("resnet50", "layer3"), ("resnet50", ""), None,
    ]  # fmt: skip
    assert (losses[0]["weight"], losses[1]["selector"], losses[3]["target"]) == (2, "layer3", "depth")
    optimizer = dumped["optimizer"]
    assert optimizer["options"] == {"lr": 1e-3, "betas": [0.9, 0.98], "amsgrad": True, "foreach": None}
    assert optimizer["groups"] == [{"parameters": ["layer4", "layer3"], "options": {"lr": 1e-4}}]
    assert (optimizer["name"], optimizer["in_backward"]) == ("adamw", True)
    assert dumped["schedule"] == {
        "name": "step", "options": {"step_size": 10, "gamma": 0.5}, "per": "epoch", "warmup": 3,
        "warmup_start": 0.5,
    }  # fmt: skip
    assert [(rule["selector"], rule["name"], rule["options"]) for rule in dumped["gradient_edits"]] == [
        ("fc.*", "clamp", {"low": -0.1, "high": 0.1}),
        ("layer4/grad_out", "zero", {}),
    ]
    assert dumped["saved_tensors"] == {
        "store": "spool", "budget_bytes": 1 << 40, "modules": ["layer4"], "min_bytes": 7,
        "store_dtype": "bf16", "device_bytes": 1024,
    }  # fmt: skip
    assert dumped["regularizers"] == [{"parameters": ["fc.weight"], "norm": "l1", "weight": 0.5}]
    rest = {
        "train_mode": ["layer1"], "activation_checkpointing": ["layer2"], "clip_norm": 1.5, "accumulation": 4,
        "precision": "bf16", "ema_decay": 0.999, "seed": 1 << 62, "deterministic": True,
        "on_nonfinite": "skip", "ttl_s": 60.5, "model_id": "resnet18",
    }  # fmt: skip
    assert {name: dumped[name] for name in rest} == rest


def test_what_is_not_said_is_the_servers_own() -> None:
    assert read() == trainer_specs.trainer_spec(trainer_pb2.TrainerSpec(model_id="resnet18"))


def test_a_fit_arrives_with_every_option() -> None:
    message = fit_spec(FitOptions("d", **FIT))
    message.dataset_id, message.eval_dataset_id = "train", "test"
    found = trainer_specs.fit_spec(message).model_dump(mode="json")
    assert [(metric["name"], metric["options"]) for metric in found["metrics"]] == [
        ("accuracy", {}), ("top_k", {"top_k": 2}),
    ]  # fmt: skip
    assert [(change["name"], change["options"]) for change in found["augmentations"]] == [
        ("RandomCrop", {"size": [32, 32], "padding": 4}),
        ("RandomHorizontalFlip", {}),
    ]
    assert found["early_stop"] == {
        "metric": "accuracy", "patience": 7, "min_delta": 0.25, "is_higher_better": True,
    }  # fmt: skip
    assert found["feature_cache"]["mode"] == "off"
    names = (
        "dataset_id",
        "eval_dataset_id",
        "epochs",
        "batch_size",
        "shuffle",
        "drop_last",
        "checkpoint_every",
        "eval_split",
        "workers",
    )
    assert [found[name] for name in names] == ["train", "test", 5, 16, False, True, 11, 0.25, 2]
    with pytest.raises(ValueError, match="eval and eval_split"):
        fit_spec(FitOptions("d", eval="e", eval_split=0.1))


Option = st.one_of(
    st.booleans(),
    st.integers(-(1 << 53), 1 << 53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


@given(Option)
def test_an_option_arrives_as_the_value_that_it_was(value: object) -> None:
    found = read(optimizer=trocar.training.sgd(lr=0.1, momentum=value)).optimizer.options["momentum"]
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)
    if isinstance(value, int):
        assert type(found) is type(value)
    if isinstance(found, float):
        assert struct.pack("d", found) == struct.pack("d", float(str(value)))


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), np.array([0.5, 1.5]), np.bool_(True)])
def test_numbers_of_numpy_arrive_as_plain_ones(value: Any) -> None:
    assert read(optimizer=trocar.training.sgd(momentum=value)).optimizer.options["momentum"] == value.tolist()


@pytest.mark.parametrize("value", [1e30, 1e16, -1e300, 5e-324])
def test_a_large_float_stays_a_float(value: float) -> None:
    found = read(optimizer=trocar.training.sgd(lr=value)).optimizer.options["lr"]
    assert (type(found), found) == (float, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_client_that_sends_what_is_not_finite_is_told(value: float) -> None:
    message = trainer_spec(TrainerOptions("resnet18", optimizer=trocar.training.sgd()))
    message.optimizer.options["lr"] = value
    with pytest.raises(ServiceError, match="finite") as caught:
        trainer_specs.trainer_spec(message)
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
    fit = fit_pb2.FitSpec(dataset_id="d", metrics=[fit_pb2.MetricSpec(name="f1")])
    fit.metrics[0].options["threshold"] = value
    with pytest.raises(ServiceError, match="finite") as caught:
        trainer_specs.fit_spec(fit)
    assert caught.value.reason is ErrorReason.FIT_INVALID


def test_options_are_told_apart_from_what_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="option weight is a object"):
        options_to_wire({"weight": object()})
    for value in (math.nan, [1.0, math.inf], {"a": -math.inf}):
        with pytest.raises(ValueError, match="options are finite numbers"):
            options_to_wire({"lr": value})
    with pytest.raises(ValueError, match="2\\^53"):
        options_to_wire({"n": (1 << 53) + 1})
