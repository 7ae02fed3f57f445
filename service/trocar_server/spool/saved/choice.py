"""Predicates on a tensor that autograd is about to save: the tensors that a spool may write."""

from collections.abc import Callable, Collection

import torch

Choice = Callable[[torch.Tensor], bool]
"""Says of a tensor that autograd saves whether it may be written."""

NO_OPERATION = ""
"""The name of the operation of tensors that none made: inputs, indices, masks, statistics of a batch."""


def made_by(operations: Collection[str]) -> Choice:
    """Choose tensors by the operation that made them.

        spool = Spool("/scratch", budget_bytes=0, operations=["ConvolutionBackward0", NO_OPERATION])

    An operation is named as autograd names it: `tensor.grad_fn.name()` at the time when the tensor is saved.
    It is the one that made the tensor, not the one that saves it: the value between a convolution and a ReLU
    is made by `ConvolutionBackward0`. It is the last one: a view of that value is made by `ViewBackward0`,
    and a tensor changed in place by the change. A tensor without `grad_fn` has the empty name,
    `NO_OPERATION`. Names are compared exactly.

    Raises:
        TypeError: `operations` is one string.
    """
    if isinstance(operations, str):
        raise TypeError(f"operations is a list of names, for example [{operations!r}]")
    names = frozenset(operations)

    def choose(tensor: torch.Tensor) -> bool:
        made = tensor.grad_fn
        return (NO_OPERATION if made is None else made.name()) in names

    return choose


def all_of(*choices: Choice | None) -> Choice | None:
    """Choose what every predicate chooses; None are left out, and the result is None where all are."""
    given = [choice for choice in choices if choice is not None]
    if len(given) < 2:
        return given[0] if given else None
    return lambda tensor: all(choice(tensor) for choice in given)
