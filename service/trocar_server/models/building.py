"""Model building: from a spec to an `nn.Module` with weights on the CPU, by torchvision or a factory.

# Note: [torchvision's own builder]
Named weights go through the builder with `weights=`, because that argument decides more than the
numbers: the number of classes, `transform_input` and auxiliary heads of GoogLeNet and Inception,
frozen batch norm and its epsilon in detection models, renamed keys of DenseNet. Only the source of
the state dict is ours.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torchvision.models import WeightsEnum

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.models.architectures import find_builder, find_weights, named_weights
from trocar_server.models.from_source import source_factory
from trocar_server.models.matching import load_matching
from trocar_server.models.scripted import with_scripted_parts
from trocar_server.models.spec import ModelSpec, Rebuilding, WeightsKind
from trocar_server.models.weights.downloads import fetch_weights, stored_path
from trocar_server.models.weights.initial_values import are_all_in, no_initial_values
from trocar_server.models.weights.weights_file import StateDict, read_weights

_NO_KEYS = IncompatibleKeys([], [])


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A module with its weights, as the builder or factory left it."""

    module: nn.Module
    """On the CPU, or wherever a factory put it."""
    weights: WeightsEnum | None
    """torchvision's weights that are in it, or that a published model's base was built for; None for random,
    the operator's own and factories'."""


def build(spec: ModelSpec, data_dir: Path) -> BuiltModule:
    """Build the module that a spec describes and fill in its weights.

    Random weights are `torch.manual_seed(seed)` and then the builder with `weights=None`: anyone can
    rebuild them. A file that still has the name of torchvision's own (`trocar admin convert` of a download)
    is loaded as those weights, see Note: [torchvision's own builder].

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, `WEIGHTS_CORRUPT`, `WEIGHTS_MISMATCH`, or
            `MODEL_INVALID` when the builder or factory fails.
    """
    if spec.weights_kind is WeightsKind.FILE:
        return _build_from_file(spec, data_dir)
    spec = _with_factory(spec, data_dir)
    if spec.weights_kind is WeightsKind.RANDOM:
        return BuiltModule(_build_seeded(spec), None)
    if spec.is_custom:
        return BuiltModule(_call(spec), None)
    weights = find_weights(spec.architecture, spec.weights)
    return BuiltModule(_build_named(spec, weights, fetch_weights(spec, weights, data_dir)), weights)


@contextmanager
def skip_state_dict(weights: WeightsEnum) -> Iterator[None]:
    """Let torchvision's builders build for `weights` inside the context, without loading values.

    The builders' state dict is recognised by identity: other loads of state dicts meanwhile work normally.
    """
    nothing, original = StateDict(), nn.Module.load_state_dict

    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return _NO_KEYS if state_dict is nothing else original(self, state_dict, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        with supply_state_dict(weights, nothing):
            yield
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]


@contextmanager
def supply_state_dict(weights: WeightsEnum, state: StateDict) -> Iterator[None]:
    """Let torchvision's builders take `state` for `weights` inside the context, instead of a download.

    Replaces `WeightsEnum.get_state_dict`, the one place where torchvision (0.25 to 0.29) fetches
    weights. A global change: models are built on one thread only.
    """
    original = WeightsEnum.get_state_dict

    def get_state_dict(self: WeightsEnum, *args: Any, **kwargs: Any) -> Any:
        return state if self is weights else original(self, *args, **kwargs)

    WeightsEnum.get_state_dict = get_state_dict
    try:
        yield
    finally:
        WeightsEnum.get_state_dict = original


def _with_factory(spec: ModelSpec, data_dir: Path, names: Collection[str] | None = None) -> ModelSpec:
    """Return a spec with what builds its source, if any, for tensors of these names."""
    return replace(spec, factory=source_factory(spec, data_dir, names)) if spec.source else spec


def _build_from_file(spec: ModelSpec, data_dir: Path) -> BuiltModule:
    path = Path(spec.weights).expanduser()
    state = read_weights(path, spec.rebuilding.sha256 if spec.rebuilding else "")
    spec = _with_factory(spec, data_dir, state.keys())
    if spec.rebuilding is not None:
        return _rebuild(spec, spec.rebuilding, state)
    weights = None if spec.is_custom or spec.options else _weights_of_file(spec.architecture, path)
    if weights is not None:
        return BuiltModule(_build_named(spec, weights, state), weights)
    with _initial_values_if(spec.is_custom):
        module = _build_seeded(spec)
    load_matching(module, state, path.name)  # refuses a file without a value for every parameter
    return BuiltModule(module, None)


