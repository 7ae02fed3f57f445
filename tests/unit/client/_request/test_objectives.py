"""Objectives become the messages of the contract, and their arithmetic is that of numbers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

import trocar
from trocar._request.scores import AGGREGATES, FUNCTIONS, LOSSES
from trocar_api.v1 import objective_pb2 as pb

NAN, INF = float("nan"), float("inf")
UNTYPED: Any = trocar
"""For arguments that a type checker refuses, too."""


def test_the_tables_cover_the_contract() -> None:
    tables: list[tuple[dict[str, Any], Any]] = [
        (AGGREGATES, pb.Aggregate),
        (FUNCTIONS, pb.ElementFunction),
        (LOSSES, pb.LossKind),
    ]
    for table, enum in tables:
        assert sorted(table.values()) == sorted(set(enum.values()) - {0})
        assert all(enum.Name(number).endswith(f"_{name.upper()}") for name, number in table.items())


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (trocar.logit(207), "class_score { classes: 207 kind: CLASS_SCORE_KIND_LOGIT }"),
        (
            trocar.logit(np.array([1, 0, 1]), at="head"),
            'class_score { selector: "head" classes: [1, 0, 1] kind: CLASS_SCORE_KIND_LOGIT }',
        ),
        (trocar.logit(torch.tensor([5, 6])), "class_score { classes: [5, 6] kind: CLASS_SCORE_KIND_LOGIT }"),
        (trocar.logit(np.int64(4)), "class_score { classes: 4 kind: CLASS_SCORE_KIND_LOGIT }"),
        (trocar.logit(torch.tensor(4)), "class_score { classes: 4 kind: CLASS_SCORE_KIND_LOGIT }"),
        (trocar.probability(0), "class_score { classes: 0 kind: CLASS_SCORE_KIND_PROBABILITY }"),
        (trocar.log_probability([2]), "class_score { classes: 2 kind: CLASS_SCORE_KIND_LOG_PROBABILITY }"),
        (trocar.value("layer4"), 'value_score { selector: "layer4" aggregate: AGGREGATE_SUM }'),
        (
            trocar.value("x", reduce="norm", function="square", channels=3, channel_dim=-1),
            'value_score { selector: "x" aggregate: AGGREGATE_NORM function: ELEMENT_FUNCTION_SQUARE '
            "channel_dim: -1 reductions { take { axis: AXIS_CHANNELS positions: 3 } } }",
        ),
        (
            trocar.value("x", samples=0, index=np.s_[:, 1], reductions=trocar.pool("avg")),
            'value_score { selector: "x" aggregate: AGGREGATE_SUM '
            "reductions { take { axis: AXIS_SAMPLES positions: 0 } } "
            "reductions { index { items { slice {} } items { position: 1 } } } "
            "reductions { pool { kind: POOL_KIND_AVG } } }",
        ),
        (
            trocar.loss("cross_entropy", [1, 2]),
            "loss { kind: LOSS_KIND_CROSS_ENTROPY labels { dtype: DTYPE_INT64 shape: 2 } }",
        ),
        (
            trocar.loss("mse", np.zeros((1, 2), np.float32), at="dec", reduction="sum"),
            'loss { kind: LOSS_KIND_MSE selector: "dec" labels { dtype: DTYPE_FLOAT32 shape: [1, 2] } '
            "is_sum: true }",
        ),
        (
            trocar.loss("cross_entropy", [1, 2], class_weights=np.array([1, 2, 0.5])),
            "loss { kind: LOSS_KIND_CROSS_ENTROPY labels { dtype: DTYPE_INT64 shape: 2 } "
            "class_weights: [1, 2, 0.5] }",
        ),
        (
            trocar.gradient_penalty(2 * trocar.value("/out") + 5, center=1),
            'gradient_penalty { of { terms { weight: 2 value_score { selector: "/out" '
            "aggregate: AGGREGATE_SUM } } } center: 1 }",
        ),
        (
            trocar.gradient_penalty(trocar.logit(1), at="layer1"),
            "gradient_penalty { of { terms { class_score { classes: 1 kind: CLASS_SCORE_KIND_LOGIT } } } "
            'selector: "layer1" }',
        ),
    ],
)
def test_every_score_is_the_message_of_the_contract(objective: trocar.Objective, expected: str) -> None:
    message = text_format.Parse(f"terms {{ {expected} }}", pb.Objective())
    assert objective.to_wire() == message
    assert objective.to_wire().SerializeToString() == message.SerializeToString()


A: Any = trocar.logit(1)
B: Any = trocar.value("layer4")


@pytest.mark.parametrize(
    ("objective", "weights", "offset"),
    [
        (A, [1.0], 0.0),
        (2 * A, [2.0], 0.0),
        (A * 2, [2.0], 0.0),
        (A / 4, [0.25], 0.0),
        (-A, [-1.0], 0.0),
        (+A, [1.0], 0.0),
        (A + B, [1.0, 1.0], 0.0),
        (A - B, [1.0, -1.0], 0.0),
        (2 * (A - 0.5 * B), [2.0, -1.0], 0.0),
        (1 - A, [-1.0], 1.0),
        (A - 1, [1.0], -1.0),
        (3 * (A + 1) - (B - 2), [3.0, -1.0], 5.0),
        (sum([A, B]), [1.0, 1.0], 0.0),
        (np.float32(2) * A, [2.0], 0.0),
        (np.float64(1) - A, [-1.0], 1.0),
        (A * np.int32(3) + np.int64(1), [3.0], 1.0),
        (0 * A, [0.0], 0.0),
    ],
)
def test_sums_have_the_weights_of_arithmetic(
    objective: trocar.Objective, weights: list[float], offset: float
) -> None:
    assert [term.weight for term in objective.terms] == weights
    assert objective.offset == offset


def test_a_weight_of_one_is_left_out_and_zero_is_said() -> None:
    assert not A.to_wire().terms[0].HasField("weight")
    assert (0 * A).to_wire().terms[0].HasField("weight")


_NUMBERS = st.floats(-1e3, 1e3)


@given(one=_NUMBERS, other=_NUMBERS, added=_NUMBERS, a=_NUMBERS, b=_NUMBERS)
def test_an_expression_stands_for_what_numbers_would_give(
    one: float, other: float, added: float, a: float, b: float
) -> None:
    objective: trocar.Objective = one * (A - other * B + added) - (-A) / 2 - added
    values = {A.terms[0].text: a, B.terms[0].text: b}
    found = sum(term.weight * values[term.text] for term in objective.terms) + objective.offset
    expected = one * (a - other * b + added) + a / 2 - added
    assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: A * B, TypeError, "not multiplied"),
        (lambda: A + "a", TypeError, "unsupported operand"),
        (lambda: A - "a", TypeError, "unsupported operand"),
        (lambda: A * [1, 2], TypeError, "unsupported operand|multiply"),
        (lambda: 2 / A, TypeError, "unsupported operand"),
        (lambda: A / B, TypeError, "unsupported operand"),
        (lambda: np.ones(2) * A, TypeError, "unsupported operand|ufunc"),
        (lambda: A / 0, ZeroDivisionError, "zero"),
        (lambda: A * NAN, ValueError, "only finite"),
        (lambda: A + INF, ValueError, "only finite"),
        (lambda: A / NAN, ValueError, "only finite"),
        (lambda: A * 1e300 * 1e300, ValueError, "weight of logit"),
        (lambda: (A + 1e300) * 1e5 + 1e308 + 1e308, ValueError, "only finite"),
        (lambda: sum([A] * 65), ValueError, "1 to 64 terms, not 65"),
        (lambda: trocar.Objective(()), ValueError, "1 to 64 terms, not 0"),
        (lambda: trocar.logit(-1), ValueError, "must be 0 to"),
        (lambda: trocar.logit([]), ValueError, "names no class"),
        (lambda: UNTYPED.logit(1.0), TypeError, "whole number"),
        (lambda: UNTYPED.logit([1, "a"]), TypeError, "whole number"),
        (lambda: UNTYPED.logit("dog", positions=trocar.positions(prompt=0)), TypeError, "takes token ids"),
        (lambda: trocar.logit(np.zeros((2, 2), int)), TypeError, "2 dimensions"),
        (lambda: UNTYPED.logit(None), TypeError, "whole number"),
        (lambda: trocar.logit(2**63), ValueError, "must be 0 to"),
        (lambda: trocar.logit(1, at=""), ValueError, "at is empty"),
        (lambda: trocar.value(""), ValueError, "the selector is empty"),
        (lambda: UNTYPED.value("x", reduce="max"), ValueError, "sum, mean, norm"),
        (lambda: UNTYPED.value("x", function="sin"), ValueError, "square, abs"),
        (lambda: UNTYPED.value("x", function=""), ValueError, "square, abs"),
        (lambda: UNTYPED.value("x", reduce=trocar.gram()), TypeError, "reductions="),
        (lambda: trocar.value("x", reductions=trocar.pca(np.eye(2))), ValueError, "cannot use pca"),
        (lambda: trocar.value("x", channel_dim=1), ValueError, "channel_dim"),
        (lambda: UNTYPED.loss("mae", [1]), ValueError, "cross_entropy, nll"),
        (lambda: trocar.loss("mse", [NAN]), ValueError, "only finite"),
        (lambda: trocar.loss("mse", []), ValueError, "so it is empty"),
        (lambda: trocar.loss("mse", [1j]), TypeError, "real numbers"),
        (lambda: trocar.loss("nll", [0.5]), TypeError, "integers"),
        (lambda: trocar.loss("cross_entropy", [True]), TypeError, "not bool"),
        (lambda: UNTYPED.loss("mse", [1], reduction="none"), ValueError, "mean, sum"),
        (lambda: UNTYPED.gradient_penalty("x"), TypeError, "not an objective"),
        (lambda: trocar.gradient_penalty(A, center=NAN), ValueError, "only finite"),
        (
            lambda: trocar.gradient_penalty(B + trocar.gradient_penalty(A)),
            ValueError,
            "third derivatives",
        ),
    ],
)
def test_what_is_no_objective_is_refused_at_once(
    make: Callable[[], object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [
        ("cross_entropy", np.array([1, -100], np.int32), np.array([1, -100], np.int64)),
        ("cross_entropy", np.array([[0.5, 0.5]], np.float32), np.array([[0.5, 0.5]], np.float32)),
        ("nll", np.array([3], np.uint8), np.array([3], np.int64)),
        ("bce_with_logits", [True, False], np.array([1, 0], np.float32)),
        ("mse", [1, 2], np.array([1, 2], np.float32)),
        ("l1", [0.1], np.array([0.1], np.float64)),
        ("kl_div", np.array([0.5], np.float16), np.array([0.5], np.float16)),
    ],
)
def test_labels_have_a_dtype_that_the_loss_can_have(kind: Any, labels: Any, expected: Any) -> None:
    objective = trocar.loss(kind, labels)
    spec = objective.to_wire().terms[0].loss.labels
    names = {1: "float32", 2: "float64", 3: "float16", 9: "int64"}
    assert names[spec.dtype] == expected.dtype.name
    assert tuple(spec.shape) == expected.shape
    assert [bytes(payload) for payload in objective.payloads()] == [expected.tobytes()]


def test_labels_go_along_in_the_order_of_the_terms_those_of_penalties_in_their_place() -> None:
    inside = trocar.loss("mse", [2.0]) + trocar.loss("l1", [3.0])
    objective = trocar.loss("mse", [1.0]) + A + trocar.gradient_penalty(inside) - trocar.loss("mse", [4.0])
    assert [np.frombuffer(payload, np.float64).item() for payload in objective.payloads()] == [1, 2, 3, 4]


def test_labels_that_change_later_do_not_reach_the_objective() -> None:
    labels = np.zeros(2)
    objective = trocar.loss("mse", labels)
    labels[:] = 1
    assert bytes(objective.payloads()[0]) == bytes(16)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (2 * A - 0.5 * B + 1, "2.0 * logit(1) - 0.5 * value('layer4') + 1.0"),
        (1 - trocar.value("/out", reduce="mean"), "-value('/out', reduce='mean') + 1.0"),
        (-2 * A - 1, "-2.0 * logit(1) - 1.0"),
        (trocar.probability(range(6), at="head"), "probability([0, 1, 2, 3, ... 2 more], at='head')"),
        (
            trocar.loss("mse", np.zeros((2, 3)), at="d", reduction="sum"),
            "loss('mse', <float64 (2, 3)>, at='d', reduction='sum')",
        ),
        (trocar.gradient_penalty(1 - A, center=1), "gradient_penalty(-logit(1), center=1.0)"),
    ],
)
def test_an_objective_shows_as_it_was_written(objective: trocar.Objective, expected: str) -> None:
    assert repr(objective) == expected


def test_equal_objectives_are_equal_and_serve_as_keys() -> None:
    one, same = (2 * trocar.logit(1) + trocar.loss("mse", [1.0]) for _ in range(2))
    assert one == same
    assert len({one, same}) == 1
    assert one != 2 * trocar.logit(1) + trocar.loss("mse", [2.0])
    assert one != one + 1
