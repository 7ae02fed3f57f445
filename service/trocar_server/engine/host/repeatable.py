"""Repeatability: whether a model gives equal replies to equal requests. Only then may a reply be cached.

    if is_repeatable(hosted):
        ...

Note: [Cacheable models]
A model is run twice when it is loaded, if replies are to be cached at all: a model that draws random numbers,
counts its calls or reads the clock gives different values in one of its modules. A random branch that only
some data take, and the example input does not, is detected in the pass itself: the state of torch's
generator has changed (`has_drawn`). Dropout in eval mode draws nothing and is fine. A model that escapes
both checks, with a generator of its own in a rare branch, must not be served with a feature cache.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from trocar_server.engine.host.recordings import Called, example_arguments
from trocar_server.models import HostedModel, make_training_copy
from trocar_server.surgery.structure import leaves


def is_repeatable(hosted: HostedModel) -> bool:
    """Whether two passes on the model's example input agree in every bit of every module. Owner thread only.

    It runs on a copy with its own buffers: those of the model are unchanged.
    """
    for called in example_arguments(hosted):
        with suppress(Exception):  # any error of the model, for example because it takes integers
            return _agree(hosted, called)
    return False


def _agree(hosted: HostedModel, called: Called) -> bool:
    module = make_training_copy(hosted.module, ())
    with torch.inference_mode(), watching_draws(hosted.device) as draws:
        first, second = (_digest_of_pass(module, copy.deepcopy(called)) for _ in range(2))
    return first == second and not draws.has_drawn


class Draws:
    """Draws from torch's random generators inside a context."""

    has_drawn = False
    """Whether any were drawn; known when the context has ended."""


@contextmanager
def watching_draws(device: torch.device) -> Iterator[Draws]:
    """Detect draws from torch's own generators inside the context: costs 5 us. Owner thread only."""
    draws, before = Draws(), _states(device)
    try:
        yield draws
    finally:
        after = _states(device)
        draws.has_drawn = not all(map(torch.equal, before, after))


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _digest_of_pass(module: nn.Module, called: Called) -> bytes:
    digest = hashlib.sha256()

    def note(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        for _picks, leaf in leaves(output):
            if isinstance(leaf, torch.Tensor):
                dense = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(dense.reshape(-1).view(torch.uint8).numpy().data)

    with ExitStack() as hooks:
        for part in module.modules():
            hooks.callback(part.register_forward_hook(note).remove)
        args, keywords = called
        module(*args, **keywords)
    return digest.digest()
