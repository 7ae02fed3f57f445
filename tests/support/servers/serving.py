"""Which small models the tests host, and how to rebuild them without our code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.models import gated_models, odd_models, tiny_models
from tests.support.servers.running_server import RunningServer

Serve = Callable[..., RunningServer]
"""`serve(models={...}, limits={...})` starts a server that stops with the test."""

TINY: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "plain": (tiny_models.Plain, (3, 8, 8)),
    "structured": (tiny_models.Structured, (3,)),
    "data-dependent": (tiny_models.DataDependent, (3,)),
    "half": (tiny_models.Half, (7,)),
    "identity": (odd_models.Identity, (3,)),
    "many": (odd_models.TakesMany, (3,)),
    "deep": (odd_models.Deep, (3,)),
    "gated": (gated_models.Gated, (3,)),
    "gated-on-data": (gated_models.GatedOnData, (3,)),
    "stuck": (gated_models.StuckInOneModule, (3,)),
}
"""Class and example shape of the models that the shared server hosts, all with weights `random:0`."""


def custom(kind: type[nn.Module], shape: tuple[int, ...] = (3,), **options: Any) -> dict[str, Any]:
    """Configure a model of this class, weights `random:0` unless said otherwise."""
    factory = f"{kind.__module__}:{kind.__qualname__}"
    return {"factory": factory, "input_shape": shape, "weights": "random:0", **options}


def tiny_models_config() -> dict[str, Any]:
    """Configure every model of `TINY`."""
    return {model_id: custom(kind, shape) for model_id, (kind, shape) in TINY.items()}


def rebuilt(kind: Callable[..., nn.Module], **options: Any) -> Any:
    """Build the very model that a server hosts as `random:0`."""
    torch.manual_seed(0)
    return kind(**options).eval()
