"""Codec of objectives: from an `Objective` message to the scalar that is differentiated."""

import math
from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import objective_pb2 as pb
from trocar_server.config import Limits
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
from trocar_server.rpc.codec.declarations import members_by_number
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.positions import prompt_positions, selects_tokens
from trocar_server.rpc.codec.reductions import reductions_from_wire
from trocar_server.rpc.codec.selector_parts import selector_from_text
from trocar_server.rpc.codec.unknown_fields import refuse_unknown_fields
from trocar_server.rpc.codec.wire_dtypes import tensor_operand_from_wire
from trocar_server.surgery import Selector
from trocar_server.tensors.losses import CLASS_WEIGHTS, LOSSES
from trocar_server.tensors.reductions import Lens, Pca
from trocar_server.tensors.reductions.positions import MAX_TOKEN_IDS

_MAX_TERMS = 64
_OUTPUT, _INPUT, _LOGITS = "/out", "/in", '/out["logits"]'

_SCORE_KINDS = members_by_number(pb.ClassScoreKind.DESCRIPTOR, ScoreKind, ScoreKind.LOGIT)
_FUNCTIONS = members_by_number(pb.ElementFunction.DESCRIPTOR, ElementFunction, ElementFunction.IDENTITY)
_AGGREGATES = members_by_number(pb.Aggregate.DESCRIPTOR, Aggregate, Aggregate.SUM)
_LOSS_KINDS = members_by_number(pb.LossKind.DESCRIPTOR, LossKind)


def objective_from_wire(field: str, message: pb.Objective, limits: Limits) -> Objective:
    """Convert and check an objective; `field` is its name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR`, `INVALID_SELECTOR`, `NON_FINITE_VALUE`,
            `OBJECTIVE_OUT_OF_RANGE` for a class below 0, or those of reductions, with the field named.
    """
    refuse_unknown_fields({field: message})
    return _objective(field, message, limits, has_penalties=True)


def _objective(field: str, message: pb.Objective, limits: Limits, *, has_penalties: bool) -> Objective:
    if not 1 <= len(message.terms) <= _MAX_TERMS:
        raise invalid(f"{field}.terms", f"{len(message.terms)} given; 1 to {_MAX_TERMS} are allowed")
    terms = []
    for i, term in enumerate(message.terms):
        name = f"{field}.terms[{i}]"
        if term.HasField("gradient_penalty") and not has_penalties:
            raise invalid(name, "a gradient_penalty inside a gradient_penalty; remove the inner one")
        with named(name):
            weight = term.weight if term.HasField("weight") else 1.0
            terms.append(Term(weight, _score(name, term, limits)))
    return Objective(tuple(terms))


def _score(field: str, term: pb.ObjectiveTerm, limits: Limits) -> Score:
    kind = term.WhichOneof("kind")
    if kind == "class_score":
        return _class_score(f"{field}.class_score", term.class_score, limits)
    if kind == "value_score":
        return _value_score(f"{field}.value_score", term.value_score)
    if kind == "loss":
        return _loss(f"{field}.loss", term.loss)
    if kind == "gradient_penalty":
        return _penalty(f"{field}.gradient_penalty", term.gradient_penalty, limits)
    raise invalid(field, "has no score; set one, for example `class_score`")


def _class_score(field: str, message: pb.ClassScore, limits: Limits) -> ClassScore:
    count, has_positions = len(message.classes), message.HasField("positions")
    most = MAX_TOKEN_IDS if has_positions else limits.max_batch
    names = tuple(message.class_names)
    if names and (count or has_positions):
        raise invalid(f"{field}.class_names", "are given beside numbers or positions; give one of them")
    if not 1 <= (count or len(names)) <= most:
        raise invalid(f"{field}.classes", f"{count} given; 1 to {most} are allowed")
    if min(message.classes, default=0) < 0:
        raise invalid(
            f"{field}.classes",
            f"class {min(message.classes)} is negative; classes count from 0",
            ErrorReason.OBJECTIVE_OUT_OF_RANGE,
        )
    if message.kind not in _SCORE_KINDS:
        raise invalid(f"{field}.kind", f"unknown kind {message.kind}")
    positions = prompt_positions(field, message.positions) if has_positions else None
    default = _LOGITS if has_positions else _OUTPUT
    selector = _selector(f"{field}.selector", message.selector or default)
    return ClassScore(selector, tuple(message.classes), _SCORE_KINDS[message.kind], positions, names)


