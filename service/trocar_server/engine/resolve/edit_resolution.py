"""Edit resolution: the target of each edit in a recorded pass, and the check that it can be made."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import EditRequest
from trocar_server.engine.resolve.differentiable import with_gradients
from trocar_server.errors import ServiceError, unknown
from trocar_server.surgery import (
    CallInput,
    Leaf,
    Recording,
    Selector,
    Target,
    call_order,
    parse_selector,
    resolve,
)
from trocar_server.surgery.axes.layout import channel_dim_of, samples_dim_of, tokens_dim_of
from trocar_server.surgery.recording.recording import ModuleCall
from trocar_server.surgery.resolution.values import Value
from trocar_server.surgery.selectors.selectors import SINK
from trocar_server.surgery.sessions.editing import GateValue
from trocar_server.tensors.edits import (
    AddInput,
    Edit,
    Gate,
    MeanAblate,
    Resample,
    Skip,
    Swap,
    check_edit,
    edit_bytes,
    selects_nothing,
)

_SHAPED_IN_PLACE = frozenset(
    f"{name}_"
    for name in (
        *("as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes"),
        *("swapdims", "t", "transpose", "unsqueeze"),
    )
)
"""Functions that give a tensor another shape in place; see `CallWrites`."""


@dataclass(frozen=True)
class SwapValue:
    """The replacement value of a swap: from this pass, or from a source's when it names one."""

    source: str
    target: Target
    selector: Selector

    @property
    def key(self) -> str:
        """Its key among the collected values."""
        return f"{self.source}:{self.target.name}" if self.source else self.target.name


@dataclass(frozen=True)
class PlannedEdit:
    """One value to edit.

    Attributes:
        position: Position of its request in the list of edits.
        request: The edit.
        target: The value.
        leaf: Shape and dtype of the value.
        call_input: The input of the same call that the edit needs.
        swap: The replacement of a swap.
        gate: The value that its gate reads, if that is another one, and its dimensions.
        written_bytes: The bytes of inputs of its call that may be written to. See `call_writes`.
    """

    position: int
    request: EditRequest
    target: Target
    leaf: Leaf
    call_input: CallInput | None = None
    swap: SwapValue | None = None
    written_bytes: int = 0
    gate: tuple[Target | None, GateValue] | None = None

    @property
    def byte_count(self) -> int:
        """The peak bytes that it needs beside the value."""
        return edit_bytes(self.request.edit, *_signature(self.leaf)) + self.written_bytes


Expansions = tuple[tuple[str, tuple[str, ...]], ...]
"""Selectors as sent, and the names that each expanded to."""


def plan_edits(
    edits: Sequence[EditRequest], recording: Recording, sources: Mapping[str, Recording | None]
) -> tuple[tuple[PlannedEdit, ...], Expansions]:
    """Resolve edits and check that each fits its value.

    Args:
        edits: The requested edits.
        recording: Of this pass.
        sources: Recordings of the passes on other inputs, by name; None where not known yet.

    Raises:
        ServiceError: A selector's error, `EDIT_SHAPE_MISMATCH`, `EDIT_DTYPE_REJECTED`, `EDIT_NOT_POSSIBLE` or
            `UNKNOWN_SOURCE`; for a pattern, where the edit fits none of its matches.
    """
    result: list[PlannedEdit] = []
    expansions = []
    for position, request in enumerate(edits):
        planned = list(_plan_one(position, request, recording, sources))
        result += planned
        expansions.append((request.selector.text, tuple(entry.target.name for entry in planned)))
    return tuple(result), tuple(expansions)


def _plan_one(
    position: int, request: EditRequest, recording: Recording, sources: Mapping[str, Recording | None]
) -> Iterator[PlannedEdit]:
    for problem in place_problems(request):
        raise _impossible(request.selector.text, request.edit, problem)
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
            problems.append(problem)  # a pattern skips values that the edit does not fit
    if not count:
        raise problems[0]


