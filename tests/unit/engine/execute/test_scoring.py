"""The number of an objective, against torch's own functions."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.scoring import objective_value
from trocar_server.engine.request.objective import (
    Aggregate,
    ClassScore,
    ElementFunction,
    GradientPenalty,
    Loss,
    LossKind,
    Objective,
    Score,
    ScoreKind,
    Term,
    ValueScore,
)
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
from trocar_server.tensors.reductions import (
    Axis,
    OperandSpec,
    Pool,
    PoolKind,
    Reduction,
    Take,
    TopK,
)
from trocar_server.tensors.reductions.padding import Own

OUT = parse_selector("/out")
LOGITS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
MAPS = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(3))
CLASSES = torch.tensor([0, 5, 2, 2])


def number(score: Score, value: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
    return objective_value(Objective((Term(1.0, score),)), [value], labels)


def loss(kind: LossKind, labels: torch.Tensor, *, is_sum: bool = False) -> Loss:
    return Loss(kind, OUT, OperandSpec(labels.dtype, tuple(labels.shape)), is_sum)


def refused(call: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (ScoreKind.LOGIT, lambda x, dim: x),
        (ScoreKind.PROBABILITY, F.softmax),
        (ScoreKind.LOG_PROBABILITY, F.log_softmax),
    ],
)
def test_a_class_is_scored_for_all_samples_or_for_each(
    kind: ScoreKind, function: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    scores = function(LOGITS, 1)
    assert torch.allclose(number(ClassScore(OUT, (3,), kind), LOGITS), scores[:, 3].sum())
    own = number(ClassScore(OUT, tuple(CLASSES.tolist()), kind), LOGITS)
    assert torch.allclose(own, scores[range(4), CLASSES].sum())


def test_classes_are_dimension_1_of_maps_and_the_last_of_tokens() -> None:
    assert torch.allclose(number(ClassScore(OUT, (3,)), MAPS), MAPS[:, 3].sum())
    own = number(ClassScore(OUT, (3, 0, 1, 2)), TOKENS)
    expected = torch.stack([TOKENS[i, :, c].sum() for i, c in enumerate((3, 0, 1, 2))]).sum()
    assert torch.allclose(own, expected)


@pytest.mark.parametrize("function", ElementFunction)
@pytest.mark.parametrize("aggregate", Aggregate)
def test_a_value_is_summed_up(function: ElementFunction, aggregate: Aggregate) -> None:
    value = MAPS.abs() + 0.1
    functions = {
        ElementFunction.IDENTITY: value,
        ElementFunction.SQUARE: value**2,
        ElementFunction.ABS: value.abs(),
        ElementFunction.LOG: value.log(),
        ElementFunction.EXP: value.exp(),
    }
    aggregates = {Aggregate.SUM: torch.sum, Aggregate.MEAN: torch.mean, Aggregate.NORM: torch.linalg.norm}
    expected = aggregates[aggregate](functions[function][:, [1, 4]].flatten())
    steps = (Take(Axis.CHANNELS, (1, 4)),)
    found = number(ValueScore(OUT, steps, None, function, aggregate), value)
    torch.testing.assert_close(found, expected)


MASK = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()


@pytest.mark.parametrize(
    ("reductions", "function"),
    [
        ((Pool(PoolKind.AVG),), lambda own: own.mean(0)),
        ((Pool(PoolKind.LAST),), lambda own: own[-1]),
        ((Pool(PoolKind.MAX, (2,)),), lambda own: F.adaptive_max_pool1d(own.T[None], 2)),
        ((TopK(3, 1),), lambda own: own.topk(min(3, len(own)), 0).values),
    ],
)
def test_reductions_of_an_objective_leave_padding_out(
    reductions: tuple[Reduction, ...], function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    inner = ValueScore(OUT, reductions, function=ElementFunction.EXP)
    parts = [function(own[kept]).exp().sum() for own, kept in zip(TOKENS, MASK, strict=True)]
    objective = Objective((Term(2.0, ValueScore(OUT)), Term(1.0, inner)))
    found = objective_value(objective, [MAPS, TOKENS], [], owns=[None, Own((0, 1), MASK)])
    torch.testing.assert_close(found, 2 * MAPS.sum() + torch.stack(parts).sum())
    assert objective.has_reductions
    penalty = GradientPenalty(objective, parse_selector("/in"))
    assert Objective((Term(1.0, penalty),)).has_reductions


def test_elements_that_are_only_selected_count_with_their_padding() -> None:
    steps = (Take(Axis.CHANNELS, (1, 4)),)
    for score, value in ((ValueScore(OUT), TOKENS), (ValueScore(OUT, steps), TOKENS[..., [1, 4]])):
        found = objective_value(Objective((Term(1.0, score),)), [TOKENS], [], owns=[Own((0, 1), MASK)])
        torch.testing.assert_close(found, value.sum())
    assert not Objective((Term(1.0, ValueScore(OUT)), Term(1.0, ClassScore(OUT, (1,))))).has_reductions


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize(
    ("kind", "function", "labels"),
    [
        (LossKind.CROSS_ENTROPY, F.cross_entropy, CLASSES),
        (LossKind.CROSS_ENTROPY, F.cross_entropy, torch.tensor([0, -100, 2, 2])),
        (LossKind.CROSS_ENTROPY, F.cross_entropy, CLASSES.to(torch.uint8)),
        (LossKind.CROSS_ENTROPY, F.cross_entropy, LOGITS.softmax(1)),
        (LossKind.NLL, F.nll_loss, CLASSES),
        (LossKind.BCE_WITH_LOGITS, F.binary_cross_entropy_with_logits, LOGITS.sigmoid()),
        (LossKind.MSE, F.mse_loss, LOGITS.flip(0)),
        (LossKind.L1, F.l1_loss, LOGITS.flip(0).double()),
        (LossKind.SMOOTH_L1, F.smooth_l1_loss, LOGITS.flip(0)),
    ],
)
def test_losses_are_those_of_torch(
    kind: LossKind, function: Callable[..., torch.Tensor], labels: torch.Tensor, is_sum: bool
) -> None:
    theirs = labels.float() if labels.is_floating_point() else labels.long()
    expected = function(LOGITS, theirs, reduction="sum" if is_sum else "mean")
    assert torch.equal(number(loss(kind, labels, is_sum=is_sum), LOGITS, labels), expected)


CLASS_WEIGHTS = (0.5, 1.0, 2.0, 1.0, 1.5, 0.0)


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize(
    ("kind", "function", "labels"),
    [
        (LossKind.CROSS_ENTROPY, F.cross_entropy, CLASSES),
        (LossKind.CROSS_ENTROPY, F.cross_entropy, LOGITS.softmax(1)),
        (LossKind.NLL, F.nll_loss, torch.tensor([0, -100, 2, 2])),
        (LossKind.BCE_WITH_LOGITS, F.binary_cross_entropy_with_logits, LOGITS.sigmoid()),
    ],
)
def test_class_weights_are_the_weight_of_torch(
    kind: LossKind, function: Callable[..., torch.Tensor], labels: torch.Tensor, is_sum: bool
) -> None:
    weighted = replace(loss(kind, labels, is_sum=is_sum), class_weights=CLASS_WEIGHTS)
    expected = function(LOGITS, labels, torch.tensor(CLASS_WEIGHTS), reduction="sum" if is_sum else "mean")
    assert torch.equal(number(weighted, LOGITS, labels), expected)


def test_class_weights_of_another_number_of_classes_are_refused() -> None:
    weighted = replace(loss(LossKind.CROSS_ENTROPY, CLASSES), class_weights=(1.0, 2.0, 0.5))
    error = refused(lambda: number(weighted, LOGITS, CLASSES))
    assert (error.reason, "3 class weights for 6 classes" in error.message) == (
        ErrorReason.OBJECTIVE_REJECTED,
        True,
    )


WRAPPING = [
    (torch.tensor([240, 7, 44, 0], dtype=torch.uint8), 1000),  # 1000 is 232 in uint8
    (torch.tensor([100, 7, 44, 0], dtype=torch.int8), 300),  # 300 is 44 in int8
    (torch.tensor([32000, 7, 44, 0], dtype=torch.int16), 50_257),  # and this is negative in int16
    (torch.tensor([100, -100, 44, 0], dtype=torch.int8), 300),
]


@pytest.mark.parametrize(("labels", "count"), WRAPPING)
def test_labels_of_narrow_integers_reach_as_far_as_their_dtype(labels: torch.Tensor, count: int) -> None:
    value = torch.randn(4, count, generator=torch.Generator().manual_seed(4))
    expected = F.cross_entropy(value, labels.long())
    assert torch.equal(number(loss(LossKind.CROSS_ENTROPY, labels), value, labels), expected)


def test_a_label_that_is_no_class_is_not_taken_for_the_ignored_one() -> None:
    labels = torch.tensor([0, 1, 2, 156], dtype=torch.uint8)  # -100 is 156 in uint8
    error = refused(lambda: number(loss(LossKind.CROSS_ENTROPY, labels), LOGITS, labels))
    assert error.reason is ErrorReason.OBJECTIVE_OUT_OF_RANGE
    assert "no class 156" in error.message


def test_the_divergence_is_a_mean_over_the_batch() -> None:
    labels = LOGITS.flip(0).softmax(1)
    expected = F.kl_div(LOGITS.log_softmax(1), labels, reduction="batchmean")
    assert torch.equal(number(loss(LossKind.KL_DIV, labels), LOGITS, labels), expected)
    again = number(loss(LossKind.KL_DIV, labels), LOGITS.log_softmax(1), labels)
    torch.testing.assert_close(again, expected)  # log-probabilities are logits, too


def test_segmentation_has_a_label_for_each_position() -> None:
    labels = torch.randint(0, 6, (4, 3, 3))
    assert torch.equal(
        number(loss(LossKind.CROSS_ENTROPY, labels), MAPS, labels), F.cross_entropy(MAPS, labels)
    )


def test_terms_are_weighted_and_take_their_values_in_order() -> None:
    first, second = ValueScore(OUT), loss(LossKind.MSE, LOGITS)
    objective = Objective((Term(2.0, first), Term(-0.5, second), Term(1.0, first)))
    found = objective_value(objective, [MAPS, LOGITS, TOKENS], [LOGITS.flip(0)])
    expected = 2 * MAPS.sum() - 0.5 * F.mse_loss(LOGITS, LOGITS.flip(0)) + TOKENS.sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("center", [0.0, 1.0])
def test_a_penalty_is_over_the_norms_of_the_samples(center: float) -> None:
    gradient = torch.randn(4, 3, 5)
    inner = Objective((Term(1.0, ValueScore(OUT)),))
    objective = Objective((Term(3.0, GradientPenalty(inner, parse_selector("/in"), center)),))
    found = objective_value(objective, [MAPS], [], ["x"], lambda _, name: gradient)
    norms = gradient.flatten(1).norm(dim=1)
    torch.testing.assert_close(found, 3 * ((norms - center) ** 2).mean())


def test_half_floats_are_computed_in_float32() -> None:
    found = number(ClassScore(OUT, (3,), ScoreKind.PROBABILITY), LOGITS.bfloat16())
    assert found.dtype == torch.float32
    assert torch.equal(found, LOGITS.bfloat16().float().softmax(1)[:, 3].sum())


@pytest.mark.parametrize("wrong", [-1, 6])
def test_a_class_that_does_not_exist_is_refused(wrong: int) -> None:
    error = refused(lambda: number(ClassScore(OUT, (wrong,)), LOGITS))
    assert error.reason is ErrorReason.OBJECTIVE_OUT_OF_RANGE
    labels = torch.tensor([0, 1, 2, wrong])
    error = refused(lambda: number(loss(LossKind.CROSS_ENTROPY, labels), LOGITS, labels))
    assert error.reason is ErrorReason.OBJECTIVE_OUT_OF_RANGE
    assert "6 classes" in error.message


@pytest.mark.parametrize(
    ("score", "value", "labels"),
    [
        (ClassScore(OUT, (1, 2)), LOGITS, []),
        (ClassScore(OUT, (0,)), LOGITS[0], []),
        (loss(LossKind.CROSS_ENTROPY, CLASSES[:3]), LOGITS, [CLASSES[:3]]),
        (loss(LossKind.NLL, LOGITS), LOGITS, [LOGITS]),
        (loss(LossKind.MSE, LOGITS[:1]), LOGITS, [LOGITS[:1]]),
        (ValueScore(OUT), CLASSES, []),
    ],
)
def test_what_does_not_fit_is_refused(score: Score, value: torch.Tensor, labels: list[torch.Tensor]) -> None:
    error = refused(lambda: number(score, value, *labels))
    assert error.reason is ErrorReason.OBJECTIVE_REJECTED
    assert error.message.startswith("objective: ")


def test_forms_are_checked_without_data() -> None:
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    found = number(loss(LossKind.CROSS_ENTROPY, labels), LOGITS.to("meta"), labels)
    assert found.is_meta
    wrong = torch.empty(3, dtype=torch.int64, device="meta")
    error = refused(lambda: number(loss(LossKind.CROSS_ENTROPY, wrong), LOGITS.to("meta"), wrong))
    assert error.reason is ErrorReason.OBJECTIVE_REJECTED
