"""Scores of objectives: classes, values, losses and gradients."""

from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from trocar._base.delegation import explained
from trocar._base.tensors import DTYPE_NAMES, WireTensor, wire_numpy_dtype
from trocar._request.edit_texts import positions_text
from trocar._request.inputs import ArrayLike
from trocar._request.objectives import Objective, as_objective, objective_of
from trocar._request.operands import (
    Numbers,
    OperandLike,
    class_factors,
    dimension,
    integer,
    number,
    one_of,
    spec,
    tensor,
    text,
)
from trocar._request.positions import IndexExpression, Positions
from trocar._request.reductions import Reduction, Tokens, gather
from trocar._request.text_positions import TextPositions
from trocar_api.enums import numbers
from trocar_api.v1 import objective_pb2 as pb

Classes: TypeAlias = str | SupportsIndex | Iterable[SupportsIndex] | Iterable[str]
"""One class for all samples, or one for each; by number or name."""
ReduceName = Literal["sum", "mean", "norm"]
FunctionName = Literal["square", "abs", "log", "exp"]
LossName = Literal["cross_entropy", "nll", "bce_with_logits", "mse", "l1", "smooth_l1", "kl_div"]

AGGREGATES = numbers(pb.Aggregate)
"""Wire aggregate by name."""

FUNCTIONS = numbers(pb.ElementFunction)
"""Wire function by name."""

LOSSES = numbers(pb.LossKind)
"""Wire loss by name."""

_MOST_CLASSES_SHOWN = 4
_INTEGERS = frozenset(("uint8", "int8", "int16", "int32", "int64"))


@explained
def logit(classes: Classes, at: str | None = None, *, positions: TextPositions | None = None) -> Objective:
    """Return the output for a class as an objective, summed over the samples.

        trocar.logit(207)
        trocar.logit([207, 281])                 # one class for each of two samples
        trocar.logit("tabby")                    # by the name that `predict` prints
        trocar.logit(3, at='head["scores"]')

    Args:
        classes: One class for all samples or one for each: numbers from 0, or names of `Model.categories`.
            With `positions`, token ids: one for all positions, or one for each, text by text.
        at: The selector of the scores; the model's output when None. Classes are dimension 1, or the last of
            (batch, tokens, classes); positions are summed.
        positions: Only at these positions of texts, `trocar.positions(...)`, of (batch, tokens, classes). The
            scores at a position are of the token that follows it; `at` is '/out["logits"]' when None.

    Raises:
        TypeError: A class is neither a whole number nor a name.
        ValueError: A class is negative, or there is none.
    """
    return _class_score("logit", pb.CLASS_SCORE_KIND_LOGIT, classes, at, positions)


@explained
def probability(
    classes: Classes, at: str | None = None, *, positions: TextPositions | None = None
) -> Objective:
    """Return the probability of a class as an objective, softmax over the classes; see `logit`."""
    return _class_score("probability", pb.CLASS_SCORE_KIND_PROBABILITY, classes, at, positions)


@explained
def log_probability(
    classes: Classes, at: str | None = None, *, positions: TextPositions | None = None
) -> Objective:
    """Return the logarithm of a class's probability as an objective; see `logit`.

    run = client.generate("llama", prompt, max_new_tokens=8)
    chosen = trocar.positions(prompt=slice(len(run.prompt_ids) - 1, -1))
    of = trocar.log_probability(run.token_ids, positions=chosen)
    client.gradients("llama", run.as_inputs(), of=of, at=["layer[10]"])
    """
    return _class_score("log_probability", pb.CLASS_SCORE_KIND_LOG_PROBABILITY, classes, at, positions)


