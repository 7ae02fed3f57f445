"""Checking edits against a recorded pass: what each one stands for, and whether it can be made there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.edits import AddInput, Edit, Skip, Swap, check_edit, edit_bytes
from trocar_server.engine.differentiable import with_gradients
from trocar_server.engine.plan import EditRequest
from trocar_server.errors import ServiceError, unknown
from trocar_server.surgery import CallInput, Leaf, Recording, Target, moment, parse_selector, resolve
from trocar_server.surgery.recording import Call
from trocar_server.surgery.values import Value


@dataclass(frozen=True)
class SwapValue:
    """What a swap puts in: a value of this pass, or of a source's when it names one."""

    source: str
    target: Target

    @property
    def key(self) -> str:
        """What it is called among the values that were found."""
        return f"{self.source}:{self.target.name}" if self.source else self.target.name


@dataclass(frozen=True)
class PlannedEdit:
    """One value that will be changed.

    Attributes:
        position: Of its request in the list of edits.
        request: What is to be done.
        target: To which value.
        leaf: The form of the value.
        call_input: The input of the same call that it needs.
        swap: What it puts in.
    """

    position: int
    request: EditRequest
    target: Target
    leaf: Leaf
    call_input: CallInput | None = None
    swap: SwapValue | None = None

    @property
    def byte_count(self) -> int:
        """The most bytes that it holds beside the value, at once."""
        return edit_bytes(self.request.edit, *_form(self.leaf))


Expansions = tuple[tuple[str, tuple[str, ...]], ...]
"""Selectors as they were sent, and the names that each became."""


def plan_edits(
    edits: Sequence[EditRequest], recording: Recording, sources: Mapping[str, Recording | None]
) -> tuple[tuple[PlannedEdit, ...], Expansions]:
    """Resolve edits and check that each fits its value.

    Args:
        edits: What is asked for.
        recording: Of this pass.
        sources: Of the passes on other inputs, by name; None where it is not known yet.

    Raises:
        ServiceError: A selector's error, `EDIT_SHAPE_MISMATCH`, `EDIT_DTYPE_REJECTED`, `EDIT_NOT_POSSIBLE` or
            `UNKNOWN_SOURCE`; of a pattern, where nothing that it matches can be edited so.
    """
    found: list[PlannedEdit] = []
    expansions = []
    for position, request in enumerate(edits):
        planned = list(_plan_one(position, request, recording, sources))
        found += planned
        expansions.append((request.selector.text, tuple(entry.target.name for entry in planned)))
    return tuple(found), tuple(expansions)


def _plan_one(
    position: int, request: EditRequest, recording: Recording, sources: Mapping[str, Recording | None]
) -> Iterator[PlannedEdit]:
    _check_place(request)
    (values,) = resolve([request.selector], recording)
    if request.selector.is_gradient:
        values = with_gradients(values, request.selector, recording)
    problems: list[ServiceError] = []
    count = 0
    for target, leaf in values:
        try:
            yield _planned(position, request, (target, leaf), recording, sources)
            count += 1
        except ServiceError as problem:
            is_other_kind = problem.reason is ErrorReason.EDIT_DTYPE_REJECTED
            if not (request.selector.is_plural and is_other_kind):
                raise
            problems.append(problem)  # a pattern skips what is no number that can be edited so
    if not count:
        raise problems[0]


def _planned(
    position: int,
    request: EditRequest,
    value: Value,
    recording: Recording,
    sources: Mapping[str, Recording | None],
) -> PlannedEdit:
    (target, leaf), edit = value, request.edit
    if target.kind == "fx":
        raise _impossible(target.name, edit, "nodes of a traced graph cannot be edited; select the module")
    if target.kind == "fn" and target.port == "out" and target.path.endswith("_"):
        raise _impossible(target.name, edit, "it changes its input in place; edit what comes before it")
    call_input, swap, other = None, None, None
    if isinstance(edit.operation, (AddInput, Skip)):
        call_input, other = _call_input(target, edit, recording)
    elif isinstance(edit.operation, Swap):
        swap, other = _swap_value(edit.operation, target, recording, sources)
    with named(target.name):
        other_form = (None, None) if other is None else (other.shape, other.dtype)
        check_edit(edit, *_form(leaf), other_shape=other_form[0], other_dtype=other_form[1])
    return PlannedEdit(position, request, target, leaf, call_input, swap)


