"""Target lookup: the targets of each selector in a recorded pass."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.axes.layout import Layout, Layouts
from trocar_server.surgery.recording.function_layouts import FUNCTION
from trocar_server.surgery.recording.recording import ModuleRecord, Recording
from trocar_server.surgery.resolution.attention import attention_of
from trocar_server.surgery.resolution.call_records import functions_of, modules_of, nodes_of
from trocar_server.surgery.resolution.parameters import parameters_of
from trocar_server.surgery.resolution.stage_names import explained, numbers_of, stage_of, with_stage
from trocar_server.surgery.resolution.values import Value, values_of
from trocar_server.surgery.selectors.selectors import Selector
from trocar_server.surgery.sessions.taps import Target


def resolve(selectors: Iterable[Selector], recording: Recording) -> list[list[Value]]:
    """Return the targets of each selector, in execution order.

    An exact path must name one module that is called, once or with a call index. A pattern takes every
    call of every matching module that yields a tensor.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, `UNKNOWN_NODE`, `UNKNOWN_FUNCTION`, `UNKNOWN_PARAMETER`,
            `MODULE_NOT_CALLED`, `AMBIGUOUS_CALL`, `CALL_OUT_OF_RANGE`, `UNKNOWN_PICK`, `NOT_A_TENSOR` or
            `NOT_TRACEABLE`, with near names as a hint; `INVALID_SELECTOR` for a stage that already has the
            port or call.
    """
    return [_with_layouts(_resolve_one(selector, recording), recording) for selector in selectors]


def _with_layouts(values: list[Value], recording: Recording) -> list[Value]:
    """Return values with what their dimensions mean, where the recording tells it."""
    layouts = recording.layouts
    if layouts is None:
        return values
    return [(replace(target, layout=_layout(target, layouts)), leaf) for target, leaf in values]


def _layout(target: Target, layouts: Layouts) -> Layout | None:
    if target.view or target.columns or target.kind not in ("module", "fn"):
        return None
    path = target.path if target.kind == "module" else FUNCTION + target.path
    return layouts.find(path, target.call, target.port, target.picks)


def resolve_nodes(selector: Selector, nodes: Mapping[str, ModuleRecord] | None) -> list[Value]:
    """Resolve an `fx:` selector among the nodes of a traced model, by name.

    Raises:
        ServiceError: `UNKNOWN_NODE`, or `NOT_TRACEABLE` where there are no nodes; see `resolve`.
    """
    if nodes is None:
        raise ServiceError(
            ErrorReason.NOT_TRACEABLE,
            f"'{selector.text}': the model's graph cannot be traced, so it has no nodes; select modules",
            selector=selector.text,
        )
    inside = [name for name in nodes if name.startswith(f"{selector.path}.")]
    if inside and not selector.is_pattern and selector.path not in nodes:
        selector = replace(selector, path=inside[-1])  # as torchvision's create_feature_extractor does
    return values_of(selector, nodes_of(nodes))


def resolve_functions(selector: Selector, functions: Mapping[str, ModuleRecord] | None) -> list[Value]:
    """Resolve an `fn:` selector among the functions that a pass calls, by name.

    Raises:
        ServiceError: `UNKNOWN_FUNCTION`; see `resolve`.
    """
    return values_of(selector, functions_of(functions or {}))


def resolve_modules(selector: Selector, recording: Recording) -> list[Value]:
    """Resolve a selector of modules: values of a pass, attention, or parameters.

    Raises:
        ServiceError: `UNKNOWN_MODULE` or `UNKNOWN_PARAMETER`; see `resolve`.
    """
    if selector.is_attention:
        return attention_of(selector, recording)
    modules = modules_of(recording)
    if selector.parameter is not None:
        return parameters_of(selector, selector.parameter, modules)
    return values_of(selector, modules)


def _resolve_one(selector: Selector, recording: Recording) -> list[Value]:
    if selector.is_every_stage:
        one = replace(selector, is_every_stage=False)
        each = (replace(one, picks=(number, *one.picks)) for number in numbers_of(selector, recording))
        return [value for number in each for value in _resolve_one(number, recording)]
    stage = stage_of(selector, recording)
    if stage is None:
        return _resolve_kind(selector, recording)
    meaning = recording.stages[stage]
    selector = with_stage(selector, stage, meaning)
    try:
        return _resolve_kind(selector, recording)
    except ServiceError as error:
        raise explained(error, stage, meaning) from None


def _resolve_kind(selector: Selector, recording: Recording) -> list[Value]:
    if selector.kind == "fx":
        return resolve_nodes(selector, recording.nodes)
    if selector.kind == "fn":
        return resolve_functions(selector, recording.functions)
    return resolve_modules(selector, recording)
