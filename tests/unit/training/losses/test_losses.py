"""Losses against torch's own, bit for bit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.losses.loss_function import LossFunction, main_output
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
MAPS = torch.randint(0, 4, (2, 3, 5), generator=torch.Generator().manual_seed(2))
SOFT = torch.softmax(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), 1)
WEIGHTS = [0.5, 1.0, 2.0, 0.1]
TEACHER: Any = TeacherSpec(model_id="t", selector="fc")


def _loss(name: Any, value: Tensor, target: Tensor | None, **options: Any) -> Tensor:
    """Compute one loss as a trainer does: checked, then computed."""
    loss = LossFunction([LossSpec(name=name, options=options)])
    targets = {} if target is None else {"": target}
    loss.check_targets(targets, len(value), {0: value.shape})
    total, _ = loss(value, {}, targets)
    return total


@pytest.mark.parametrize(
    ("name", "value", "target", "options", "oracle"),
    [
        ("cross_entropy", LOGITS, LABELS, {}, F.cross_entropy),
        (
            "cross_entropy",
            LOGITS,
            LABELS,
            {"label_smoothing": 0.1, "class_weights": WEIGHTS, "ignore_index": 1},
            lambda v, t: F.cross_entropy(v, t, torch.tensor(WEIGHTS), ignore_index=1, label_smoothing=0.1),
        ),
        (
            "cross_entropy",
            LOGITS,
            LABELS,
            {"reduction": "sum"},
            lambda v, t: F.cross_entropy(v, t, reduction="sum"),
        ),
        ("cross_entropy", LOGITS, SOFT, {}, F.cross_entropy),
        ("cross_entropy", PIXELS, MAPS, {}, F.cross_entropy),
        (
            "cross_entropy",
            PIXELS,
            MAPS,
            {"class_weights": WEIGHTS, "ignore_index": 255},
            lambda v, t: F.cross_entropy(v, t, torch.tensor(WEIGHTS), ignore_index=255),
        ),
        ("bce_with_logits", LOGITS, SOFT, {}, F.binary_cross_entropy_with_logits),
        (
            "bce_with_logits",
            LOGITS,
            SOFT,
            {"pos_weight": WEIGHTS},
            lambda v, t: F.binary_cross_entropy_with_logits(v, t, pos_weight=torch.tensor(WEIGHTS)),
        ),
        (
            "bce_with_logits",
            PIXELS,
            (PIXELS > 1).float(),
            {"pos_weight": WEIGHTS},
            lambda v, t: F.binary_cross_entropy_with_logits(
                v, t, pos_weight=torch.tensor(WEIGHTS).reshape(4, 1, 1)
            ),
        ),
        (
            "bce_with_logits",
            LOGITS,
            SOFT,
            {"pos_weight": 3.0},
            lambda v, t: F.binary_cross_entropy_with_logits(v, t, pos_weight=torch.tensor([3.0])),
        ),
        (
            "bce_with_logits",
            PIXELS,
            (PIXELS > 1).float(),
            {"class_weights": WEIGHTS},
            lambda v, t: F.binary_cross_entropy_with_logits(v, t, torch.tensor(WEIGHTS).reshape(4, 1, 1)),
        ),
        ("mse", LOGITS, SOFT, {}, F.mse_loss),
        ("l1", LOGITS, SOFT, {"reduction": "sum"}, lambda v, t: F.l1_loss(v, t, reduction="sum")),
        ("huber", LOGITS, SOFT, {"delta": 0.3}, lambda v, t: F.huber_loss(v, t, delta=0.3)),
        (
            "kl_div",
            LOGITS,
            SOFT,
            {},
            lambda v, t: F.kl_div(F.log_softmax(v, 1), t, reduction="batchmean"),
        ),
        (
            "kl_div",
            LOGITS,
            torch.eye(4)[LABELS],  # a probability may be 0
            {},
            lambda v, t: F.kl_div(F.log_softmax(v, 1), t, reduction="batchmean"),
        ),
        (
            "kl_div",
            LOGITS,
            SOFT.log(),
            {"temperature": 2.0, "log_target": True},
            lambda v, t: F.kl_div(F.log_softmax(v / 2, 1), t, reduction="batchmean", log_target=True) * 4,
        ),
        ("l1_norm", LOGITS, None, {}, lambda v, t: v.abs().mean()),
        ("l2_norm", LOGITS, None, {}, lambda v, t: (v**2).mean()),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_torch(
    name: str, value: Tensor, target: Tensor | None, options: dict[str, Any], oracle: Callable[..., Tensor]
) -> None:
    mine, theirs = (value.clone().requires_grad_() for _ in range(2))
    total, expected = _loss(name, mine, target, **options), oracle(theirs, target)
    assert torch.equal(total, expected)
    total.backward()
    expected.backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_a_student_learns_from_a_teacher_at_a_temperature() -> None:
    loss = LossFunction([LossSpec(name="kl_div", teacher=TEACHER, options={"temperature": 4.0})])
    teacher = LOGITS.flip(0)
    total, terms = loss(LOGITS, {}, {}, {TEACHER: teacher})
    expected = F.kl_div(F.log_softmax(LOGITS / 4, 1), F.softmax(teacher / 4, 1), reduction="batchmean")
    assert torch.equal(total, expected * 16)
    assert loss.teachers == (TEACHER,)
    assert list(terms) == ["kl_div"]


def test_terms_are_weighted_and_summed_in_their_order() -> None:
    specs = [
        LossSpec(name="cross_entropy", weight=0.7, target="label"),
        LossSpec(name="mse", weight=0.2, selector="layer4", teacher=TEACHER),
        LossSpec(name="l1_norm", weight=0.1, selector="layer4"),
        LossSpec(name="mse", target="vector"),
        LossSpec(name="l1_norm", selector="layer4"),
    ]
    loss = LossFunction(specs)
    tap, other, vector = torch.rand(6, 3), torch.rand(6, 3), torch.rand(6, 4)
    total, terms = loss(LOGITS, {"layer4": tap}, {"label": LABELS, "vector": vector}, {TEACHER: other})
    parts = [
        F.cross_entropy(LOGITS, LABELS),
        F.mse_loss(tap, other),
        tap.abs().mean(),
        F.mse_loss(LOGITS, vector),
        tap.abs().mean(),
    ]
    assert torch.equal(total, parts[0] * 0.7 + parts[1] * 0.2 + parts[2] * 0.1 + parts[3] + parts[4])
    assert list(terms) == ["cross_entropy", "mse:layer4", "l1_norm:layer4", "mse", "l1_norm:layer4#2"]
    assert all(torch.equal(term, part) for term, part in zip(terms.values(), parts, strict=True))
    assert loss.selectors == ("layer4",)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint64])
def test_labels_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    assert torch.equal(_loss("cross_entropy", LOGITS, LABELS.to(dtype)), F.cross_entropy(LOGITS, LABELS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_numbers_take_the_dtype_of_the_value(dtype: torch.dtype) -> None:
    target = (LOGITS > 0).to(dtype)
    assert torch.equal(_loss("mse", LOGITS, target), F.mse_loss(LOGITS, target.float()))


class Outputs(NamedTuple):
    """What GoogLeNet returns in train mode."""

    logits: Tensor
    aux: Tensor


@pytest.mark.parametrize("output", [LOGITS, Outputs(LOGITS, SOFT), {"out": LOGITS, "aux": SOFT}, (LOGITS,)])
def test_the_main_output_is_found(output: Any) -> None:
    assert main_output(output) is LOGITS


@pytest.mark.parametrize("output", [(LOGITS, SOFT), {"a": LOGITS}, [], None])
def test_an_output_without_a_main_part_is_refused(output: Any) -> None:
    with pytest.raises(ServiceError, match="set the `selector` of each loss") as caught:
        main_output(output)
    assert caught.value.reason is ErrorReason.TRAINER_INVALID


NAN = torch.full((6, 4), float("nan"))


@pytest.mark.parametrize(
    ("name", "target", "options", "message"),
    [
        (
            "cross_entropy",
            LABELS + 1,
            {},
            "labels from 1 to 4; they must be from 0 to 3: the model has 4 classes",
        ),
        ("cross_entropy", LABELS - 1, {}, "labels from -1 to 2"),
        ("cross_entropy", torch.full((6,), 2**64 - 100, dtype=torch.uint64), {}, "labels from"),
        ("cross_entropy", torch.full((6,), -100), {}, "has only labels equal to ignore_index"),
        ("cross_entropy", LABELS[:5], {}, "has 5 entries for a batch of 6"),
        ("cross_entropy", torch.tensor(3), {}, "a single number for a batch of 6"),
        ("cross_entropy", LABELS[:, None], {}, r"has shape \(6, 1\); labels for .* have shape \(6,\)"),
        ("cross_entropy", LABELS.float(), {}, "has dtype float32; labels are integers"),
        ("cross_entropy", SOFT[:, :3], {}, r"has shape \(6, 3\); it must be that of the value, \(6, 4\)"),
        ("cross_entropy", NAN, {}, "not finite"),
        ("cross_entropy", SOFT + 1j, {}, "complex64"),
        ("bce_with_logits", SOFT * 3, {}, "outside of 0 to 1"),
        ("bce_with_logits", LABELS, {}, r"has shape \(6,\)"),
        ("mse", SOFT[:, :1], {}, r"has shape \(6, 1\); it must be"),
        ("mse", NAN, {}, "not finite"),
        ("kl_div", SOFT * 2, {}, "not a list of probabilities"),
        ("kl_div", -SOFT, {}, "not a list of probabilities"),
        ("kl_div", LABELS, {}, "has shape"),
        ("kl_div", SOFT, {"log_target": True}, "not a list of probabilities"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_the_pass(
    name: str, target: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        _loss(name, LOGITS, target, **options)
    assert caught.value.reason is ErrorReason.TARGET_REJECTED


def test_an_ignored_label_may_be_out_of_range() -> None:
    labels = LABELS.clone()
    labels[0] = 255
    total = _loss("cross_entropy", LOGITS, labels, ignore_index=255)
    assert torch.equal(total, F.cross_entropy(LOGITS, labels, ignore_index=255))


@pytest.mark.parametrize(
    ("spec", "targets", "message"),
    [
        (LossSpec(name="mse"), {}, "needs one target, or the name of a target; the batch has none"),
        (LossSpec(name="mse"), {"a": SOFT, "b": SOFT}, "the batch has 'a', 'b'"),
        (LossSpec(name="mse", target="c"), {"a": SOFT}, "needs a target 'c'; the batch has 'a'"),
    ],
)
def test_a_missing_target_is_refused(spec: LossSpec, targets: dict[str, Tensor], message: str) -> None:
    loss = LossFunction([spec])
    with pytest.raises(ServiceError, match=message) as caught:
        loss.check_targets(targets, 6)
    assert caught.value.reason is ErrorReason.TARGET_REJECTED
    with pytest.raises(ServiceError, match=message):
        loss(LOGITS, {}, targets)


def test_sizes_that_are_not_known_before_the_pass_are_checked_behind_it() -> None:
    loss = LossFunction([LossSpec(name="cross_entropy")])
    maps = MAPS[:, :, :4]
    loss.check_targets({"": maps}, 2, {0: (None, 4, None, None)})
    with pytest.raises(ServiceError, match=r"have shape \(2, 3, 5\)"):
        loss(PIXELS, {}, {"": maps})
    with pytest.raises(ServiceError, match=r"labels for values of shape \(batch, 4, \?, \?\)"):
        loss.check_targets({"": maps[:, 0]}, 2, {0: (None, 4, None, None)})


@pytest.mark.parametrize("known", [{}, {0: (None, None)}, {0: (None, 5)}], ids=["none", "size", "other"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_labels_are_compared_with_the_classes_of_the_value_before_the_loss_is_computed(
    known: Any, device: str
) -> None:
    """On a GPU the computation itself would break the process's CUDA context."""
    loss = LossFunction([LossSpec(name="cross_entropy")])
    targets = {"": LABELS + 1}
    counts = loss.check_targets(targets, 6, known)
    with pytest.raises(ServiceError, match="they must be from 0 to 3: the model has 4") as caught:
        loss(LOGITS.to(device), {}, targets, counts=counts)
    assert caught.value.reason is ErrorReason.TARGET_REJECTED