@explained
def value(  # noqa: PLR0913 - one keyword for each thing that it can say
    selector: str,
    *,
    reduce: ReduceName = "sum",
    function: FunctionName | None = None,
    samples: Positions | None = None,
    channels: Positions | None = None,
    tokens: Tokens | None = None,
    index: IndexExpression | None = None,
    reductions: Reduction | Iterable[Reduction] = (),
    channel_dim: int | None = None,
    positions: TextPositions | None = None,
) -> Objective:
    """Return a sum, mean or norm of any value as an objective.

        trocar.value("layer4", channels=[3], reduce="mean")
        trocar.value("/out", function="square")             # the sum of squares

    Args:
        selector: One value.
        reduce: "sum", "mean" or "norm", the Euclidean norm, over all elements that are left, padding tokens
            among them; `tokens="cls"` or "last", pools, Gram matrices and `trocar.top_k` leave padding out.
        function: Applied to each element first: "square", "abs", "log" or "exp".
        samples: Which samples, as in `tap`.
        channels: Which channels, as in `tap`.
        tokens: Which tokens, as in `tap`.
        index: Which part, as in `tap`.
        reductions: Further reductions, in order, such as `trocar.pool("avg")`; no `trocar.pca`.
        channel_dim: Which dimension holds the channels, as in `tap`.
        positions: Only these positions of texts, as in `tap`.

    Raises:
        TypeError: An entry is not a reduction, or positions are not integers.
        ValueError: An unknown name, or a reduction by principal components.
    """
    if isinstance(reduce, Reduction):
        raise TypeError(f"reduce is one of {', '.join(AGGREGATES)}; {reduce!r} goes to reductions=")
    chosen = gather(samples=samples, channels=channels, tokens=tokens, index=index, reduce=reductions)
    if any(entry.tensors for entry in chosen):
        raise ValueError("an objective cannot use pca; tap the components instead")
    if positions is not None and tokens is not None:
        raise ValueError("a value has positions= or tokens=, not both")
    if channel_dim is not None and not chosen and positions is None:
        raise ValueError("channel_dim is only used with channels= and reductions")
    said = {"reduce": None if reduce == "sum" else reduce, "function": function, "channel_dim": channel_dim}
    message = pb.ValueScore(
        selector=text("the selector", selector),
        reductions=[entry.to_wire() for entry in chosen],
        channel_dim=None if channel_dim is None else dimension("channel_dim", channel_dim),
        function=_function(function),
        aggregate=AGGREGATES[one_of("reduce", reduce, AGGREGATES)],
        positions=None if positions is None else positions.to_wire(),
    )
    words = [repr(selector), *(f"{name}={what!r}" for name, what in said.items() if what is not None)]
    words += [repr(entry) for entry in chosen]
    words += [] if positions is None else [f"positions={positions_text(message.positions)}"]
    return objective_of(pb.ObjectiveTerm(value_score=message), f"value({', '.join(words)})")


@explained
def loss(
    kind: LossName,
    labels: OperandLike,
    at: str | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    *,
    class_weights: Numbers | ArrayLike | None = None,
) -> Objective:
    """Return a torch loss as an objective, otherwise with its defaults.

        trocar.loss("cross_entropy", [207, 281])
        trocar.loss("cross_entropy", [0, 2], class_weights=[1, 2, 0.5])
        trocar.loss("mse", target, at="decoder")

    Args:
        kind: "cross_entropy" and "nll" (of log probabilities) with class indices, -100 for samples to ignore;
            "cross_entropy" also with probabilities; "bce_with_logits", "mse", "l1", "smooth_l1" and "kl_div"
            (of logits from probabilities, as in trainers) with labels of the value's shape.
        labels: The labels, as an array or lists.
        at: The selector of the predictions; the model's output when None.
        reduction: "mean" (for "kl_div" over the batch) or "sum".
        class_weights: A factor for each class, torch's `weight`, for "cross_entropy", "nll" and
            "bce_with_logits". The mean of the first two is weighted, too.

    Raises:
        TypeError: The labels are not numbers, or not whole numbers where these are required; class weights
            are not one number for each class.
        ValueError: An unknown name, labels that are NaN or infinite, or such or negative class weights.
    """
    name = one_of("the loss", kind, LOSSES)
    sent = _labels(name, labels)
    message = pb.Loss(
        kind=LOSSES[name],
        selector=_optional_text("at", at),
        labels=spec(sent),
        is_sum=one_of("reduction", reduction, ("mean", "sum")) == "sum",
        class_weights=class_factors(class_weights),
    )
    words = [repr(name), f"<{DTYPE_NAMES[sent.dtype]} {sent.shape}>"]
    words += [f"at={at!r}"] if at is not None else []
    words += ["reduction='sum'"] if message.is_sum else []
    words += [f"class_weights=<{len(message.class_weights)}>"] if message.class_weights else []
    return objective_of(pb.ObjectiveTerm(loss=message), f"loss({', '.join(words)})", (sent,))


