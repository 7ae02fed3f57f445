"""Start value of a request that starts in the middle, and the check that it fits.

See Note: [Partial passes] in `surgery.sessions.starting`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import predicted_signature
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Plan, Signature, StartAt, TensorInput
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Recording, Target, place, resolve
from trocar_server.tensors.reductions import dtype_name

_WHERE = "it must be a module's whole output, or one of its positional inputs"


@dataclass(frozen=True)
class Start:
    """Where a pass begins, and the signature of the model inputs that it replaces."""

    target: Target
    signature: Signature
    strides: tuple[int, ...] = ()
    """The value's strides in a full pass."""


def start_signature(deployment: Deployment, plan: Plan, start: StartAt) -> Signature:
    """Return the signature of the inputs for which a full pass would compute the value.

    The one in the request, or else that of the model's example input with the value's batch size.

    Raises:
        ServiceError: `START_NOT_POSSIBLE`, the model has no meta pass; `INVALID_ARGUMENT`, the
            inputs are not one tensor.
    """
    if deployment.meta is None:
        raise _impossible(start, "the model looks at its data, so no part of its pass can be left out")
    value = _value(plan)
    if start.inputs:
        return predicted_signature(deployment.hosted, start.inputs) or ()
    batch = value.shape[0] if value.shape else 1
    example = deployment.example_signature
    return tuple(replace(entry, shapes=_with_batch(entry.shapes, batch, entry.is_list)) for entry in example)


def find_start(plan: Plan, start: StartAt, signature: Signature, recording: Recording) -> Start:
    """Return the one value at which a pass starts, checked against the caller's tensor.

    Raises:
        ServiceError: A selector's error, `INVALID_ARGUMENT` for a selector of several values, or
            `START_NOT_POSSIBLE`, the given value has another shape or dtype.
    """
    if start.selector.records != "module":  # these may not be recorded
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
    _check_signature(plan, start, signature, leaf)
    return Start(target, signature, leaf.strides)


def _is_whole(target: Target) -> bool:
    """Whether the target can be replaced: a complete output or a complete argument."""
    is_whole = len(target.picks) == (target.port == "in")  # which holds values by position
    return is_whole and target.parameter is None


def check_after_start(resolved: Resolved, start: Start, at: StartAt, recording: Recording) -> None:
    """Refuse taps and edits on values before the start.

    Raises:
        ServiceError: `START_NOT_POSSIBLE`, naming the first of them.
    """
    begins = place(start.target, recording)
    for target in (*(entry.target for entry in resolved.targets), *resolved.surgery.targets()):
        if target.kind == "fx":
            raise _impossible(at, "graph nodes are collected in full passes only")
        if target.parameter is None and place(target, recording) < begins:
            raise _impossible(at, f"'{target.name}' comes before it in the pass")
    for entry in resolved.surgery.edits:
        calls = recording.modules[entry.target.path].calls if entry.target.parameter is not None else ()
        is_behind = bool(calls) and max(call.ended for call in calls) <= begins[0]
        if is_behind and entry.target not in [wanted.target for wanted in resolved.targets]:
            raise _impossible(at, f"the module of '{entry.target.name}' runs only before it")


def needs_more(at: StartAt, operator: str) -> ServiceError:
    """Return the error of an operator after the start that needs more than the given value."""
    problem = f"{operator} needs a value from before it, too; start after the place where they join"
    return _impossible(at, problem)


def needs_data(at: StartAt, problem: str) -> ServiceError:
    """Return the error of modules before the start that cannot run without data."""
    return _impossible(at, f"the part of the pass before it cannot run without data ({problem})")


def _value(plan: Plan) -> TensorInput:
    entries = [entry for entry in plan.inputs if isinstance(entry, TensorInput)]
    if len(entries) != 1 or len(plan.inputs) != 1:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "inputs: with start_at, give one tensor: the value to continue from"
        )
    return entries[0]


def _with_batch(shapes: Sequence[tuple[int, ...]], batch: int, is_list: bool) -> tuple[tuple[int, ...], ...]:
    if is_list:
        return tuple(shapes[:1]) * batch
    return tuple((batch, *shape[1:]) for shape in shapes)


def _check_signature(plan: Plan, start: StartAt, signature: Signature, leaf: Leaf) -> None:
    value, dtype = _value(plan), _value(plan).model_dtype
    if value.shape == leaf.shape and dtype == leaf.dtype:
        return
    inputs = ", ".join(str(shape) for entry in signature for shape in entry.shapes[:1])
    raise _impossible(
        start,
        f"the value given is {dtype_name(dtype)} {value.shape}, with inputs of shape {inputs} it is "
        f"{dtype_name(leaf.dtype or torch.float32)} {leaf.shape}. If it was computed from inputs of "
        "another shape, pass start_shape=",
    )


def _impossible(start: StartAt, problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.START_NOT_POSSIBLE,
        f"no pass can start at '{start.selector.text}': {problem}",
        selector=start.selector.text,
    )
