"""Stage names in a selector: `stage2/in` for `layer2/in` of a ResNet."""

from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.recording import Recording
from trocar_server.surgery.selectors.cursor import invalid_selector
from trocar_server.surgery.selectors.parsing import parse_selector
from trocar_server.surgery.selectors.selectors import Selector


def stage_of(selector: Selector, recording: Recording) -> str | None:
    """Return the stage that a selector names, or None; a module of that name takes precedence."""
    is_plain = selector.kind == "module" and selector.type_name is None and not selector.quoted
    if not is_plain or recording.second_names.first(selector.path) in recording.modules:
        return None
    return selector.path if selector.path in recording.stages else _numbered(selector, recording)


def numbers_of(selector: Selector, recording: Recording) -> range:
    """Return the numbers of the blocks that `layer[*]` stands for.

    Raises:
        ServiceError: `UNKNOWN_MODULE`, the model has no such stages.
    """
    count = 0
    while f"{selector.path}[{count}]" in recording.stages:
        count += 1
    if count:
        return range(count)
    numbered = [stage.removesuffix("[0]") + "[*]" for stage in recording.stages if stage.endswith("[0]")]
    advice = f"it has {', '.join(sorted(numbered))}" if numbered else "see the stages in `client.model(...)`"
    pattern = "; to select modules, write a pattern such as 'blocks.*'"
    raise ServiceError(
        ErrorReason.UNKNOWN_MODULE,
        f"'{selector.text}': the model has no numbered stages '{selector.path}[0]', ...; {advice}{pattern}",
        selector=selector.text,
    )


def _numbered(selector: Selector, recording: Recording) -> str | None:
    """Return the stage of a block, `layer[3]`; a negative number counts from the last."""
    number = selector.picks[0] if selector.picks else None
    if not isinstance(number, int) or selector.port != "out" or f"{selector.path}[0]" not in recording.stages:
        return None
    if number < 0:
        number += sum(stage.startswith(f"{selector.path}[") for stage in recording.stages)
    stage = f"{selector.path}[{number}]"
    return stage if stage in recording.stages else None


def with_stage(selector: Selector, stage_name: str, meaning: str) -> Selector:
    """Return the selector of a stage, followed by the rest of the given selector.

    Args:
        selector: The given selector.
        stage_name: What `stage_of` found in it.
        meaning: The stage's own selector.

    Raises:
        ServiceError: `INVALID_SELECTOR`, the stage's own selector already has that part, or is invalid.
    """
    stage = parse_selector(meaning)
    rest = selector.picks if stage_name == selector.path else selector.picks[1:]
    parts = (
        ("call", stage.call is not None and selector.call is not None),
        ("order", stage.order is not None and selector.order is not None),
        ("port", stage.port != "out" and selector.port != "out"),
    )
    for part, is_doubled in parts:
        if is_doubled:
            problem = f"the stage '{stage_name}' is '{meaning}', which has its own {part}"
            raise invalid_selector(selector.text, len(selector.path), problem)
    has_own_port = selector.port != "out"
    return replace(
        stage,
        text=selector.text,
        call=stage.call if selector.call is None else selector.call,
        order=stage.order if selector.order is None else selector.order,
        port=selector.port if has_own_port else stage.port,
        picks=selector.picks if has_own_port else stage.picks + rest,
        is_gradient=stage.is_gradient or selector.is_gradient,
    )


def explained(error: ServiceError, stage: str, meaning: str) -> ServiceError:
    """Add to an error in a stage's selector where that selector comes from."""
    message = f"stage '{stage}' is '{meaning}' in this model: {error.message}"
    return ServiceError(error.reason, message, **error.details)
