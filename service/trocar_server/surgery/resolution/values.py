"""Values of call records: selected calls, in call order, and selected tensors of each call."""

from collections.abc import Iterable
from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.surgery.recording.recording import NESTED, Leaf, ModuleCall, ModuleRecord
from trocar_server.surgery.resolution.call_records import Records
from trocar_server.surgery.resolution.inputs import input_place, shown_place
from trocar_server.surgery.selectors.naming import canonical_name, split_port
from trocar_server.surgery.selectors.selectors import ALL_CALLS, Order, Selector
from trocar_server.surgery.sessions.taps import Target
from trocar_server.surgery.structure import Picks, format_picks

Value = tuple[Target, Leaf]

_MOST_NAMED = 5
"""Modules that run, in an error about one that does not."""
_MOST_LISTED = 20
"""Values of a call in an error."""


@dataclass(frozen=True)
class CallValues:
    """The selected tensors of one call, and their place in execution order."""

    call_order: int
    values: list[Value]


def values_of(selector: Selector, records: Records) -> list[Value]:
    """Return the tensors that a selector matches, in execution order.

    An exact path must be called once or have a call index or an order. A pattern takes every call that
    it matches and that yields a tensor.

    Raises:
        ServiceError: See `resolve`.
    """
    matched = records.matching(selector)
    called = [record for record in matched if record.calls]
    if not called:
        raise _never_called(selector, matched[0], records)
    calls: list[CallValues] = []
    problems: list[ServiceError] = []
    for record in called:
        try:
            indices = _call_indices(selector, record, records)
        except ServiceError as problem:
            problems.append(problem)  # a pattern skips modules that lack the value
            continue
        for index in indices:
            try:
                calls.append(_values_of_call(selector, record, index, records))
            except ServiceError as problem:
                problems.append(problem)
    if not calls:
        raise problems[0]
    calls.sort(key=lambda call: call.call_order)
    chosen = calls if selector.order is None else _chosen(calls, selector.order, selector, records)
    return [value for call in chosen for value in call.values]


def _chosen(calls: list[CallValues], order: Order, selector: Selector, records: Records) -> list[CallValues]:
    count = len(calls)
    if order.is_range:
        result = calls[order.start : order.stop]
        if not result:
            raise ServiceError(
                records.unknown,
                f"'{selector.text}' is an empty range; without it there {_are(count)}, "
                f"'#0' to '#{count - 1}', and the end of a range is not in it",
                selector=selector.text,
                call_count=str(count),
            )
        return result
    place = order.start or 0
    if not -count <= place < count:
        raise ServiceError(
            ErrorReason.CALL_OUT_OF_RANGE,
            f"'{selector.text}': there {_are(count)} to choose from, so '#{place}' does not exist; "
            f"the last one is '#{count - 1}'",
            selector=selector.text,
            call_count=str(count),
        )
    return [calls[place]]


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count} call{'s' * (count > 1)}"


def _call_indices(selector: Selector, record: ModuleRecord, records: Records) -> Iterable[int]:
    count = len(record.calls)
    if selector.call == ALL_CALLS:
        return range(count)
    noun, name = records.noun, canonical_name(record.path, None, "out", (), records.kind)
    if selector.call is None:
        if count == 1 or selector.is_pattern or selector.order is not None:
            return range(count)
        raise ServiceError(
            ErrorReason.AMBIGUOUS_CALL,
            f"{noun} '{record.path}' is called {count} times in one pass; name the call: "
            f"'{name}@0' to '{name}@{count - 1}', '{name}@-1' for the last, '{name}@*' for all",
            selector=selector.text,
            call_count=str(count),
        )
    index = int(selector.call)
    if -count <= index < count:
        return (index % count,)
    raise ServiceError(
        ErrorReason.CALL_OUT_OF_RANGE,
        f"{noun} '{record.path}' is called {count} time{'s' * (count > 1)} in one pass, so '@{index}' does "
        f"not exist; the last call is '@{count - 1}'",
        selector=selector.text,
        call_count=str(count),
    )


def _values_of_call(selector: Selector, record: ModuleRecord, index: int, records: Records) -> CallValues:
    call = record.calls[index]
    call_label = index if len(record.calls) > 1 else None
    result = []
    for leaf in _port_leaves(selector, record, call, records.kind):
        name = canonical_name(
            record.path,
            call_label,
            *shown_place(leaf, record.arguments),
            records.kind,
            is_gradient=selector.is_gradient,
        )
        target = Target(
            name,
            record.path,
            index,
            leaf.port,
            leaf.picks,
            clone=leaf.is_overwritten,
            kind=records.kind,
            is_gradient=selector.is_gradient,
        )
        result.append((target, leaf))
    return CallValues(call.started if _is_input(selector) else call.ended, result)


def _is_input(selector: Selector) -> bool:
    return selector.port.startswith("in")


def _port_leaves(selector: Selector, record: ModuleRecord, call: ModuleCall, kind: str) -> list[Leaf]:
    """Return the tensors of the port below the pick."""
    if _is_input(selector):
        port, picks = input_place(selector, record.arguments, call)
        leaves = [leaf for leaf in call.inputs if leaf.port == port]
    else:
        port, picks = selector.port, selector.picks
        leaves = [leaf for leaf in call.outputs if leaf.port == port]
    below = [leaf for leaf in leaves if _is_below(leaf, picks, leaves)]
    if not below and (picks or port != "out"):
        raise _unknown_pick(selector, record, call, kind)
    tensors = [leaf for leaf in below if leaf.shape is not None]
    if not tensors:
        raise _not_a_tensor(selector, below, _shown_inputs(record, call, kind) if _is_input(selector) else [])
    return tensors


