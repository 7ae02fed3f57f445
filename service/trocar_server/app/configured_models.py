"""Models of the configuration: their catalogue, and their loading at the start."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from trocar_server.app.categories import check_configured_categories
from trocar_server.app.specs import model_spec
from trocar_server.config import ServerConfig
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue
from trocar_server.models.spec import check_model_id


def catalogue_of(config: ServerConfig, factories: Mapping[str, Callable[[], Any]], log: Any) -> Catalogue:
    """Catalogue of every configured model; one with an invalid entry is listed as failed.

    Args:
        config: The server's configuration.
        factories: Model factories by model id; each overrides the configured architecture.
        log: Logger of failures.

    Raises:
        ServiceError: An entry is invalid, and `strict` is set; or an id is.
    """
    catalogue = Catalogue()
    for model_id, model in config.models.items():
        try:
            entry = catalogue.add(model_spec(model_id, model, factories.get(model_id)))
            entry.begin()  # it waits in line
        except ServiceError as error:
            if config.strict:
                raise
            check_model_id(model_id)
            catalogue.add_failed(model_id, error)
            log.error("model failed", model_id=model_id, reason=error.reason, why=error.message)
    return catalogue


async def load_configured(config: ServerConfig, engine: Engine, log: Any) -> None:
    """Load every configured model; those that fail are listed with the reason, and the others are served.

    Raises:
        ServiceError: A model failed, and `strict` is set; or none works.
    """
    errors: list[ServiceError] = []
    for number, model_id in enumerate(config.models, 1):
        if not engine.catalogue.has(model_id):  # a reload has removed it meanwhile
            continue
        is_told = not engine.catalogue.get(model_id).is_spec_known
        if not is_told:
            log.info("loading model", model_id=model_id, number=f"{number} of {len(config.models)}")
        began = time.monotonic()
        try:
            await engine.deployments.load(model_id)
            await _check_categories(engine, model_id)
        except ServiceError as error:
            if not engine.catalogue.has(model_id):
                continue
            if config.strict:
                raise
            errors.append(error)
            if not is_told:
                log.error("model failed", model_id=model_id, reason=error.reason, why=error.message)
        else:
            log.info("model loaded", model_id=model_id, s=round(time.monotonic() - began, 1))
    if errors and len(errors) == len(config.models):
        raise _none_works(errors)


async def _check_categories(engine: Engine, model_id: str) -> None:
    """Refuse wrong class names; such a model is listed as failed.

    Raises:
        ServiceError: `MODEL_INVALID`.
    """
    try:
        await check_configured_categories(engine, model_id)
    except ServiceError as error:
        await engine.deployments.unload(model_id)
        engine.catalogue.get(model_id).fail(error)
        raise


def _none_works(errors: list[ServiceError]) -> ServiceError:
    if len(errors) == 1:
        return errors[0]
    why = "; ".join(error.message for error in errors)
    return ServiceError(errors[0].reason, f"none of the {len(errors)} models could be loaded: {why}")
