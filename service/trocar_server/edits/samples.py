"""Operations across samples: mean_ablate and resample."""

import torch

from trocar_server.edits.operation import MeanAblate, Resample
from trocar_server.edits.part import Part


def mean_ablate(part: Part, wanted: MeanAblate) -> torch.Tensor:
    """Return the mean over the samples, or the reference, for each sample.

    Halves are summed in float32. A reference of shape (channels,) lies along the channels, any other is
    broadcast as NumPy's.
    """
    if wanted.reference is None:
        mean = part.value.mean(part.form.need_samples(), keepdim=True, dtype=part.compute_dtype)
        return part.replaced(mean.to(part.value.dtype))
    (reference,) = part.constants
    reference = reference.to(part.value.device, part.value.dtype)
    if reference.shape == (part.form.channel_count,):
        reference = part.along_channels(reference)
    return part.replaced(reference)


def resample(part: Part, wanted: Resample) -> torch.Tensor:
    """Return the samples in the order of `torch.randperm` of torch's CPU generator."""
    dim = part.form.need_samples()
    generator = torch.Generator(device="cpu").manual_seed(wanted.seed)
    order = torch.randperm(part.form.shape[dim], generator=generator)
    return part.value.index_select(dim, order.to(part.value.device))
