"""Part: the input of an operation, with the meaning of its dimensions and its operands."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trocar_server.tensors.edits.value_dtypes import as_number
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import OperandSpec

Operand: TypeAlias = float | OperandSpec
"""A number for all elements, or a tensor of the request that is broadcast to the part."""


@dataclass(frozen=True)
class Part:
    """A part of a value. It may share the value's memory: an operation never writes to it, nor returns it.

    Attributes:
        value: Not empty, not on the meta device.
        signature: Its signature, already checked.
        tensors: The operation's own tensors, in order, on any device and of any dtype.
        other: The same part of another value, with the same signature, for a swap and `add_input`.
    """

    value: torch.Tensor
    signature: ValueSignature
    tensors: tuple[torch.Tensor, ...] = ()
    other: torch.Tensor | None = None

    def operands(self, *wanted: Operand) -> Iterator[torch.Tensor | float]:
        """Yield each operand as torch needs it: a number, or a tensor of the value's dtype."""
        tensors = iter(self.tensors)
        for operand in wanted:
            if isinstance(operand, OperandSpec):
                yield next(tensors).to(self.value.device, self.value.dtype)
            else:
                yield as_number(operand, self.value.dtype)

    def replaced(self, by: torch.Tensor | float) -> torch.Tensor:
        """Return a new tensor in the value's memory layout, filled with `by`, broadcast.

        In autograd's graph it still depends on the value, with a gradient of 0; see
        Note: [A replaced value stays in the graph].
        """
        never = self.value.new_zeros((), dtype=torch.bool)
        return torch.where(never, self.value, by)

    def need_other(self) -> torch.Tensor:
        """Return the other value's part on this device, in this dtype."""
        if self.other is None:
            raise ValueError(f"{self.signature.name} needs another value")
        return self.other.to(self.value.device, self.value.dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype in which squares do not overflow: float64 or complex128."""
        return torch.promote_types(self.value.dtype, torch.float64)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The value's dtype, or float32 for a half."""
        return torch.promote_types(self.value.dtype, torch.float32)

    def along_channels(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return (channels,), or (batch, channels), reshaped to the rank of the part."""
        shape = [1] * self.value.ndim
        if self.signature.channels is not None:
            shape[self.signature.channels] = vectors.shape[-1]
        if (
            vectors.ndim == 2 and self.signature.samples is not None
        ):  # samples are dimension 0, before channels
            shape[self.signature.samples] = vectors.shape[0]
        return vectors.reshape(shape)
