"""What a call must leave as it was: hooks, leases, tensors."""

import gc
from collections.abc import Mapping
from itertools import chain, starmap

import torch
from torch import nn

from tests.support.servers.running_server import RunningServer

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hook_count(module: nn.Module) -> int:
    """Count every hook on a module tree."""
    return sum(len(getattr(child, table)) for child in module.modules() for table in _HOOK_TABLES)


def replicas(server: RunningServer, model_id: str) -> list[nn.Module]:
    """Return the module trees of a model that nobody uses now."""
    return [replica.module for replica in server.engine.deployments[model_id].pool.free]


def hook_counts(server: RunningServer) -> Mapping[str, list[int]]:
    """Count the hooks on the free replicas of every loaded model; a replica that is lent is missing."""
    return {
        model_id: sorted(hook_count(module) for module in replicas(server, model_id))
        for model_id in server.engine.deployments
    }


def live_tensor_count() -> int:
    """Count the tensors that anybody in this process still holds."""
    gc.collect()
    return tensor_count()


def tensor_count() -> int:
    """Count the tensors of this process, those that only the garbage collector will drop included."""
    # One call of C, in which no other thread runs: a tuple that a thread is just building must not be held
    # when it goes on, its next element would be a SystemError (CPython 3.11; `gc.get_objects` shows tuples
    # before they are whole).
    types = list(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    return sum(issubclass(found, torch.Tensor) for found in types)
