"""Whether a model gives the same answer to the same question: only then may an answer be kept.

    if is_repeatable(hosted):
        ...

Note: [What may be kept]
A model is asked twice when it is loaded, if replies are to be kept at all: what draws random numbers,
counts its calls or looks at the clock gives itself away in the value of one of its modules. What its
example input does not show, a random branch that only some data take, shows in the very pass: torch's
generator has moved on (`has_drawn`). Dropout in eval mode draws nothing and is fine. A model that hides
both from us, with a generator of its own in a rare branch, must not be served with a feature cache.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from trocar_server.engine.recordings import example_arguments
from trocar_server.models import HostedModel, make_training_copy
from trocar_server.surgery.structure import leaves


def is_repeatable(hosted: HostedModel) -> bool:
    """Whether two passes on the model's example input agree in every bit of every module. Owner thread only.

    The copy that is asked has buffers of its own: what the model keeps in them stays as it was.
    """
    for arguments in example_arguments(hosted):
        with suppress(Exception):  # whatever the model raises, for example because it takes whole numbers
            return _agree(hosted, arguments)
    return False


def _agree(hosted: HostedModel, arguments: Sequence[object]) -> bool:
    module = make_training_copy(hosted.module, ())
    with torch.inference_mode(), watching_draws(hosted.device) as draws:
        first, second = (_digest_of_pass(module, copy.deepcopy(arguments)) for _ in range(2))
    return first == second and not draws.has_drawn


class Draws:
    """What happened to torch's random numbers."""

    has_drawn = False
    """Whether any were drawn; known when the context has ended."""


@contextmanager
def watching_draws(device: torch.device) -> Iterator[Draws]:
    """Tell whether what runs inside draws from torch's own generators: 5 us. Owner thread only."""
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


def _digest_of_pass(module: nn.Module, arguments: Sequence[object]) -> bytes:
    digest = hashlib.sha256()

    def note(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        for _picks, leaf in leaves(output):
            if isinstance(leaf, torch.Tensor):
                dense = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(dense.reshape(-1).view(torch.uint8).numpy().data)

    with ExitStack() as hooks:
        for part in module.modules():
            hooks.callback(part.register_forward_hook(note).remove)
        module(*arguments)
    return digest.digest()
