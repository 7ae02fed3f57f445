"""Objectives from the wire: defaults, every word, and every refusal with its field."""

from typing import Any

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import objective_pb2 as pb
from trocar_api.v1 import reduction_pb2, tensor_pb2
from trocar_server.config import Limits
from trocar_server.engine.request.objective import (
    Aggregate,
    ClassScore,
    ElementFunction,
    GradientPenalty,
    Loss,
    LossKind,
    Objective,
    ScoreKind,
    Term,
    ValueScore,
)
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec import objectives
from trocar_server.rpc.codec.objectives import objective_from_wire
from trocar_server.surgery import parse_selector
from trocar_server.tensors.reductions import OperandSpec, Pool, PoolKind

LIMITS = Limits(max_batch=4)
NAN = float("nan")
LABELS = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[2])
LOGIT = pb.ClassScore(classes=[1])
PCA = reduction_pb2.Reduction(
    pca=reduction_pb2.PcaReduction(
        components=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[1, 2])
    )
)


def term(**fields: Any) -> pb.ObjectiveTerm:
    return pb.ObjectiveTerm(**fields)


def objective(*terms: pb.ObjectiveTerm) -> pb.Objective:
    return pb.Objective(terms=terms)


def read(*terms: pb.ObjectiveTerm) -> Objective:
    return objective_from_wire("objective", objective(*terms), LIMITS)


def refused(*terms: pb.ObjectiveTerm) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read(*terms)
    assert caught.value.message.startswith(f"{caught.value.details['field']}: ")
    return caught.value


def test_a_class_score_is_of_the_models_output() -> None:
    assert read(term(class_score=LOGIT)) == Objective(
        (Term(1.0, ClassScore(parse_selector("/out"), (1,), ScoreKind.LOGIT)),)
    )


def test_a_class_score_keeps_all_that_it_says() -> None:
    message = pb.ClassScore(selector="fc", classes=[3, 0], kind=pb.CLASS_SCORE_KIND_LOG_PROBABILITY)
    (found,) = read(term(class_score=message, weight=-0.5)).terms
    assert found == Term(-0.5, ClassScore(parse_selector("fc"), (3, 0), ScoreKind.LOG_PROBABILITY))


def test_a_weight_of_zero_is_zero() -> None:
    assert read(term(class_score=LOGIT, weight=0)).terms[0].weight == 0


def test_a_value_score_keeps_all_that_it_says() -> None:
    pool = reduction_pb2.Reduction(pool=reduction_pb2.PoolReduction(kind=reduction_pb2.POOL_KIND_AVG))
    message = pb.ValueScore(
        selector="conv",
        reductions=[pool],
        channel_dim=-1,
        function=pb.ELEMENT_FUNCTION_SQUARE,
        aggregate=pb.AGGREGATE_NORM,
    )
    (found,) = read(term(value_score=message)).terms
    assert found.score == ValueScore(
        parse_selector("conv"), (Pool(PoolKind.AVG),), -1, ElementFunction.SQUARE, Aggregate.NORM
    )


def test_labels_are_constants_in_the_order_of_the_terms() -> None:
    mse = pb.Loss(
        kind=pb.LOSS_KIND_MSE,
        selector="fc",
        labels=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[3]),
    )
    loss = pb.Loss(kind=pb.LOSS_KIND_NLL, labels=LABELS, is_sum=True)
    found = read(
        term(loss=mse), term(gradient_penalty=pb.GradientPenalty(of=objective(term(loss=loss)), center=1))
    )
    assert list(found.operands) == [OperandSpec(torch.float32, (3,)), OperandSpec(torch.int64, (2,))]
    inner = Loss(LossKind.NLL, parse_selector("/out"), OperandSpec(torch.int64, (2,)), is_sum=True)
    assert found.terms[1].score == GradientPenalty(Objective((Term(1.0, inner),)), parse_selector("/in"), 1.0)


def test_every_word_of_the_wire_has_one_of_ours() -> None:
    assert set(objectives._SCORE_KINDS) == set(pb.ClassScoreKind.values())
    assert set(objectives._SCORE_KINDS.values()) == set(ScoreKind)
    assert set(objectives._FUNCTIONS) == set(pb.ElementFunction.values())
    assert set(objectives._FUNCTIONS.values()) == set(ElementFunction)
    assert set(objectives._AGGREGATES) == set(pb.Aggregate.values())
    assert set(objectives._AGGREGATES.values()) == set(Aggregate)
    assert set(objectives._LOSS_KINDS) == set(pb.LossKind.values()) - {0}
    assert set(objectives._LOSS_KINDS.values()) == set(LossKind)


