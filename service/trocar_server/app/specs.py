"""Model specs and data set folders from the configuration."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, PreprocessingSpec, default_categories, named_model
from trocar_server.models.source import is_source, parse_source
from trocar_server.models.spec import Merge, WarmVariant
from trocar_server.training.datasets import ListedFolder, listed_folders

_TORCHVISION = "torchvision:"


def dataset_folders(config: ServerConfig) -> dict[str, ListedFolder]:
    """Open the data set folders of the configuration.

    Raises:
        ServiceError: One of them cannot be used.
    """
    return dict(listed_folders({name: dataset.path for name, dataset in config.datasets.items()}))


def model_spec(model_id: str, config: ModelConfig, factory: Callable[[], Any] | None = None) -> ModelSpec:
    """Convert one model's configuration to a catalogue spec.

    Args:
        model_id: Its id.
        config: The model's configuration.
        factory: Builds it, instead of the configured architecture.

    Raises:
        ServiceError: `MODEL_INVALID`, the entry is invalid, or its file of categories cannot be read.
    """
    given = config.preprocessing
    _check_origin(model_id, config)
    name = config.factory or config.architecture or model_id
    build = (
        partial(named_model, model_id, config.source) if config.source else partial(ModelSpec, model_id, name)
    )
    return build(
        weights=config.weights,
        options=config.options,
        arguments=config.arguments,
        categories=_categories(config.categories),
        preprocessing=None if given is None else PreprocessingSpec(**given.model_dump()),
        input_shape=config.input_shape,
        stages=config.stages,
        numerics=config.numerics,
        factory=factory,
        dtype=config.dtype,
        inputs={name: given.model_dump(exclude_unset=True) for name, given in config.inputs.items()},
        processor_folder=config.processor,
        warm_variants=tuple(WarmVariant(wanted.taps, wanted.numerics) for wanted in config.warm_variants),
        merge=Merge(config.merge),
    )


def _check_origin(model_id: str, config: ModelConfig) -> None:
    """Refuse several origins of one model, and an origin that is written like another.

    Raises:
        ServiceError: `MODEL_INVALID`.
    """
    given = [name for name in ("source", "factory", "architecture") if getattr(config, name)]
    problem = ""
    if len(given) > 1:
        problem = f"{' and '.join(given)} are given; give one of source, factory and architecture"
    elif config.factory and ":" not in config.factory:
        module, dot, name = config.factory.rpartition(".")
        meant = f", for example {module}:{name}" if dot else ""
        problem = f"factory '{config.factory[:80]}' is not module:callable{meant}"
    elif ":" in config.architecture:
        what = "source" if is_source(config.architecture) else "factory"
        problem = f"architecture '{config.architecture[:80]}' is a {what}; write {what} = \"...\""
    if problem:
        raise ServiceError(ErrorReason.MODEL_INVALID, f"model '{model_id}': {problem}")
    if ":" in config.source:  # else it is an architecture of torchvision
        parse_source(config.source)


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
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ServiceError(
            ErrorReason.MODEL_INVALID, f"cannot read the categories in '{path.name}': {problem}"
        ) from None
