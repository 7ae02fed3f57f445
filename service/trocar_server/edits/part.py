"""What the operations are given: the part of a value, what its dimensions mean, and what comes along."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trocar_server.edits.base import Operand
from trocar_server.edits.dtypes import as_number
from trocar_server.edits.form import Form
from trocar_server.reductions import ConstantSpec


@dataclass(frozen=True)
class Part:
    """A part of a value. It may share the value's memory: an operation never writes it, nor returns it.

    Attributes:
        value: Not empty, not on the meta device.
        form: Its form, already checked.
        constants: The operation's own tensors, in order, on any device and of any dtype.
        other: The same part of a value from elsewhere, of the same form, for a swap and `add_input`.
    """

    value: torch.Tensor
    form: Form
    constants: tuple[torch.Tensor, ...] = ()
    other: torch.Tensor | None = None

    def operands(self, *wanted: Operand) -> Iterator[torch.Tensor | float]:
        """Yield each operand as what torch computes with: a number, or a tensor of the value's dtype."""
        constants = iter(self.constants)
        for operand in wanted:
            if isinstance(operand, ConstantSpec):
                yield next(constants).to(self.value.device, self.value.dtype)
            else:
                yield as_number(operand, self.value.dtype)

    def replaced(self, by: torch.Tensor | float) -> torch.Tensor:
        """Return a new tensor in the value's memory layout: everywhere what is given, broadcast.

        In the graph of autograd it still depends on the value, with a gradient of 0; see
        Note: [A replaced value stays in the graph].
        """
        never = self.value.new_zeros((), dtype=torch.bool)
        return torch.where(never, self.value, by)

    def need_other(self) -> torch.Tensor:
        """Return the other value's part on this device, in this dtype."""
        if self.other is None:
            raise ValueError(f"{self.form.name} needs another value")
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
        """Return (channels,), or (batch, channels), with as many dimensions as the part has."""
        shape = [1] * self.value.ndim
        if self.form.channels is not None:
            shape[self.form.channels] = vectors.shape[-1]
        if vectors.ndim == 2 and self.form.samples is not None:  # samples are dimension 0, before channels
            shape[self.form.samples] = vectors.shape[0]
        return vectors.reshape(shape)