def _rebuild(spec: ModelSpec, rebuilding: Rebuilding, state: StateDict) -> BuiltModule:
    """Build a published model: its base's module, changed as its trainer did, with its own weights."""
    weights = find_weights(spec.architecture, rebuilding.built_as) if rebuilding.built_as else None
    with torch.random.fork_rng(devices=[]):
        if weights is None:
            module = _build_seeded(spec)
        else:
            with skip_state_dict(weights):
                module = _call(spec, weights=weights, progress=False)
        rebuilding.prepare(module)
    load_matching(module, state, Path(spec.weights).name)
    return BuiltModule(module, weights)


def _weights_of_file(architecture: str, path: Path) -> WeightsEnum | None:
    """Find the weights whose file name, hash included, an operator's file still has."""
    members = named_weights(architecture).values()
    return next((member for member in members if stored_path(member, Path()).name == path.name), None)


def _build_named(spec: ModelSpec, weights: WeightsEnum, state: StateDict) -> nn.Module:
    with supply_state_dict(weights, state):
        with no_initial_values():
            module = _call(spec, weights=weights, progress=False)
        # By the names that the builder has given the state's entries, in place: DenseNet renames them.
        return module if are_all_in(module, state) else _call(spec, weights=weights, progress=False)


def _initial_values_if(wanted: bool) -> AbstractContextManager[None]:
    """Skip initial values for torchvision's builders only: a factory may read them."""
    return nullcontext() if wanted else no_initial_values()


def _build_seeded(spec: ModelSpec) -> nn.Module:
    """Build with the architecture's own initialisation, leaving torch's generators as they were."""
    arguments = {} if spec.is_custom else _arguments_without_weights(spec)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)
        return _call(spec, **arguments)


def _arguments_without_weights(spec: ModelSpec) -> dict[str, Any]:
    """Return what a torchvision builder needs to download nothing and warn of nothing.

    `init_weights=True` is what GoogLeNet and Inception do by default, with a warning.
    """
    arguments: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(find_builder(spec.architecture)).parameters:
        arguments["weights_backbone"] = None
    if spec.architecture.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        arguments["init_weights"] = True
    return arguments


def _call(spec: ModelSpec, **arguments: Any) -> nn.Module:
    """Call the builder or factory with the spec's options; its failures become `MODEL_INVALID`."""
    try:
        builder = _builder(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = builder(*spec.arguments, **{**arguments, **spec.options})
    except (torch.OutOfMemoryError, ServiceError):
        raise
    except Exception as error:
        raise _invalid(
            spec, f"building it failed: {type(error).__name__}: {without_paths(str(error))}"
        ) from error
    if not isinstance(module, nn.Module):
        raise _invalid(spec, f"'{spec.architecture}' returned a {type(module).__name__}, not an nn.Module")
    return with_scripted_parts(module, spec.model_id)


def _builder(spec: ModelSpec) -> Callable[..., Any]:
    if spec.factory is not None:
        return spec.factory
    factory: Callable[..., Any] = (
        _import_factory(spec.architecture) if spec.is_custom else find_builder(spec.architecture)
    )
    return factory


def _import_factory(architecture: str) -> Any:
    """Return what a factory names.

    Raises:
        ServiceError: `MODEL_INVALID`, there is no such module, or no such callable in it.
    """
    module_name, _, attributes = architecture.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"factory '{architecture}': no module '{error.name}' can be imported; install it, or add its "
            "folder to PYTHONPATH",
        ) from None
    result: Any = module
    for name in attributes.split("."):
        if not hasattr(result, name):
            near = nearest(name, dir(result))
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ServiceError(
                ErrorReason.MODEL_INVALID, f"factory '{architecture}': '{module_name}' has no '{name}'{hint}"
            )
        result = getattr(result, name)
    return result


def without_paths(text: str) -> str:
    """Shorten every file path in a message to its last part, and the message to 500 characters."""
    text = re.sub(r"(['\"])(?:~|[A-Za-z]:)?[/\\][^'\"]*[/\\]([^'\"/\\]+)\1", r"\1\2\1", text)
    return re.sub(r"(?<![\w:/])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\":]+)+[/\\]([^\s/\\'\":]+)", r"\1", text)[
        :500
    ]


def _invalid(spec: ModelSpec, why: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, f"model '{spec.model_id}': {why}")
