"""Starting in the middle: which value a request begins with, and whether it fits.

See Note: [Start in the middle] in `surgery.starting`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import predicted_signature
from trocar_server.engine.plan import Plan, Signature, StartAt, TensorInput
from trocar_server.engine.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.reductions import dtype_name
from trocar_server.surgery import Leaf, Recording, Target, moment, resolve

_WHERE = "it must be a module's whole output, or one of its positional inputs"


@dataclass(frozen=True)
class Start:
    """Where a pass begins, and the form of the model's inputs that it stands for."""

    target: Target
    signature: Signature
    strides: tuple[int, ...] = ()
    """How the value lies in memory in a full pass."""


def start_signature(host: Host, plan: Plan, start: StartAt) -> Signature:
    """Return the form of the inputs with which a full pass would have given the value.

    What the caller says, or else the model's example input with the value's batch size.

    Raises:
        ServiceError: `START_NOT_POSSIBLE`, the model has no pass without data; `INVALID_ARGUMENT`, the
            inputs are not one tensor.
    """
    if host.meta is None:
        raise _impossible(start, "the model looks at its data, so no part of its pass can be left out")
    value = _value(plan)
    if start.inputs:
        return predicted_signature(host.hosted, start.inputs) or ()
    batch = value.shape[0] if value.shape else 1
    example = host.example_signature
    return tuple(replace(entry, shapes=_with_batch(entry.shapes, batch, entry.is_list)) for entry in example)


def find_start(plan: Plan, start: StartAt, signature: Signature, recording: Recording) -> Start:
    """Return the one value at which a pass is to start, checked against what the caller gives.

    Raises:
        ServiceError: A selector's error, `INVALID_ARGUMENT` for a selector of several values, or
            `START_NOT_POSSIBLE`, the given value has another form.
    """
    if start.selector.kind in ("fx", "fn"):  # which were perhaps not recorded
        raise _impossible(start, _WHERE)
    ((target, leaf), *more) = resolve([start.selector], recording)[0]
    if more:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"start_at: '{start.selector.text}' stands for {len(more) + 1} values; name one",
            field="start_at",
        )
    if target.kind != "module" or not _is_whole(target):
        raise _impossible(start, _WHERE)
    _check_form(plan, start, signature, leaf)
    return Start(target, signature, leaf.strides)


def _is_whole(target: Target) -> bool:
    """Whether the target is what one can put in place: an output as a whole, or an argument as a whole."""
    return (target.port, len(target.picks)) in (("out", 0), ("in", 1))


def check_after_start(resolved: Resolved, start: Start, at: StartAt, recording: Recording) -> None:
    """Refuse taps and edits on what lies before the start.

    Raises:
        ServiceError: `START_NOT_POSSIBLE`, naming the first of them.
    """
    begins = moment(start.target, recording)
    for target in (*(entry.target for entry in resolved.targets), *resolved.surgery.targets()):
        if target.kind == "fx":
            raise _impossible(at, "graph nodes are collected in full passes only")
        is_before = target.kind == "module" and target.parameter is None
        if is_before and moment(target, recording) < begins:
            raise _impossible(at, f"'{target.name}' comes before it in the pass")


def needs_more(at: StartAt, operator: str) -> ServiceError:
    """Say that an operator after the start needed more than the value given."""
    problem = f"{operator} needs a value from before it, too; start after the place where they join"
    return _impossible(at, problem)


def needs_data(at: StartAt, problem: str) -> ServiceError:
    """Say that what comes before the start cannot run without data."""
    return _impossible(at, f"what comes before it does not run without data ({problem})")


def _value(plan: Plan) -> TensorInput:
    entries = [entry for entry in plan.inputs if isinstance(entry, TensorInput)]
    if len(entries) != 1 or len(plan.inputs) != 1:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "inputs: with start_at, give the one tensor to go on with"
        )
    return entries[0]


def _with_batch(shapes: Sequence[tuple[int, ...]], batch: int, is_list: bool) -> tuple[tuple[int, ...], ...]:
    if is_list:
        return tuple(shapes[:1]) * batch
    return tuple((batch, *shape[1:]) for shape in shapes)


def _check_form(plan: Plan, start: StartAt, signature: Signature, leaf: Leaf) -> None:
    value, dtype = _value(plan), _value(plan).model_dtype
    if value.shape == leaf.shape and dtype == leaf.dtype:
        return
    inputs = ", ".join(str(shape) for entry in signature for shape in entry.shapes[:1])
    raise _impossible(
        start,
        f"the value given is {dtype_name(dtype)} {value.shape}, with inputs of shape {inputs} it is "
        f"{dtype_name(leaf.dtype or torch.float32)} {leaf.shape}. Where it comes from inputs of another "
        "shape, say so: start_shape=",
    )


def _impossible(start: StartAt, problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.START_NOT_POSSIBLE,
        f"no pass can start at '{start.selector.text}': {problem}",
        selector=start.selector.text,
    )
