"""Foreach operations on lists of tensors, in place: one kernel for many tensors on a GPU.

torch's own functions, not exported to type checkers; its optimizers are built on them (2.14).
"""

import torch
from torch import Tensor


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def add_all(targets: list[Tensor], others: list[Tensor], factor: float = 1) -> None:
    """Add to each target `factor` times another tensor, as `add_(other, alpha=factor)` does."""
    if targets:
        torch._foreach_add_(targets, others, alpha=factor)  # pyright: ignore[reportPrivateImportUsage]


def scale_all(targets: list[Tensor], factor: float) -> None:
    """Multiply each target."""
    if targets:
        torch._foreach_mul_(targets, factor)  # pyright: ignore[reportPrivateImportUsage]
