"""From selectors to targets: what each one stands for in a recorded pass."""

from collections.abc import Iterable

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, unknown
from trocar_server.surgery.recording import Call, Leaf, ModuleRecord, Recording
from trocar_server.surgery.selectors import ALL_CALLS, Selector, canonical_name
from trocar_server.surgery.structure import Picks, format_picks
from trocar_server.surgery.taps import Target


def resolve(selectors: Iterable[Selector], recording: Recording) -> list[list[tuple[Target, Leaf]]]:
    """Return, for each selector, the tensors it stands for, in execution order.

    An exact path must name one module that is called, once or with a call index; a pattern takes every
    call of every module that it matches and that yields a tensor.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, `MODULE_NOT_CALLED`, `AMBIGUOUS_CALL`, `CALL_OUT_OF_RANGE`,
            `UNKNOWN_PICK` or `NOT_A_TENSOR`, with near names as a hint.
    """
    return [_resolve_one(selector, recording) for selector in selectors]


def _resolve_one(selector: Selector, recording: Recording) -> list[tuple[Target, Leaf]]:
    matched = _matching(selector, recording)
    called = [record for record in matched if record.calls]
    if not called:
        raise _never_called(selector, matched, recording)
    values: list[tuple[int, Target, Leaf]] = []
    problems: list[ServiceError] = []
    for record in called:
        try:
            for index in _call_indices(selector, record):
                values += _values(selector, record, index)
        except ServiceError as problem:
            problems.append(problem)  # a pattern skips what others of its modules have
    if not values:
        raise problems[0]
    return [(target, leaf) for _, target, leaf in sorted(values, key=lambda value: value[0])]


def _matching(selector: Selector, recording: Recording) -> list[ModuleRecord]:
    if not selector.is_pattern:
        if selector.path in recording.modules:
            return [recording.modules[selector.path]]
        raise _unknown_module(selector, recording)
    matched = [r for r in recording.modules.values() if r.path and selector.matches(r.path, r.type_name)]
    if not matched:
        raise _unknown_module(selector, recording)
    return matched


def _call_indices(selector: Selector, record: ModuleRecord) -> Iterable[int]:
    count = len(record.calls)
    if selector.call == ALL_CALLS:
        return range(count)
    if selector.call is None:
        if count == 1 or selector.is_pattern:
            return range(count)
        raise ServiceError(
            ErrorReason.AMBIGUOUS_CALL,
            f"module '{record.path}' is called {count} times in one pass; say which call is meant: "
            f"'{record.path}@0' to '{record.path}@{count - 1}', '{record.path}@-1' for the last, "
            f"'{record.path}@*' for all",
            selector=selector.text,
            call_count=str(count),
        )
    index = int(selector.call)
    if -count <= index < count:
        return (index % count,)
    raise ServiceError(
        ErrorReason.CALL_OUT_OF_RANGE,
        f"module '{record.path}' is called {count} time{'s' * (count > 1)} in one pass, so '@{index}' does "
        f"not exist; the last call is '@{count - 1}'",
        selector=selector.text,
        call_count=str(count),
    )


def _values(selector: Selector, record: ModuleRecord, index: int) -> list[tuple[int, Target, Leaf]]:
    call = record.calls[index]
    leaves = _port_leaves(selector, record, call)
    order = call.ended if selector.port == "out" else call.started
    call_label = index if len(record.calls) > 1 else None
    found = []
    for leaf in leaves:
        name = canonical_name(record.path, call_label, leaf.port, _shown_picks(leaf, call))
        target = Target(name, record.path, index, leaf.port, leaf.picks, clone=leaf.is_overwritten)
        found.append((order, target, leaf))
    return found


def _port_leaves(selector: Selector, record: ModuleRecord, call: Call) -> list[Leaf]:
    """Return the tensors of the port below the pick."""
    leaves = call.outputs if selector.port == "out" else call.inputs
    if selector.port == "in":
        leaves = [leaf for leaf in leaves if leaf.port == "in" or not selector.picks]
    else:
        leaves = [leaf for leaf in leaves if leaf.port == selector.port]
    below = [leaf for leaf in leaves if _is_below(leaf, selector.picks, leaves)]
    if not below and (selector.picks or selector.port.startswith("in(")):
        raise _unknown_pick(selector, record, call)
    tensors = [leaf for leaf in below if leaf.shape is not None]
    if not tensors:
        raise _not_a_tensor(selector, below)
    return tensors


def _is_below(leaf: Leaf, picks: Picks, leaves: list[Leaf]) -> bool:
    """Whether the picks lead to a leaf or around it; a negative one that is no key counts from the end."""
    if len(leaf.picks) < len(picks):
        return False
    for depth, (key, own) in enumerate(zip(picks, leaf.picks, strict=False)):
        if key == own:
            continue
        keys = {other.picks[depth] for other in leaves if other.picks[:depth] == leaf.picks[:depth]}
        if not isinstance(key, int) or key >= 0 or key in keys or key + len(keys) != own:
            return False
    return True


def _shown_picks(leaf: Leaf, call: Call) -> Picks:
    """Leave out `[0]` of a module's only input, so that it is plainly `fc/in`."""
    is_only = leaf.port == "in" and len(call.inputs) == 1 and leaf.picks == (0,)
    return () if is_only else leaf.picks


def _unknown_module(selector: Selector, recording: Recording) -> ServiceError:
    if selector.is_pattern:
        return ServiceError(
            ErrorReason.UNKNOWN_MODULE,
            f"'{selector.text}' matches no module; list them with `trocar modules`",
            selector=selector.text,
        )
    return unknown(
        ErrorReason.UNKNOWN_MODULE,
        "module",
        selector.path,
        recording.modules,
        "list them with `trocar modules`",
    )


def _never_called(selector: Selector, matched: list[ModuleRecord], recording: Recording) -> ServiceError:
    path = matched[0].path
    parent = path.rpartition(".")[0]
    while parent and not recording.modules[parent].calls:
        parent = parent.rpartition(".")[0]
    hint = f"; its nearest enclosing module that runs is '{parent}'" if parent else ""
    return ServiceError(
        ErrorReason.MODULE_NOT_CALLED,
        f"module '{path}' exists, but the forward pass never calls it{hint}",
        selector=selector.text,
        nearest=parent,
    )


def _unknown_pick(selector: Selector, record: ModuleRecord, call: Call) -> ServiceError:
    leaves = call.outputs if selector.port == "out" else call.inputs
    there = [canonical_name(record.path, None, leaf.port, leaf.picks) for leaf in leaves[:20]]
    return ServiceError(
        ErrorReason.UNKNOWN_PICK,
        f"'{selector.text}': the value has no element {format_picks(selector.picks) or selector.port}; "
        f"there is {', '.join(there) or 'nothing'}",
        selector=selector.text,
    )


def _not_a_tensor(selector: Selector, leaves: list[Leaf]) -> ServiceError:
    kinds = ", ".join(sorted({leaf.type_name for leaf in leaves})) or "empty"
    return ServiceError(
        ErrorReason.NOT_A_TENSOR,
        f"'{selector.text}' is no tensor and holds none (it is {kinds})",
        selector=selector.text,
    )