def _planned(
    position: int,
    request: EditRequest,
    value: Value,
    recording: Recording,
    sources: Mapping[str, Recording | None],
) -> PlannedEdit:
    target, leaf = value
    request = _laid_out(request, target)
    edit = request.edit
    if target.kind == "fx":
        raise _impossible(target.name, edit, "nodes of a traced graph cannot be edited; select the module")
    if target.view:
        raise _impossible(
            target.name,
            edit,
            "for a single token PyTorch packs the heads into one dimension; send two or more tokens",
        )
    if target.kind == "fn" and target.port == "in(out)":
        raise _impossible(target.name, edit, "the function writes to it and reads nothing of it")
    if target.kind == "fn" and target.path in _SHAPED_IN_PLACE:
        raise _impossible(target.name, edit, "it changes a shape in place; edit what comes before it")
    call_input, swap, other = None, None, None
    if isinstance(edit.operation, (AddInput, Skip)):
        call_input, other = _call_input(target, edit, recording)
    elif isinstance(edit.operation, Swap):
        swap, other = _swap_value(edit.operation, target, recording, sources)
    with named(target.name):
        other_signature = (None, None) if other is None else (other.shape, other.dtype)
        check_edit(edit, *_signature(leaf), other_shape=other_signature[0], other_dtype=other_signature[1])
        if selects_nothing(edit, *_signature(leaf)):
            raise ServiceError(
                ErrorReason.EDIT_SHAPE_MISMATCH,
                f"{edit.operation} selects no element of a value of shape {_signature(leaf)[0]}, so it would "
                "change nothing; select an existing position",
            )
    return PlannedEdit(
        position,
        request,
        target,
        leaf,
        call_input,
        swap,
        _written_bytes(target, edit, recording),
        None if edit.gate is None else _gate_value(edit, edit.gate, value, recording),
    )


def _laid_out(request: EditRequest, target: Target) -> EditRequest:
    """Return a request with a value's dimensions, where they are known and the edit does not say them."""
    layout, edit = target.layout, request.edit
    if layout is None:
        return request
    channels = channel_dim_of(layout, edit.channel_dim)
    return replace(request, edit=replace(edit, channel_dim=channels, samples_dim=samples_dim_of(layout)))


