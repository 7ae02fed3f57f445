"""Stage names in a selector: `stage2/in` for `layer2/in` of a ResNet."""

from dataclasses import replace

from trocar_server.errors import ServiceError
from trocar_server.surgery.cursor import invalid_selector
from trocar_server.surgery.parsing import parse_selector
from trocar_server.surgery.recording import Recording
from trocar_server.surgery.selectors import Selector


def stage_of(selector: Selector, recording: Recording) -> str | None:
    """Return the stage that a selector names, None for none: a module of that name comes first."""
    is_plain = selector.kind == "module" and selector.type_name is None and not selector.quoted
    is_stage = is_plain and selector.path in recording.stages and selector.path not in recording.modules
    return selector.path if is_stage else None


def with_stage(selector: Selector, meaning: str) -> Selector:
    """Return the selector that a stage stands for, with what follows the stage's name.

    Raises:
        ServiceError: `INVALID_SELECTOR`, the stage's own selector has that part already, or is none.
    """
    stage = parse_selector(meaning)
    parts = (
        ("call", stage.call is not None and selector.call is not None),
        ("order", stage.order is not None and selector.order is not None),
        ("port", stage.port != "out" and selector.port != "out"),
    )
    for part, is_doubled in parts:
        if is_doubled:
            problem = f"the stage '{selector.path}' is '{meaning}', which has a {part} of its own"
            raise invalid_selector(selector.text, len(selector.path), problem)
    has_own_port = selector.port != "out"
    return replace(
        stage,
        text=selector.text,
        call=stage.call if selector.call is None else selector.call,
        order=stage.order if selector.order is None else selector.order,
        port=selector.port if has_own_port else stage.port,
        picks=selector.picks if has_own_port else stage.picks + selector.picks,
        is_gradient=stage.is_gradient or selector.is_gradient,
    )


def explained(error: ServiceError, stage: str, meaning: str) -> ServiceError:
    """Say of an error in a stage's selector where that selector comes from."""
    message = f"stage '{stage}' is '{meaning}' in this model: {error.message}"
    return ServiceError(error.reason, message, **error.details)
