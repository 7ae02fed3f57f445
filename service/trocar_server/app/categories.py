"""Configured class names: one for each output of their model."""

from collections.abc import Sequence

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.training.model.head import class_counts


async def check_configured_categories(engine: Engine, model_id: str) -> None:
    """Refuse class names that the configuration gives a loaded model in another number than its outputs.

    A model whose pass cannot be recorded, or whose number of classes is not known, keeps its names.

    Raises:
        ServiceError: `MODEL_INVALID`.
    """
    names: Sequence[str] = engine.catalogue.get(model_id).spec.categories or ()
    if not names:
        return
    try:
        counts = class_counts(await engine.checks.described(model_id))
    except ServiceError:
        return
    if len(counts) == 1 and len(names) not in counts:
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"model '{model_id}': categories has {len(names)} names, and the model {counts.pop()} outputs; "
            "give one name for each, or none",
        )
