"""Differentiability: the values of a recorded pass that can have a gradient."""

from collections.abc import Sequence

import torch

from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Recording, Selector, Target, no_gradient_of
from trocar_server.surgery.resolution.values import Value


def check_float(target: Target, leaf: Leaf) -> None:
    """Refuse a value that has no gradient.

    Raises:
        ServiceError: `NOT_DIFFERENTIABLE`.
    """
    dtype = leaf.dtype or torch.float32
    if not (dtype.is_floating_point or dtype.is_complex):
        raise no_gradient_of(target.name, dtype)


def with_gradients(values: Sequence[Value], selector: Selector, recording: Recording) -> list[Value]:
    """Return the values that can have a gradient. A pattern leaves out the others, and buffers.

    Raises:
        ServiceError: `NOT_DIFFERENTIABLE`, there is none, or an exact selector names one that has none.
    """
    gradients: list[Value] = []
    for target, leaf in values:
        try:
            check_float(target, leaf)
        except ServiceError:
            if not selector.is_plural or len(values) == 1:
                raise
            continue
        # torch has no derivative for batch-norm statistics, and raises when one is requested.
        if not (selector.is_plural and target.parameter in recording.modules[target.path].buffers):
            gradients.append((target, leaf))
    if not gradients:
        target, leaf = values[0]
        raise no_gradient_of(target.name, leaf.dtype or torch.float32)
    return gradients
