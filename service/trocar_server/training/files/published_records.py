"""Records of published models, and how to rebuild a model from one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec, PreprocessingSpec
from trocar_server.models.architectures import named_weights
from trocar_server.models.from_source import TORCH_DTYPES
from trocar_server.models.spec import Merge, Rebuilding
from trocar_server.storage.sealed_record import Record
from trocar_server.training.model.heads import HeadReplacement, ReplaceHead
from trocar_server.training.spec.trainer_spec import HeadSpec


class BaseRecord(Record):
    """How to rebuild the base model's module."""

    architecture: str
    """A torchvision model name or a factory, as in `ModelSpec`."""
    built_as: str
    """See `Rebuilding`."""
    options: dict[str, Any]
    """As in `ModelSpec`."""
    arguments: tuple[Any, ...]
    """As in `ModelSpec`."""
    preprocessing: dict[str, Any] | None
    """As in `ModelSpec`."""
    input_shape: tuple[int, ...]
    """As in `HostedModel`."""
    stages: dict[str, str]
    """As in `ModelSpec`."""
    source: str = ""
    """As in `ModelSpec`."""
    dtype: str = ""
    """As in `ModelSpec`."""
    inputs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """As in `ModelSpec`."""
    has_named_inputs: bool = False
    """Whether its inputs are known by name, so that `input_shape` does not count."""
    processor: str = ""
    """Path of the `processor_folder` of `ModelSpec`; empty for that of its source, if any."""
    merge: Merge = Merge.OFF
    """As in `ModelSpec`."""


class PublishedModel(Record):
    """One published model."""

    model_id: str
    """Id under which it is hosted."""
    principal: str
    """The principal who published it."""
    created_at_s: float
    """Seconds since 1970."""
    base_model_id: str
    """Id of the trainer's base model."""
    base: BaseRecord
    """How to rebuild the base model."""
    heads: tuple[HeadSpec, ...]
    """Head replacements in order: a trainer of a published model adds its own."""
    categories: tuple[str, ...]
    """Class names by index; empty when unknown."""
    weights_file: str
    """The name of the file with the weights."""
    byte_count: int
    """Of that file."""
    sha256: str
    """Of that file, in hex."""


def describe_base(base: HostedModel) -> BaseRecord:
    """Return how a model was built.

    Raises:
        ServiceError: `MODEL_INVALID`, it cannot be rebuilt.
    """
    spec = base.spec
    if spec.factory is not None:
        raise _not_publishable(spec, "it exists in this process only")
    given = [dict(spec.options), list(spec.arguments)]
    try:
        if json.loads(json.dumps(given)) != given:
            raise ValueError
    except (TypeError, ValueError, RecursionError):
        raise _not_publishable(spec, "its options are not JSON") from None
    return BaseRecord(
        architecture=spec.architecture,
        built_as=_built_as(base),
        options=dict(spec.options),
        arguments=spec.arguments,
        preprocessing=None if spec.preprocessing is None else asdict(spec.preprocessing),
        input_shape=base.input_shape,
        stages=dict(spec.stages),
        source=spec.source,
        dtype=spec.dtype or _dtype_of_folder(base),
        inputs={name: dict(settings) for name, settings in spec.inputs.items()},
        has_named_inputs=base.known_signature is not None,
        processor=str(spec.processor_folder.absolute()) if spec.processor_folder else "",
        merge=spec.merge,
    )


def heads_of(spec: ModelSpec) -> tuple[HeadSpec, ...]:
    """Return the heads that replace the own head of a base's architecture."""
    prepare = spec.rebuilding.prepare if spec.rebuilding else None
    return prepare.heads if isinstance(prepare, HeadReplacement) else ()


def model_spec(model: PublishedModel, weights: Path, replace_head: ReplaceHead) -> ModelSpec:
    """Return the model spec with which the catalogue can host a model.

    Args:
        model: The model.
        weights: Path of its weights.
        replace_head: `head.replace_head`.

    Raises:
        ServiceError: `MODEL_INVALID`, this version of the server cannot host it.
    """
    base = model.base
    return ModelSpec(
        model_id=model.model_id,
        architecture=base.architecture,
        weights=str(weights),
        options=base.options,
        arguments=base.arguments,
        categories=model.categories,
        preprocessing=_preprocessing(model),
        input_shape=None if base.has_named_inputs else base.input_shape,
        stages=base.stages,
        source=base.source,
        dtype=base.dtype,
        inputs=base.inputs,
        processor_folder=Path(base.processor) if base.processor else None,
        merge=base.merge,
        rebuilding=Rebuilding(base.built_as, model.sha256, HeadReplacement(replace_head, model.heads)),
    )


def _dtype_of_folder(base: HostedModel) -> str:
    """Name of the dtype of a folder's own weights; a build without weights would use float32."""
    if not base.spec.source.startswith("hf:"):
        return ""
    return next((name for name, dtype in TORCH_DTYPES.items() if dtype == base.dtype), "")


def _built_as(base: HostedModel) -> str:
    if base.spec.rebuilding is not None:
        return base.spec.rebuilding.built_as
    is_named = not base.spec.is_custom and base.weights in named_weights(base.spec.architecture)
    return base.weights if is_named else ""


def _preprocessing(model: PublishedModel) -> PreprocessingSpec | None:
    given = model.base.preprocessing
    if given is None:
        return None
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    try:
        return PreprocessingSpec(**tuples)
    except TypeError as error:
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"published model '{model.model_id}' cannot be hosted: this server does not know its "
            "preprocessing",
        ) from error


def _not_publishable(spec: ModelSpec, why: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_INVALID,
        f"a model trained from '{spec.model_id}' cannot be hosted after a restart: {why}; export "
        f"the weights instead",
    )