def _is_below(leaf: Leaf, picks: Picks, leaves: list[Leaf]) -> bool:
    """Whether the picks lead to a leaf or to a structure around it; negative positions count from the end."""
    if len(leaf.picks) < len(picks):
        return False
    for depth, (key, own) in enumerate(zip(picks, leaf.picks, strict=False)):
        if key == own:
            continue
        keys = {other.picks[depth] for other in leaves if other.picks[:depth] == leaf.picks[:depth]}
        if not isinstance(key, int) or key >= 0 or key in keys or key + len(keys) != own:
            return False
    return True


def _never_called(selector: Selector, record: ModuleRecord, records: Records) -> ServiceError:
    parent = record.path.rpartition(".")[0] if records.kind == "module" else ""
    while parent and not records.by_path[parent].calls:
        parent = parent.rpartition(".")[0]
    inside = _running_inside(record, records)
    if inside:
        hint = f"; modules inside it that run: {inside}"
    elif parent:
        hint = f"; its nearest enclosing module that runs is '{parent}'"
    else:
        running = [path for path, other in records.by_path.items() if path and other.calls]
        near = list(dict.fromkeys([*nearest(record.path, running), *running]))[:_MOST_NAMED]
        hint = f"; those that run: {', '.join(near)}" if near else ""
    return ServiceError(
        ErrorReason.MODULE_NOT_CALLED,
        f"{records.noun} '{record.path}' exists, but the forward pass never calls it{hint}",
        selector=selector.text,
        nearest=parent,
    )


def _running_inside(record: ModuleRecord, records: Records) -> str:
    """List the modules that run next inside a container; numbered ones as a range."""
    if records.kind != "module" or not record.path:
        return ""
    start = f"{record.path}."
    running = [path for path, other in records.by_path.items() if path.startswith(start) and other.calls]
    own = set(running)
    next_ones = [path for path in running if not any(outer in own for outer in _outer(path, len(start)))]
    shown = [canonical_name(path, None, "out", ()) for path in next_ones]
    is_numbered = all(path.removeprefix(start).isdecimal() for path in next_ones)
    if is_numbered and len(shown) > 2:
        return f"'{shown[0]}' to '{shown[-1]}'"
    return ", ".join([*shown[:_MOST_NAMED], "..."] if len(shown) > _MOST_NAMED else shown)


def _outer(path: str, start: int) -> list[str]:
    """Return the paths around a module, down from the module whose path ends before `start`."""
    dots = [at for at, char in enumerate(path) if char == "." and at >= start]
    return [path[:at] for at in dots]


def _unknown_pick(selector: Selector, record: ModuleRecord, call: ModuleCall, kind: str) -> ServiceError:
    problem = f"the value has no element {format_picks(selector.picks) or selector.port}"
    if _is_input(selector):
        available = _shown_inputs(record, call, kind)
        first = record.arguments.names[:1]
        if selector.port == "in" and not isinstance((*selector.picks, "")[0], int):
            what = (
                f"'{first[0]}', the first parameter of its forward" if first else "a first input by position"
            )
            has_first = any((leaf.port, leaf.picks[:1]) == ("in", (0,)) for leaf in call.inputs)
            problem = problem if has_first else f"the call gets no value for {what}"
        elif selector.port == "in":
            problem = (
                f"the call has no input {format_picks(selector.picks)}, counted by parameters of forward"
            )
        elif not selector.picks:
            problem = f"the call has no input '{split_port(selector.port)[1]}'"
    else:
        available = [canonical_name(record.path, None, leaf.port, leaf.picks, kind) for leaf in call.outputs]
    return ServiceError(
        ErrorReason.UNKNOWN_PICK,
        f"'{selector.text}': {problem}; available: {', '.join(available[:_MOST_LISTED]) or 'none'}",
        selector=selector.text,
    )


def _shown_inputs(record: ModuleRecord, call: ModuleCall, kind: str) -> list[str]:
    places = (shown_place(leaf, record.arguments) for leaf in call.inputs if leaf.shape is not None)
    return [canonical_name(record.path, None, *place, kind) for place in places]


def _not_a_tensor(selector: Selector, leaves: list[Leaf], others: list[str]) -> ServiceError:
    kinds = sorted({leaf.type_name for leaf in leaves})
    hint = f"; tensors among its inputs: {', '.join(others[:_MOST_LISTED])}" if others else ""
    problem = f"is not a tensor and contains none (it is {', '.join(kinds) or 'empty'}){hint}"
    if NESTED in kinds:
        problem = (
            "is a nested tensor in the recorded pass: its samples have different lengths, so it has no "
            "shape; choose a value before or after the part that works on nested tensors, or build the "
            f"model with `enable_nested_tensor=False`{hint}"
        )
    return ServiceError(ErrorReason.NOT_A_TENSOR, f"'{selector.text}' {problem}", selector=selector.text)