def _signature(leaf: Leaf) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a value, which resolution has checked to be a tensor."""
    return leaf.shape or (), leaf.dtype or torch.float32


def place_problems(request: EditRequest) -> Iterator[str]:
    """Yield why an edit is impossible at its place, whatever the model."""
    selector, operation = request.selector, request.edit.operation
    is_value = not selector.is_gradient and selector.parameter is None
    if selector.kind == "fx":
        yield "nodes of a traced graph cannot be edited; select the module"
    if isinstance(operation, AddInput | Skip) and not (is_value and selector.port == "out"):
        yield "it is for the output of a module; leave the port out"
    if selector.port == SINK:
        yield (
            "the model drops the sink's share after the softmax, so an edit would change nothing; edit "
            "`/logits` or `/pattern`, or the parameter from which the sink comes, for example `/param(sinks)`"
        )
    if isinstance(operation, AddInput | Skip) and selector.is_of_function:
        yield "it is for modules; select one"
    if isinstance(operation, Skip) and selector.picks:
        yield "it is for the whole call; leave the pick out"
    if isinstance(operation, Skip) and request.is_after_taps:
        yield "a module that does not run has no value of its own for taps; leave the order out"
    if isinstance(operation, Swap) and not is_value:
        yield "values are swapped in the forward pass; select an output or input"
    if isinstance(operation, Swap) and not operation.source and selector.text == operation.selector:
        yield "the value would replace itself; give another selector, or a source"
    if isinstance(operation, MeanAblate | Resample) and selector.parameter is not None:
        yield "a parameter has no samples; select a value of the pass"


def _call_input(target: Target, edit: Edit, recording: Recording) -> tuple[CallInput, Leaf]:
    """Return the first input of the same call that is a tensor."""
    call = _call_of(target, recording)
    leaf = next((leaf for leaf in call.inputs if leaf.shape is not None), None)
    if leaf is None:
        raise _impossible(target.name, edit, "the module takes no tensor")
    if isinstance(edit.operation, Skip) and (target.picks or len(call.outputs) != 1):
        raise _impossible(
            target.name, edit, "the module returns more than one tensor; edit a module inside it"
        )
    clone = leaf.is_overwritten or isinstance(edit.operation, Skip)
    return CallInput(leaf.port, leaf.picks, clone), leaf


def _written_bytes(target: Target, edit: Edit, recording: Recording) -> int:
    """Return the bytes of the inputs of a call that may write to them, all copied; 0 where it cannot."""
    is_of_call = target.parameter is None and not target.is_gradient
    if not is_of_call or isinstance(edit.operation, Skip):  # a skipped call writes nothing
        return 0
    inputs = [leaf for leaf in _call_of(target, recording).inputs if len(leaf.picks) <= 1]
    return sum(leaf.byte_count for leaf in inputs) if any(leaf.is_overwritten for leaf in inputs) else 0


def _call_of(target: Target, recording: Recording) -> ModuleCall:
    return recording.of_kind(target.kind)[target.path].calls[target.call]


def _swap_value(
    swap: Swap, target: Target, recording: Recording, sources: Mapping[str, Recording | None]
) -> tuple[SwapValue, Leaf | None]:
    if swap.source and swap.source not in sources:
        raise unknown(
            ErrorReason.UNKNOWN_SOURCE, "source", swap.source, sources, "give its inputs in `sources`"
        )
    other = sources[swap.source] if swap.source else recording
    selector = parse_selector(swap.selector or target.name)
    if other is None:
        return SwapValue(swap.source, target, selector), None
    with _of_source(swap.source):
        (values,) = resolve([selector], other)
    if len(values) != 1 or selector.is_gradient or selector.parameter is not None:
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"swap at '{target.name}': '{selector.text}' stands for {len(values)} values; swap takes one "
            "value of a pass",
        )
    ((origin, leaf),) = values
    if origin.kind != "module" or target.kind != "module":
        raise ServiceError(ErrorReason.EDIT_NOT_POSSIBLE, f"swap at '{target.name}': only values of modules")
    if not swap.source and call_order(origin, recording) >= call_order(target, recording):
        raise ServiceError(
            ErrorReason.EDIT_NOT_POSSIBLE,
            f"swap at '{target.name}': '{origin.name}' is computed later in the pass; give the same inputs "
            "as a source to swap in a later value",
        )
    return SwapValue(swap.source, origin, selector), leaf


def _gate_value(
    edit: Edit, gate: Gate, value: Value, recording: Recording
) -> tuple[Target | None, GateValue]:
    """Return the value that a gate reads, None for the edited one, and the dimensions of both.

    Raises:
        ServiceError: `EDIT_NOT_POSSIBLE`, it comes later, or one of the two has no tokens, or others.
    """
    target, leaf = value
    ((origin, read),) = resolve([parse_selector(gate.place)], recording)[0]
    is_own = origin.name == target.name
    problem = ""
    if target.kind != "module" or target.is_gradient or target.parameter is not None:
        problem = "a gate is for edits of values of modules"
    elif not is_own and call_order(origin, recording) >= call_order(target, recording):
        problem = f"its gate reads '{origin.name}', which is computed later in the pass; use an earlier place"
    dims = [(samples_dim_of(each.layout), tokens_dim_of(each.layout)) for each in (origin, target)]
    sizes = [
        tuple(0 if dim is None else (one.shape or ())[dim] for dim in pair)
        for one, pair in zip((read, leaf), dims, strict=True)
    ]
    if not problem and (None in (*dims[0], *dims[1]) or len(read.shape or ()) != 3 or sizes[0] != sizes[1]):
        problem = (
            f"a gate reads one number for each token, and '{origin.name}' of shape {read.shape} has not "
            f"the samples and tokens of this value of shape {leaf.shape}"
        )
    if problem:
        raise _impossible(target.name, edit, problem)
    (samples, tokens), (edited_samples, edited_tokens) = dims
    assert samples is not None
    assert tokens is not None
    assert edited_samples is not None
    assert edited_tokens is not None
    key = "" if is_own else origin.name
    return (None if is_own else origin), GateValue(key, samples, tokens, edited_samples, edited_tokens)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Add the value's name to errors."""
    try:
        yield
    except ServiceError as error:
        message = f"'{name}': {error.message}"
        raise ServiceError(error.reason, message, **{**error.details, "name": name}) from None


@contextmanager
def _of_source(name: str) -> Iterator[None]:
    """Add the name of the source, if any, to errors."""
    try:
        yield
    except ServiceError as error:
        message = f"source '{name}': {error.message}" if name else error.message
        raise ServiceError(error.reason, message, **error.details) from None


def _impossible(name: str, edit: Edit, problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.EDIT_NOT_POSSIBLE, f"{edit.operation.name} at '{name}': {problem}", name=name
    )
