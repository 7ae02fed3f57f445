"""Parameters and buffers as values: `fc/param(weight)`. No call and no pass is needed."""

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.resolution.call_records import Records
from trocar_server.surgery.resolution.values import Value
from trocar_server.surgery.selectors.naming import ALL_PARAMETERS, canonical_name
from trocar_server.surgery.selectors.selectors import Selector
from trocar_server.surgery.sessions.taps import Target


def parameters_of(selector: Selector, name: str, modules: Records) -> list[Value]:
    """Return the parameter or buffer of this name from every matching module that has one.

    `*` is every parameter and buffer; of gradients, every parameter.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, or `UNKNOWN_PARAMETER` with the existing names.
    """
    matched = modules.matching(selector)
    parameters = [
        _value(record, own, is_gradient=selector.is_gradient)
        for record in matched
        for own in record.parameters
        if own == name or (name == ALL_PARAMETERS and not (selector.is_gradient and own in record.buffers))
    ]
    if not parameters:
        raise _unknown_parameter(selector, name, matched, modules)
    return parameters


def _value(record: ModuleRecord, name: str, *, is_gradient: bool) -> Value:
    leaf = record.parameters[name]
    shown = canonical_name(record.path, None, leaf.port, (), is_gradient=is_gradient)
    target = Target(shown, record.path, 0, leaf.port, clone=leaf.is_overwritten, is_gradient=is_gradient)
    return target, leaf


def _unknown_parameter(
    selector: Selector, name: str, matched: list[ModuleRecord], modules: Records
) -> ServiceError:
    result = list(dict.fromkeys(own for record in matched for own in record.parameters))
    who = (
        f"module '{matched[0].path}' has" if len(matched) == 1 else f"none of the {len(matched)} modules has"
    )
    own = f"{', '.join(result[:20])}{', ...' if len(result) > 20 else ''}"
    hint = (
        f"available: {own}"
        if result
        else "they have none of their own"
        if len(matched) > 1
        else "it has none"
    )
    inside = _inside(matched[0].path, name, modules) if len(matched) == 1 else None
    if inside is not None:
        hint += f"; one inside is '{inside}'"
    return ServiceError(
        ErrorReason.UNKNOWN_PARAMETER,
        f"'{selector.text}': {who} no parameter or buffer '{name}'; {hint}",
        selector=selector.text,
        available=", ".join(result),
    )


def _inside(path: str, name: str, modules: Records) -> str | None:
    """Return the first submodule that has this parameter."""
    start = f"{path}." if path else ""
    for record in modules.by_path.values():
        if record.path != path and record.path.startswith(start) and name in record.parameters:
            return canonical_name(record.path, None, f"param({name})", ())
    return None