INVALID = ErrorReason.INVALID_ARGUMENT
_TERM = "objective.terms[0]"
_PENALTY = f"{_TERM}.gradient_penalty"


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (term(), INVALID, _TERM),
        (term(class_score=LOGIT, weight=NAN), ErrorReason.NON_FINITE_VALUE, _TERM),
        (term(class_score=LOGIT, weight=float("inf")), ErrorReason.NON_FINITE_VALUE, _TERM),
        (term(class_score=pb.ClassScore()), INVALID, f"{_TERM}.class_score.classes"),
        (term(class_score=pb.ClassScore(classes=[0] * 5)), INVALID, f"{_TERM}.class_score.classes"),
        (
            term(class_score=pb.ClassScore(classes=[0, -1])),
            ErrorReason.OBJECTIVE_OUT_OF_RANGE,
            f"{_TERM}.class_score.classes",
        ),
        (term(class_score={"classes": [1], "kind": 9}), INVALID, f"{_TERM}.class_score.kind"),
        (
            term(class_score=pb.ClassScore(classes=[1], selector="fc]")),
            ErrorReason.INVALID_SELECTOR,
            f"{_TERM}.class_score.selector",
        ),
        (
            term(class_score=pb.ClassScore(classes=[1], selector="fc/grad_out")),
            INVALID,
            f"{_TERM}.class_score.selector",
        ),
        (term(value_score=pb.ValueScore()), INVALID, f"{_TERM}.value_score.selector"),
        (term(value_score={"selector": "x" * 1025}), INVALID, f"{_TERM}.value_score.selector"),
        (term(value_score={"selector": "fc", "function": 9}), INVALID, f"{_TERM}.value_score.function"),
        (term(value_score={"selector": "fc", "aggregate": 9}), INVALID, f"{_TERM}.value_score.aggregate"),
        (
            term(value_score=pb.ValueScore(selector="fc", reductions=[PCA])),
            INVALID,
            f"{_TERM}.value_score.reductions",
        ),
        (
            term(value_score=pb.ValueScore(selector="fc", reductions=[reduction_pb2.Reduction()])),
            INVALID,
            f"{_TERM}.value_score.reductions[0]",
        ),
        (term(loss=pb.Loss(labels=LABELS)), INVALID, f"{_TERM}.loss.kind"),
        (term(loss=pb.Loss(kind=pb.LOSS_KIND_MSE)), INVALID, f"{_TERM}.loss.labels"),
        (
            term(loss=pb.Loss(kind=pb.LOSS_KIND_MSE, labels=tensor_pb2.TensorSpec(shape=[2]))),
            ErrorReason.INVALID_TENSOR,
            f"{_TERM}.loss.labels",
        ),
        *(
            (
                term(loss=pb.Loss(kind=kind, labels=LABELS, class_weights=weights)),
                INVALID,
                f"{_TERM}.loss.class_weights",
            )
            for kind, weights in (
                (pb.LOSS_KIND_MSE, [1.0, 2.0]),
                (pb.LOSS_KIND_NLL, [1.0, -2.0]),
                (pb.LOSS_KIND_NLL, [1.0, NAN]),
                (pb.LOSS_KIND_NLL, [0.0, 0.0]),
            )
        ),
        (term(gradient_penalty=pb.GradientPenalty()), INVALID, f"{_PENALTY}.of.terms"),
        (
            term(gradient_penalty=pb.GradientPenalty(of=objective(term(class_score=LOGIT)), center=NAN)),
            ErrorReason.NON_FINITE_VALUE,
            f"{_PENALTY}.center",
        ),
        (
            term(gradient_penalty=pb.GradientPenalty(of=objective(term()), selector="fc/param(bias)")),
            INVALID,
            f"{_PENALTY}.selector",
        ),
        (
            term(
                gradient_penalty=pb.GradientPenalty(of=objective(term(gradient_penalty=pb.GradientPenalty())))
            ),
            INVALID,
            f"{_PENALTY}.of.terms[0]",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(
    message: pb.ObjectiveTerm, reason: ErrorReason, field: str
) -> None:
    error = refused(message)
    assert (error.reason, error.details["field"]) == (reason, field)


@pytest.mark.parametrize("count", [0, 65])
def test_an_objective_has_one_to_64_terms(count: int) -> None:
    assert refused(*[term(class_score=LOGIT)] * count).details["field"] == "objective.terms"
    assert len(read(*[term(class_score=LOGIT)] * 64).terms) == 64


def test_a_field_of_a_newer_client_is_refused() -> None:
    message = term(gradient_penalty=pb.GradientPenalty(of=objective(term(class_score=LOGIT))))
    message.gradient_penalty.of.terms[0].class_score.MergeFromString(b"\xf8\x7f\x01")
    error = refused(message)
    assert error.details["field"] == "objective"
    assert "newer client" in error.message
