"""Operations with another value of the pass: swap, add_input, skip."""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_dtypes import need_lossless
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import dtype_name


@dataclass(frozen=True)
class Swap(Operation):
    """Replaces the part by the same part of another value.

    Attributes:
        source: The name of other inputs of the request; this pass itself when empty.
        selector: Selector of the value, as text; the edit's own selector when empty.
    """

    name = "swap"
    takes_integers = True
    takes_booleans = True
    takes_other = True
    source: str = ""
    selector: str = ""

    def __post_init__(self) -> None:
        require(bool(self.source or self.selector), "swap needs a source or a selector")

    def check_other(
        self, value: ValueSignature, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> None:
        """Check that the replacement has the value's shape, or a batch of 1, and loses at most digits."""
        is_one_sample = value.shape != () and shape == (1, *value.shape[1:])
        if shape is not None and shape != value.shape and not is_one_sample:
            raise value.mismatch(
                f"the other value is of shape {shape}; take one of that shape, or a batch of 1"
            )
        if dtype is not None:
            need_lossless(value, dtype)

    def apply(self, part: Part) -> torch.Tensor:
        """Return the same part of the other value."""
        return part.replaced(part.need_other())


@dataclass(frozen=True)
class AddInput(Operation):
    """output + input of the same call."""

    name = "add_input"
    takes_integers = True
    takes_other = True

    def check_other(
        self, value: ValueSignature, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> None:
        """Check that the input has the output's shape and loses at most digits."""
        _need_shape_of_input(value, shape)
        if dtype is not None:
            need_lossless(value, dtype)

    def apply(self, part: Part) -> torch.Tensor:
        """Return output + input."""
        return part.value + part.need_other()


@dataclass(frozen=True)
class Skip(Operation):
    """Does not run the module: its first input is its output."""

    name = "skip"
    takes_integers = True
    takes_booleans = True
    is_on_values = False

    def check_other(
        self, value: ValueSignature, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> None:
        """Check that the input has the output's shape and dtype."""
        _need_shape_of_input(value, shape)
        if dtype is not None and dtype != value.dtype:
            raise value.rejection(f"the input is {dtype_name(dtype)}; skip a module that keeps the dtype")

    def apply(self, part: Part) -> torch.Tensor:
        """Refuse: nothing is computed."""
        raise ValueError("skip cannot be applied to a value; it keeps the module from running")


def _need_shape_of_input(output: ValueSignature, shape: tuple[int, ...] | None) -> None:
    if shape is not None and shape != output.shape:
        raise output.mismatch(f"the module's input is of shape {shape}; edit a module that keeps the shape")
