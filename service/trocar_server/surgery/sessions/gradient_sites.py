"""Gradient sites: actions on the gradient of one value, and the leaf tensors that stand in for values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trocar_server.surgery.recording.writes import storage_key
from trocar_server.surgery.sessions.editing import EditTarget
from trocar_server.surgery.sessions.taps import Target, ValueMissingError
from trocar_server.surgery.structure import Picks, leaves, pick
from trocar_server.tensors.edits import edit_value


@dataclass(frozen=True)
class GradientPoint:
    """An action on the gradient of one value: collect it or edit it.

    Attributes:
        target: The value.
        edit: The edit of its gradient; None when it is collected.
        is_after_taps: Whether taps at the same value collect the gradient before this edit.
    """

    target: Target
    edit: EditTarget | None = None
    is_after_taps: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key among the actions on the same gradient."""
        if self.edit is None:
            return 1, 0
        return 2 if self.is_after_taps else 0, self.edit.position


@dataclass(frozen=True)
class Written:
    """A module's original input, and the tensor that replaced it."""

    value: torch.Tensor
    own: torch.Tensor
    version: int

    def settle(self) -> None:
        """Copy an in-place module's writes to the original input, which others may read."""
        is_copy = storage_key(self.value) != storage_key(self.own)  # all addresses on the meta device are 0
        if self.own._version != self.version and is_copy:
            self.value.copy_(self.own)


@dataclass
class Site:
    """All actions on the gradient of one tensor."""

    tensor: "Callable[[], torch.Tensor | None]"
    points: list[GradientPoint]
    values: dict[str, torch.Tensor]
    edited: set[str]

    def see(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Edit and collect; returns the changed gradient, or None where unchanged."""
        if gradient is None:  # the hook of a leaf also runs without a gradient (torch 2.14)
            return None
        before = gradient
        for point in sorted(self.points, key=lambda point: point.rank):
            if point.edit is not None:
                gradient = edit_value(point.edit.edit, gradient, point.edit.operands)
                self.edited.add(point.target.name)
            else:
                self.values[point.target.name] = gradient.detach()
        return None if gradient is before else gradient


class Inputs:
    """The inputs of one call in the graph: a module that returns one of them has two gradients, not one.

    Args:
        arguments: Those of the call, in any structure.
    """

    def __init__(self, arguments: Any) -> None:
        result = (leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
        self._tensors = [(leaf, leaf._version) for leaf in result if leaf.requires_grad]

    def have(self, value: torch.Tensor) -> bool:
        """Whether a value is an input, and not written to since, which makes it another node of the graph."""
        return any(value is leaf and value._version == version for leaf, version in self._tensors)


def alias(value: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the same memory, with the same strides: torch chooses kernels by them.

    `view_as` gives a dimension of size 1 another stride: convnext_tiny was then 8e-7 off (torch 2.14).
    """
    return value[...]


def tensor_at(ports: Mapping[str, Any], port: str, picks: Picks, target: Target) -> torch.Tensor:
    """Return the tensor at a port.

    Raises:
        ValueMissingError: There is none.
    """
    try:
        value = pick(ports[port], picks)
    except KeyError:
        raise ValueMissingError(target.name) from None
    if not isinstance(value, torch.Tensor):
        raise ValueMissingError(target.name)
    return value


def by_place(targets: Sequence[Target]) -> dict[tuple[str, Picks], list[Target]]:
    """Group targets by port and picks."""
    result: dict[tuple[str, Picks], list[Target]] = {}
    for target in targets:
        result.setdefault((target.port, target.picks), []).append(target)
    return result
