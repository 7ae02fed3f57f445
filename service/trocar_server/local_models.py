"""Which models a server in the caller's own process hosts: names, tables, and modules that are there already.

    read_models(["resnet18", "vit_b_16=random:0"])
    read_models({"resnet18": "random:0", "mine": {"factory": "my_models:build"}, "net": net})

# Note: [A module of the caller]
The caller goes on using it, perhaps training it. So what is hosted is a copy of the module tree whose
parameters and buffers are other objects over the same memory: eval mode and `requires_grad=False` do not
show at the original. Weights that the caller changes in place (an optimiser's step, `load_state_dict`, the
statistics of batch norm) count from the next call on, and nothing keeps a pass from seeing half of a step.
What replaces the tensors (`.half()`, `.to("cuda")`) or adds modules does not reach the copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import make_hosted_copy, parse_model_argument

_WITH_MODULE = ("input_shape", "categories", "preprocessing", "replicas")


@dataclass(frozen=True)
class LocalModels:
    """What to host.

    Attributes:
        tables: What the configuration would say, by model id.
        factories: What builds the models that the caller has as modules, by model id.
    """

    tables: Mapping[str, Mapping[str, Any]]
    factories: Mapping[str, Callable[[], nn.Module]]


def read_models(models: str | Sequence[str] | Mapping[str, Any]) -> LocalModels:
    """Read what a caller wants hosted.

    Args:
        models: Names as on the command line, `resnet18` or `resnet18=random:0`. Or by model id: the name
            of weights, a table with the keys of `[models.ID]`, an `nn.Module`, or a table with it as
            `module` and with `input_shape`.

    Raises:
        ServiceError: `MODEL_INVALID`, an entry is none of these.
    """
    if not isinstance(models, Mapping):
        specs = map(parse_model_argument, [models] if isinstance(models, str) else models)
        return LocalModels({spec.model_id: {"weights": spec.weights} for spec in specs}, {})
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


def _table(model_id: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        return {"weights": value}
    if isinstance(value, nn.Module):
        return {"module": value}
    if not isinstance(value, Mapping):
        raise _invalid(
            model_id,
            f"{type(value).__name__} describes no model; give the name of weights, an nn.Module, "
            "or a table with the keys of [models.ID]",
        )
    if "module" in value:
        _check_with_module(model_id, value)
    return dict(value)


def _check_with_module(model_id: str, table: Mapping[str, Any]) -> None:
    """Refuse what would build another module, or write other weights over the caller's own."""
    if not isinstance(table["module"], nn.Module):
        raise _invalid(model_id, f"its module is a {type(table['module']).__name__}, not an nn.Module")
    surplus = [key for key in table if key not in ("module", *_WITH_MODULE)]
    if surplus:
        raise _invalid(
            model_id, f"{', '.join(surplus)} cannot go with a module; {', '.join(_WITH_MODULE)} can"
        )


def _invalid(model_id: str, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, f"model '{model_id}': {problem}")
