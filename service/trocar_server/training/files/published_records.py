"""Records of published models, and how to rebuild a model from one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError, model_validator

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec
from trocar_server.models.architectures import named_weights
from trocar_server.models.from_source import TORCH_DTYPES
from trocar_server.models.spec import Rebuilding
from trocar_server.storage.sealed_record import Record
from trocar_server.training.model.heads import HeadReplacement, ReplaceHead
from trocar_server.training.spec.trainer_spec import HeadSpec

_OWN = frozenset(("model_id", "weights", "categories", "factory", "rebuilding"))
"""Fields of `ModelSpec` that a published model has of its own; every other one is its base's."""
_SPECS = TypeAdapter(ModelSpec)


class BaseRecord(Record):
    """How to rebuild the base model's module."""

    built_as: str
    """See `Rebuilding`."""
    spec: dict[str, Any]
    """Every field of the base's `ModelSpec` but `_OWN`, as JSON."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, given: Any) -> Any:
        """Read a record with some of the fields, beside `built_as`."""
        if not isinstance(given, dict) or "spec" in given:
            return given
        spec = dict(given)
        built_as, has_names = spec.pop("built_as"), spec.pop("has_named_inputs", False)
        processor = spec.pop("processor", "")
        spec["input_shape"] = None if has_names else spec["input_shape"]
        return {"built_as": built_as, "spec": {**spec, "processor_folder": processor or None}}


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
    known = replace(
        spec,
        dtype=spec.dtype or _dtype_of_folder(base),
        input_shape=base.input_shape if base.known_signature is None else None,
        processor_folder=spec.processor_folder and spec.processor_folder.absolute(),
        rebuilding=None,
    )
    return BaseRecord(
        built_as=_built_as(base), spec=_SPECS.dump_python(known, mode="json", exclude=set(_OWN))
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
    rebuilding = Rebuilding(model.base.built_as, model.sha256, HeadReplacement(replace_head, model.heads))
    own = {"model_id": model.model_id, "weights": str(weights), "categories": model.categories}
    try:
        spec = _SPECS.validate_python({**model.base.spec, **own})
    except ValidationError as error:
        unknown = ", ".join(sorted({str(each["loc"][0]) for each in error.errors() if each["loc"]}))
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"published model '{model.model_id}' cannot be hosted: this server does not know its {unknown}; "
            "upgrade the server to the version that published it",
        ) from None
    inputs = {name: dict(map(_with_tuple, given.items())) for name, given in spec.inputs.items()}
    return replace(spec, rebuilding=rebuilding, inputs=inputs)


def _with_tuple(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return a setting of an input as configured: JSON has no tuples."""
    name, value = item
    return name, tuple(value) if isinstance(value, list) else value


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


def _not_publishable(spec: ModelSpec, why: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_INVALID,
        f"a model trained from '{spec.model_id}' cannot be hosted after a restart: {why}; export "
        f"the weights instead",
    )
