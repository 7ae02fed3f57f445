"""torchvision's catalogue: builders by name, their weights by name. Nothing is built or loaded here."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchvision.models import WeightsEnum, get_model_builder, get_model_weights, list_models

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, unknown
from trocar_server.models.from_source import check_source, source_label
from trocar_server.models.spec import DEFAULT_WEIGHTS, ModelSpec, WeightsKind

Builder = Callable[..., nn.Module]
"""A torchvision model builder: keyword arguments in, a module out."""


def architecture_names() -> list[str]:
    """Return the names of every architecture that torchvision can build, sorted."""
    names: list[str] = list_models()
    return names


def find_builder(architecture: str) -> Builder:
    """Return torchvision's builder of this exact name.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE`, with the nearest names.
    """
    names = architecture_names()
    if architecture not in names:
        raise unknown(
            ErrorReason.UNKNOWN_ARCHITECTURE,
            "architecture",
            architecture,
            names,
            "see torchvision.models.list_models()",
        )
    builder: Builder = get_model_builder(architecture)
    return builder


def named_weights(architecture: str) -> dict[str, WeightsEnum]:
    """Return the weights that torchvision publishes for an architecture, by name, `DEFAULT` first.

    For `quantized_*` names these are the float weights, because the model is built with
    `quantize=False`: torchvision's builder then takes exactly these, and quantized tensors have no
    place in a safetensors file.
    """
    enum = get_model_weights(find_builder(architecture))
    for member in enum:
        if "unquantized" in member.meta:
            enum = type(member.meta["unquantized"])
            break
    members = dict(enum.__members__)
    return {name: members[name] for name in sorted(members, key=lambda name: (name != DEFAULT_WEIGHTS, name))}


def default_categories(architecture: str) -> tuple[str, ...]:
    """Return the class names of an architecture's default weights; empty when they have none."""
    weights = named_weights(architecture).get(DEFAULT_WEIGHTS)
    return tuple(weights.meta.get("categories") or ()) if weights else ()


def find_weights(architecture: str, name: str) -> WeightsEnum:
    """Return one member of an architecture's weights enum.

    Raises:
        ServiceError: `UNKNOWN_WEIGHTS`, listing the available ones; `UNKNOWN_ARCHITECTURE`.
    """
    members = named_weights(architecture)
    if name in members:
        return members[name]
    available = [*members, "random[:seed]", "FILE.safetensors"]
    raise ServiceError(
        ErrorReason.UNKNOWN_WEIGHTS,
        f"'{architecture}' has no weights '{_base_name(name)}'{_why_not(architecture, name)}; "
        f"available: {', '.join(available)}",
        available=", ".join(available),
    )


def weights_label(spec: ModelSpec) -> str:
    """Label of a model's weights on the wire; never a path.

    `IMAGENET1K_V2`, `random:0`, `file`, `published`, or `factory` for weights that a factory made itself.

    Raises:
        ServiceError: `UNKNOWN_WEIGHTS` or `UNKNOWN_ARCHITECTURE`.
    """
    if spec.rebuilding is not None:
        return "published"
    if spec.weights_kind is WeightsKind.RANDOM:
        return f"random:{spec.seed}"
    if spec.weights_kind is WeightsKind.FILE:
        return "file"
    if spec.source:
        return source_label(spec)
    return "factory" if spec.is_custom else str(find_weights(spec.architecture, spec.weights).name)


def check_spec(spec: ModelSpec) -> None:
    """Check that a spec's names exist, before anything is downloaded or built.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE`, `UNKNOWN_WEIGHTS`, or `MODEL_INVALID` for options
            that choose weights or quantization, which `weights` alone decides.
    """
    if spec.is_custom:
        _check_custom(spec)
        if spec.source:
            check_source(spec)
        return
    find_builder(spec.architecture)
    reserved = {
        "weights",
        "weights_backbone",
        "progress",
        "pretrained",
        "pretrained_backbone",
        "quantize",
    } & set(spec.options)
    if reserved:
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"options of '{spec.model_id}' may not set {', '.join(sorted(reserved))}; "
            "`weights` says which weights are used, and quantized models are not hosted",
        )
    weights_label(spec)


def _check_custom(spec: ModelSpec) -> None:
    if spec.weights_kind is WeightsKind.NAMED and spec.weights != DEFAULT_WEIGHTS:
        raise ServiceError(
            ErrorReason.UNKNOWN_WEIGHTS,
            f"the source of '{spec.model_id}' has no weights '{_base_name(spec.weights)}'; "
            f"available: {DEFAULT_WEIGHTS} (its own), random[:seed], FILE.safetensors",
        )


def _why_not(architecture: str, name: str) -> str:
    if name.endswith((".pth", ".pt", ".bin", ".ckpt")):
        return " (the server reads safetensors only: run `trocar admin convert` on the file first)"
    quantized: Any = get_model_weights(find_builder(architecture))
    return " (quantized weights do not fit into safetensors)" if name in quantized.__members__ else ""


def _base_name(text: str) -> str:
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2][:80]
