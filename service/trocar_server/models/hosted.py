"""A model in memory: the module and what is known about it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trocar_server.models.families import Family
from trocar_server.models.preprocessing import Preprocessor
from trocar_server.models.spec import ModelSpec

ExampleArguments = tuple[Tensor | list[Tensor], ...]
"""Positional arguments of one pass."""


@dataclass(frozen=True, eq=False)
class HostedModel:
    """A loaded model.

    The module is in eval mode, asks for no parameter gradients, and is never hooked: passes run on
    its replicas.
    """

    spec: ModelSpec
    """What the operator or client asked for."""
    module: nn.Module
    """The original, whose weights every replica shares."""
    family: Family
    """The kind of task."""
    weights: str
    """Where the weights come from: an enum name, `random:0`, `file` or `factory`."""
    categories: tuple[str, ...]
    """Class names by index; empty when unknown."""
    preprocessing: Preprocessor | None
    """What to do to images; None for a model that takes arrays only."""
    input_shape: tuple[int, ...]
    """Shape of one example input without its batch dimension."""
    parameter_count: int
    """Number of parameter elements, tied ones once."""
    byte_count: int
    """Bytes of parameters and buffers, shared storage once."""
    device: torch.device
    """Where the parameters are."""
    dtype: torch.dtype | None
    """The dtype of the first floating-point parameter; None without one."""

    @property
    def takes_list(self) -> bool:
        """Whether the module takes a list of (channels, height, width) tensors: detection."""
        return self.family.takes_list

    def example_inputs(self, batch: int = 1) -> ExampleArguments:
        """Return the arguments of a pass on seeded values in [0, 1), the same at every call.

        One tensor (batch, *input_shape); for detection one list of `batch` tensors; for optical
        flow two tensors, the earlier and the later frame.
        """
        generator = torch.Generator().manual_seed(0)
        count = 2 if self.family is Family.OPTICAL_FLOW else 1
        values = torch.rand((count, batch, *self.input_shape), generator=generator)
        arguments = values.to(self.device, self.dtype or torch.float32).unbind()
        return (list(arguments[0].unbind()),) if self.takes_list else arguments


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind tensors; storage that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
