"""Models of an in-process server: names, tables, and existing modules.

    read_models(["resnet18", "vit_b_16=random:0"])
    read_models({"resnet18": "random:0", "mine": {"factory": "my_models:build"}, "net": net})
    read_models(net)                            # its id is the name of its class in small letters, `net`
    read_models([net, "resnet18=random:0"])

# Note: [Modules of the caller]
The caller continues to use it, perhaps to train it. So the server hosts a copy of the module tree, whose
parameters and buffers are separate objects over the same memory: eval mode and `requires_grad=False` do not
affect the original. Weights that the caller changes in place (an optimiser's step, `load_state_dict`, the
statistics of batch norm) apply from the next call on; a pass may see half of a step.
Changes that replace tensors (`.half()`, `.to("cuda")`) or add modules do not reach the copy.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, make_hosted_copy, parse_model_argument, same_id

_ID_CHARACTERS = 56
_WITH_MODULE = ("input_shape", "categories", "preprocessing", "replicas")


@dataclass(frozen=True)
class LocalModels:
    """Models to host.

    Attributes:
        tables: Configuration tables by model id.
        factories: Factories by model id, for models that the caller passes as modules.
    """

    tables: Mapping[str, Mapping[str, Any]]
    factories: Mapping[str, Callable[[], nn.Module]]


def read_models(models: str | nn.Module | Sequence[str | nn.Module] | Mapping[str, Any]) -> LocalModels:
    """Parse the models that a caller wants to host.

    Args:
        models: Names as on the command line, `resnet18` or `resnet18=random:0`, and modules, whose ids are
            made of the names of their classes. Or by model id: the name of weights, a table with the keys of
            `[models.ID]`, an `nn.Module`, or a table with it as `module` and with `input_shape`.

    Raises:
        ServiceError: `MODEL_INVALID`, an entry is none of these, or two of a list would have one id.
    """
    if not isinstance(models, Mapping | str | nn.Module | Iterable):
        raise _not_models(models)
    if not isinstance(models, Mapping):
        models = _by_id([models] if isinstance(models, str | nn.Module) else models)
    tables = {model_id: _table(model_id, value) for model_id, value in models.items()}
    factories = {
        model_id: partial(make_hosted_copy, table.pop("module"))
        for model_id, table in tables.items()
        if "module" in table
    }
    return LocalModels(
        {
            model_id: {"factory": "local:module", **table} if model_id in factories else table
            for model_id, table in tables.items()
        },
        factories,
    )


def _not_models(given: object) -> ServiceError:
    if isinstance(given, type) and issubclass(given, nn.Module):
        what = f"the class {given.__name__}; give a module, {given.__name__}(...)"
    else:
        what = f"{given!r:.60}; give names such as 'resnet18', modules, or a dict of these"
    return ServiceError(ErrorReason.MODEL_INVALID, f"models is {what}")


def _by_id(models: Sequence[str | nn.Module]) -> dict[str, Any]:
    """Assign an id to every entry of a list: a name is its own id; a second module of a class gets `-2`."""
    named: dict[str, Any] = {}
    for model in models:
        if isinstance(model, nn.Module):
            named[_free_id(type(model).__name__, named)] = model
            continue
        if not isinstance(model, str):
            raise _invalid(
                str(type(model).__name__),
                "is neither a name nor an nn.Module; see the `models` argument of connect",
            )
        spec = parse_model_argument(model)
        if named.setdefault(spec.model_id, _of_spec(spec)) != _of_spec(spec):
            raise same_id(spec)
    return named


def _free_id(class_name: str, taken: Collection[str]) -> str:
    """Unused id derived from a class's name: `ResNet` is `resnet`, `_My Net` is `my-net`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", class_name.lower()).strip("._-")[:_ID_CHARACTERS] or "module"
    numbered = (f"{plain}-{number}" for number in count(2))
    return next(name for name in chain((plain,), numbered) if name not in taken)


def _table(model_id: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        return _of_spec(parse_model_argument(f"{model_id}={value}"))
    if isinstance(value, nn.Module):
        return {"module": value}
    if not isinstance(value, Mapping):
        raise _invalid(
            model_id,
            f"{type(value).__name__} is not a model description; give the name of weights, an nn.Module, "
            "or a table with the keys of [models.ID]",
        )
    if "module" in value:
        _check_with_module(model_id, value)
    return dict(value)


def _of_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return the table of a model as the command line names it."""
    table = {"source": spec.source, "architecture": spec.named_architecture, "weights": spec.weights}
    return {key: value for key, value in table.items() if value}


def _check_with_module(model_id: str, table: Mapping[str, Any]) -> None:
    """Refuse settings that would build another module, or overwrite the caller's weights."""
    if not isinstance(table["module"], nn.Module):
        raise _invalid(model_id, f"its module is a {type(table['module']).__name__}, not an nn.Module")
    surplus = [key for key in table if key not in ("module", *_WITH_MODULE)]
    if surplus:
        raise _invalid(
            model_id, f"{', '.join(surplus)} cannot go with a module; {', '.join(_WITH_MODULE)} can"
        )


def _invalid(model_id: str, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, f"model '{model_id}': {problem}")
