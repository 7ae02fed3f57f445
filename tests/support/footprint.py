"""What a call must leave as it was: hooks, leases, tensors."""

import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.support.running_server import RunningServer

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
    pool: Any = server.engine._hosts[model_id].pool
    return [replica.module for replica in pool._free]


def hook_counts(server: RunningServer) -> Mapping[str, list[int]]:
    """Count the hooks on the free replicas of every loaded model; a replica that is lent is missing."""
    return {
        model_id: sorted(hook_count(module) for module in replicas(server, model_id))
        for model_id in server.engine._hosts
    }


def live_tensor_count() -> int:
    """Count the tensors that anybody in this process still holds."""
    gc.collect()
    interval_s = sys.getswitchinterval()
    # A tuple that another thread is just building must not be held when that thread goes on: its next
    # element would be a SystemError (CPython 3.11, `gc.get_objects` shows tuples before they are whole).
    sys.setswitchinterval(60)
    try:
        return sum(1 for _ in _live_tensors())
    finally:
        sys.setswitchinterval(interval_s)


def _live_tensors() -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance() asks deprecated attributes of foreign objects
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                yield thing