def _form(leaf: Leaf) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a value, which resolving has found to be a tensor."""
    return leaf.shape or (), leaf.dtype or torch.float32


def _check_place(request: EditRequest) -> None:
    selector, operation = request.selector, request.edit.operation
    if selector.kind == "fx":
        raise _not_possible(request, "nodes of a traced graph cannot be edited; select the module")
    is_forward = not selector.is_gradient and selector.parameter is None
    if isinstance(operation, (AddInput, Skip)) and not (is_forward and selector.port == "out"):
        raise _not_possible(request, f"{operation} is for outputs of modules; leave the port out")
    if isinstance(operation, (AddInput, Skip)) and selector.kind == "fn":
        raise _not_possible(request, f"{operation} is for modules")
    if isinstance(operation, Swap) and not is_forward:
        raise _not_possible(request, "swap is for values of the forward pass")
    if isinstance(operation, Skip) and request.is_after_taps:
        raise _not_possible(request, "a module that is skipped has no other output that taps could see")


def _call_input(target: Target, edit: Edit, recording: Recording) -> tuple[CallInput, Leaf]:
    """Return the first input of the same call that is a tensor."""
    call = _call_of(target, recording)
    leaf = next((leaf for leaf in call.inputs if leaf.shape is not None), None)
    if leaf is None:
        raise _impossible(target.name, edit, "the module takes no tensor")
    if isinstance(edit.operation, Skip) and (target.picks or len(call.outputs) != 1):
        raise _impossible(target.name, edit, "the module returns more than one tensor; edit what is inside")
    clone = leaf.is_overwritten or isinstance(edit.operation, Skip)
    return CallInput(leaf.port, leaf.picks, clone), leaf


def _call_of(target: Target, recording: Recording) -> Call:
    return recording.of_kind(target.kind)[target.path].calls[target.call]


def _swap_value(
    swap: Swap, target: Target, recording: Recording, sources: Mapping[str, Recording | None]
) -> tuple[SwapValue, Leaf | None]:
    if swap.source and swap.source not in sources:
        raise unknown(
            ErrorReason.UNKNOWN_SOURCE, "source", swap.source, sources, "give its inputs in `sources`"
        )
    other = sources[swap.source] if swap.source else recording
    if other is None:
        return SwapValue(swap.source, target), None
    selector = parse_selector(swap.selector or target.name)
    (values,) = resolve([selector], other)
    if len(values) != 1 or selector.is_gradient or selector.parameter is not None:
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"swap at '{target.name}': '{selector.text}' stands for {len(values)} values; swap takes one "
            "value of a pass",
        )
    ((there, leaf),) = values
    if there.kind != "module" or target.kind != "module":
        raise ServiceError(ErrorReason.EDIT_NOT_POSSIBLE, f"swap at '{target.name}': only values of modules")
    if not swap.source and moment(there, recording) >= moment(target, recording):
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"swap at '{target.name}': '{there.name}' is computed later in the pass; give the same inputs "
            "as a source to swap in a later value",
        )
    return SwapValue(swap.source, there), leaf


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say in errors which value they are about."""
    try:
        yield
    except ServiceError as error:
        message = f"'{name}': {error.message}"
        raise ServiceError(error.reason, message, **{**error.details, "name": name}) from None


def _not_possible(request: EditRequest, problem: str) -> ServiceError:
    return _impossible(request.selector.text, request.edit, problem)


def _impossible(name: str, edit: Edit, problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.EDIT_NOT_POSSIBLE, f"{edit.operation.name} at '{name}': {problem}", name=name
    )
