"""From the configuration to what the catalogue and the data sets are made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, PreprocessingSpec, default_categories
from trocar_server.training.datasets import ListedFolder, listed_folders

_TORCHVISION = "torchvision:"


def dataset_folders(config: ServerConfig) -> dict[str, ListedFolder]:
    """Look at the folders that the configuration names.

    Raises:
        ServiceError: One of them cannot be used.
    """
    return dict(listed_folders({name: dataset.path for name, dataset in config.datasets.items()}))


def model_spec(model_id: str, config: ModelConfig, factory: Callable[[], Any] | None = None) -> ModelSpec:
    """Turn one entry of the configuration into what the catalogue keeps.

    Args:
        model_id: Its id.
        config: What the configuration says.
        factory: Builds it, in place of what the configuration names.

    Raises:
        ServiceError: `MODEL_INVALID`, something in the entry does not work, or its file of categories
            cannot be read.
    """
    given = config.preprocessing
    return ModelSpec(
        model_id=model_id,
        architecture=config.factory or config.architecture or model_id,
        weights=config.weights,
        options=config.options,
        arguments=config.arguments,
        categories=_categories(config.categories),
        preprocessing=None if given is None else PreprocessingSpec(**given.model_dump()),
        input_shape=config.input_shape,
        stages=config.stages,
        numerics=config.numerics,
        factory=factory,
    )


def _categories(given: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
    if not isinstance(given, str):
        return given
    if given.startswith(_TORCHVISION):
        return default_categories(given.removeprefix(_TORCHVISION))
    return _lines(Path(given))


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ServiceError(
            ErrorReason.MODEL_INVALID, f"cannot read the categories in '{path.name}': {problem}"
        ) from None