def test_a_teacher_of_another_shape_is_refused() -> None:
    loss = LossFunction([LossSpec(name="mse", teacher=TEACHER)])
    with pytest.raises(ServiceError, match=r"the teacher's value has shape \(6, 1\), this one \(6, 4\)"):
        loss(LOGITS, {}, {}, {TEACHER: LOGITS[:, :1]})


@pytest.mark.parametrize(
    ("name", "target", "options", "oracle"),
    [
        ("cross_entropy", LABELS, {}, F.cross_entropy),
        (
            "cross_entropy",
            LABELS,
            {"class_weights": WEIGHTS},
            lambda v, t: F.cross_entropy(v, t, torch.tensor(WEIGHTS)),
        ),
        ("cross_entropy", SOFT, {}, F.cross_entropy),
        (
            "bce_with_logits",
            SOFT,
            {"pos_weight": WEIGHTS},
            lambda v, t: F.binary_cross_entropy_with_logits(v, t, pos_weight=torch.tensor(WEIGHTS)),
        ),
        ("mse", SOFT, {}, F.mse_loss),
        ("l1", SOFT, {}, F.l1_loss),
        ("huber", SOFT, {}, F.huber_loss),
        ("kl_div", SOFT, {}, lambda v, t: F.kl_div(F.log_softmax(v, 1), t, reduction="batchmean")),
    ],
)
def test_under_autocast_a_loss_is_that_of_torch(
    name: Any, target: Tensor, options: dict[str, Any], oracle: Callable[..., Tensor]
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = LOGITS @ torch.eye(4)
        expected = oracle(logits, target)
        total = _loss(name, logits, target, **options)
    assert logits.dtype is torch.bfloat16
    assert torch.equal(total, expected)
    assert total.dtype == expected.dtype


@pytest.mark.parametrize("name", ["cross_entropy", "bce_with_logits", "mse", "kl_div"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_has_its_loss_in_that(name: Any, dtype: torch.dtype) -> None:
    options = {"pos_weight": WEIGHTS} if name.startswith("bce") else {}
    assert _loss(name, LOGITS.to(dtype), SOFT, **options).dtype is dtype
