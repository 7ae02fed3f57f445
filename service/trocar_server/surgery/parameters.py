"""Parameters and buffers as values: `fc/param(weight)`. They need no call, and no pass."""

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.naming import ALL_PARAMETERS, canonical_name
from trocar_server.surgery.recording import ModuleRecord
from trocar_server.surgery.records import Records
from trocar_server.surgery.selectors import Selector
from trocar_server.surgery.taps import Target
from trocar_server.surgery.values import Value


def parameters_of(selector: Selector, name: str, modules: Records) -> list[Value]:
    """Return the parameter or buffer of this name of every module that a selector matches and that has one.

    `*` is every parameter and buffer; of gradients, every parameter.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, or `UNKNOWN_PARAMETER` with what there is.
    """
    matched = modules.matching(selector)
    found = [
        _value(record, own, is_gradient=selector.is_gradient)
        for record in matched
        for own in record.parameters
        if own == name or (name == ALL_PARAMETERS and not (selector.is_gradient and own in record.buffers))
    ]
    if not found:
        raise _unknown_parameter(selector, name, matched, modules)
    return found


def _value(record: ModuleRecord, name: str, *, is_gradient: bool) -> Value:
    leaf = record.parameters[name]
    shown = canonical_name(record.path, None, leaf.port, (), is_gradient=is_gradient)
    target = Target(shown, record.path, 0, leaf.port, clone=leaf.is_overwritten, is_gradient=is_gradient)
    return target, leaf


def _unknown_parameter(
    selector: Selector, name: str, matched: list[ModuleRecord], modules: Records
) -> ServiceError:
    there = list(dict.fromkeys(own for record in matched for own in record.parameters))
    who = (
        f"module '{matched[0].path}' has" if len(matched) == 1 else f"none of the {len(matched)} modules has"
    )
    own = f"{', '.join(there[:20])}{', ...' if len(there) > 20 else ''}"
    hint = (
        f"there is {own}" if there else "they have none of their own" if len(matched) > 1 else "it has none"
    )
    inside = _inside(matched[0].path, name, modules) if len(matched) == 1 else None
    if inside is not None:
        hint += f"; one inside is '{inside}'"
    return ServiceError(
        ErrorReason.UNKNOWN_PARAMETER,
        f"'{selector.text}': {who} no parameter or buffer '{name}'; {hint}",
        selector=selector.text,
        available=", ".join(there),
    )


def _inside(path: str, name: str, modules: Records) -> str | None:
    """Name the first module inside another one that has this parameter."""
    start = f"{path}." if path else ""
    for record in modules.by_path.values():
        if record.path != path and record.path.startswith(start) and name in record.parameters:
            return canonical_name(record.path, None, f"param({name})", ())
    return None