@explained
def gradient_penalty(of: Objective, at: str | None = None, center: float = 0.0) -> Objective:
    """Return the mean over the samples of (|gradient| - center)^2 as an objective: a second derivative.

        trocar.loss("cross_entropy", labels) + 10 * trocar.gradient_penalty(trocar.value("/out"), center=1)

    Args:
        of: The objective whose gradient is penalised; without a penalty inside.
        at: The gradient is with respect to this value; the model's first input when None.
        center: 0 for the R1 penalty, 1 for the one of WGAN-GP.

    Raises:
        TypeError: `of` is not an objective.
        ValueError: There is a penalty inside, or `center` is not finite.
    """
    inner = as_objective(of)
    if any(term.score.HasField("gradient_penalty") for term in inner.terms):
        raise ValueError("a gradient_penalty cannot contain another: third derivatives are not supported")
    message = pb.GradientPenalty(
        of=inner.to_wire(), selector=_optional_text("at", at), center=number("center", center)
    )
    words = [repr(Objective(inner.terms))]  # without what was added, which has no gradient
    words += [f"at={at!r}"] if at is not None else []
    words += [f"center={message.center!r}"] if message.center else []
    tensors = tuple(sent for term in inner.terms for sent in term.tensors)
    return objective_of(
        pb.ObjectiveTerm(gradient_penalty=message), f"gradient_penalty({', '.join(words)})", tensors
    )


def _class_score(
    name: str,
    kind: pb.ClassScoreKind.ValueType,
    classes: Classes,
    at: str | None,
    positions: TextPositions | None,
) -> Objective:
    names = _class_names(classes)
    chosen: list[Any] = names or _class_list(name, classes)
    wanted = None if positions is None else positions.to_wire()
    if names and wanted is not None:
        raise TypeError(f"{name} with positions= takes token ids, not {names[0]!r}")
    message = pb.ClassScore(
        selector=_optional_text("at", at),
        classes=[] if names else chosen,
        class_names=names,
        kind=kind,
        positions=wanted,
    )
    more = len(chosen) - _MOST_CLASSES_SHOWN
    shown = ", ".join(map(repr, chosen[:_MOST_CLASSES_SHOWN])) + (f", ... {more:,} more" if more > 0 else "")
    words = [shown if len(chosen) == 1 else f"[{shown}]", *([f"at={at!r}"] if at is not None else [])]
    if wanted is not None:
        words.append(f"positions={positions_text(wanted)}")
    return objective_of(pb.ObjectiveTerm(class_score=message), f"{name}({', '.join(words)})")


def _class_names(classes: Any) -> list[str]:
    """Return the names of classes; empty if numbers are given."""
    if isinstance(classes, str):
        return [classes]
    if isinstance(classes, list | tuple) and classes and all(isinstance(entry, str) for entry in classes):
        return list(classes)
    return []


def _class_list(name: str, classes: Any) -> list[int]:
    rank = len(getattr(classes, "shape", ()))
    if rank > 1:
        raise TypeError(f"{name} takes one class or one for each sample, not an array of {rank} dimensions")
    is_several = isinstance(classes, Iterable) and (rank == 1 or not hasattr(classes, "shape"))
    chosen = [integer(f"{name}: a class", entry, low=0) for entry in (classes if is_several else [classes])]
    if not chosen:
        raise ValueError(f"{name} names no class")
    return chosen


def _labels(name: str, labels: ArrayLike | Numbers | float) -> WireTensor:
    """Return labels in a dtype that fits the loss: class indices in int64, other whole numbers in float32."""
    sent = tensor(f"{name}: labels", labels)
    dtype = DTYPE_NAMES[sent.dtype]
    takes_classes = name in ("cross_entropy", "nll")
    if dtype.startswith("complex"):
        raise TypeError(f"{name}: labels are real numbers, not {dtype}")
    if name == "nll" and dtype not in _INTEGERS:
        raise TypeError(f"nll: labels are integers, the indices of classes, not {dtype}")
    if takes_classes and dtype == "bool":
        raise TypeError(f"{name}: labels are class indices, not bool")
    if takes_classes and dtype in _INTEGERS:
        return _converted(sent, "int64")
    return _converted(sent, "float32") if dtype in _INTEGERS or dtype == "bool" else sent


def _converted(sent: WireTensor, dtype: str) -> WireTensor:
    array = np.frombuffer(sent.payload, wire_numpy_dtype(DTYPE_NAMES[sent.dtype])).reshape(sent.shape)
    return tensor("labels", array.astype(dtype))


def _function(name: str | None) -> pb.ElementFunction.ValueType:
    if name is None:
        return pb.ELEMENT_FUNCTION_UNSPECIFIED
    return FUNCTIONS[one_of("function", name, FUNCTIONS)]


def _optional_text(label: str, value: str | None) -> str:
    return "" if value is None else text(label, value)
