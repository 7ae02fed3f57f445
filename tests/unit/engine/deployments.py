"""Loaded models without a server."""

from pathlib import Path

import torch
from torch import nn

from trocar_server.engine.host.deployment import Deployment, make_deployment
from trocar_server.models import HostedModel, ModelSpec, load_model


def hosted(kind: type[nn.Module], shape: tuple[int, ...] = (3,), **options: object) -> HostedModel:
    """Load a model of this class with weights `random:0`."""
    spec = ModelSpec("m", f"{kind.__module__}:{kind.__qualname__}", "random:0", input_shape=shape, **options)  # type: ignore[arg-type]
    return load_model(spec, torch.device("cpu"), Path("unused"))


def hosted_by_name(architecture: str) -> HostedModel:
    """Load a torchvision model with weights `random:0`."""
    return load_model(ModelSpec("m", architecture, "random:0"), torch.device("cpu"), Path("unused"))


def deployment(kind: type[nn.Module], shape: tuple[int, ...] = (3,), replica_count: int = 1) -> Deployment:
    """Host a model of this class."""
    return make_deployment(hosted(kind, shape), replica_count, max_queue=4)