def _value_score(field: str, message: pb.ValueScore) -> ValueScore:
    if not message.selector:
        raise invalid(f"{field}.selector", "is required; name the value")
    if message.function not in _FUNCTIONS:
        raise invalid(f"{field}.function", f"unknown function {message.function}")
    if message.aggregate not in _AGGREGATES:
        raise invalid(f"{field}.aggregate", f"unknown aggregate {message.aggregate}")
    reductions = reductions_from_wire(f"{field}.reductions", message.reductions)
    if any(isinstance(reduction, Pca) for reduction in reductions):
        raise invalid(f"{field}.reductions", "an objective takes no pca; project in the client, or tap it")
    if any(isinstance(reduction, Lens) for reduction in reductions):
        raise invalid(f"{field}.reductions", "an objective takes no lens; score the logits, or tap it")
    positions = (prompt_positions(field, message.positions),) if message.HasField("positions") else ()
    if positions and any(selects_tokens(reduction) for reduction in reductions):
        raise invalid(f"{field}.positions", "are given beside other tokens; give one of them")
    return ValueScore(
        _selector(f"{field}.selector", message.selector),
        (*positions, *reductions),
        message.channel_dim if message.HasField("channel_dim") else None,
        _FUNCTIONS[message.function],
        _AGGREGATES[message.aggregate],
    )


def _loss(field: str, message: pb.Loss) -> Loss:
    if message.kind not in _LOSS_KINDS:
        raise invalid(f"{field}.kind", f"loss {message.kind} is unset or unknown")
    if not message.HasField("labels"):
        raise invalid(f"{field}.labels", "are required")
    kind = _LOSS_KINDS[message.kind]
    return Loss(
        kind,
        _selector(f"{field}.selector", message.selector or _OUTPUT),
        tensor_operand_from_wire(f"{field}.labels", message.labels),
        message.is_sum,
        _class_weights(f"{field}.class_weights", kind, message.class_weights),
    )


def _class_weights(field: str, kind: LossKind, numbers: Sequence[float]) -> tuple[float, ...]:
    if numbers and CLASS_WEIGHTS not in LOSSES[kind].options:
        having = ", ".join(name for name in LossKind if CLASS_WEIGHTS in LOSSES[name].options)
        raise invalid(field, f"{kind} has no weights of classes; {having} have")
    if not all(0 <= number < math.inf for number in numbers):  # NaN is neither
        raise invalid(field, "must be finite numbers, at least 0")
    if numbers and not any(numbers):
        raise invalid(field, "must not all be 0")
    return tuple(numbers)


def _penalty(field: str, message: pb.GradientPenalty, limits: Limits) -> GradientPenalty:
    selector = _selector(f"{field}.selector", message.selector or _INPUT)
    if selector.parameter is not None:
        raise invalid(f"{field}.selector", "a penalty is on the gradient of a value, not of a parameter")
    if not math.isfinite(message.center):
        raise ServiceError(
            ErrorReason.NON_FINITE_VALUE,
            f"{field}.center: {message.center}; it must be finite",
            field=f"{field}.center",
        )
    inner = _objective(f"{field}.of", message.of, limits, has_penalties=False)
    return GradientPenalty(inner, selector, message.center)


def _selector(field: str, text: str) -> Selector:
    with named(field):
        selector = selector_from_text(field, text)
    if selector.is_gradient:
        raise invalid(
            field,
            f"'{text}' is a gradient; an objective is made of values, and a gradient_penalty of gradients",
        )
    return selector
