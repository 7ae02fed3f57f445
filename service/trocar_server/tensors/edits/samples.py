"""Cross-sample operations: mean_ablate and resample."""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require_seed
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_dtypes import need_kind
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import OperandSpec


@dataclass(frozen=True)
class MeanAblate(Operation):
    """Each sample becomes the mean over the samples of the part, or the reference."""

    name = "mean_ablate"
    wide_copies = 1
    reference: OperandSpec | None = None

    def check(self, part: ValueSignature) -> None:
        """Check that there are samples, or that the reference fits."""
        if self.reference is None:
            part.need_samples()
            return
        need_kind(part, self.reference.dtype)
        if self.reference.shape != (part.channel_count,):  # otherwise it is along the channels
            part.need_broadcast(self.reference)

    def apply(self, part: Part) -> torch.Tensor:
        """Return the mean over the samples, or the reference, for each sample.

        Halves are summed in float32. A reference of shape (channels,) lies along the channels, any other is
        broadcast as NumPy's.
        """
        if self.reference is None:
            samples = part.signature.need_samples()
            mean = part.value.mean(samples, keepdim=True, dtype=part.compute_dtype)
            return part.replaced(mean.to(part.value.dtype))
        (reference,) = part.tensors
        reference = reference.to(part.value.device, part.value.dtype)
        if reference.shape == (part.signature.channel_count,):
            reference = part.along_channels(reference)
        return part.replaced(reference)


@dataclass(frozen=True)
class Resample(Operation):
    """Sample i becomes sample `torch.randperm(batch)[i]` of torch's CPU generator."""

    name = "resample"
    takes_integers = True
    takes_booleans = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self, self.seed)

    def check(self, part: ValueSignature) -> None:
        """Check that there are samples."""
        part.need_samples()

    def apply(self, part: Part) -> torch.Tensor:
        """Return the samples in the order of `torch.randperm` of torch's CPU generator."""
        dim = part.signature.need_samples()
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        order = torch.randperm(part.signature.shape[dim], generator=generator)
        return part.value.index_select(dim, order.to(part.value.device))
