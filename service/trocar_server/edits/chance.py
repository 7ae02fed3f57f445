"""Operations with random numbers: of torch's CPU generator in float32, so that every device gets the same."""

import torch

from trocar_server.edits.operation import Dropout, Noise, NoiseKind
from trocar_server.edits.part import Part


def noise(part: Part, wanted: Noise) -> torch.Tensor:
    """Return x + numbers of mean 0; complex values get real ones.

    Gaussian: `torch.randn(shape) * scale`; uniform: `(torch.rand(shape) * 2 - 1) * scale`.
    """
    generator = torch.Generator(device="cpu").manual_seed(wanted.seed)
    if wanted.kind is NoiseKind.GAUSSIAN:
        drawn = torch.randn(part.form.shape, generator=generator, dtype=torch.float32, device="cpu")
    else:
        drawn = (
            torch.rand(part.form.shape, generator=generator, dtype=torch.float32, device="cpu")
            .mul_(2)
            .sub_(1)
        )
    return part.value + drawn.mul_(wanted.scale).to(part.value.device, part.value.dtype)


def dropout(part: Part, wanted: Dropout) -> torch.Tensor:
    """Return 0 where `torch.rand(shape) < probability`, also for NaN, and x / (1 - probability) elsewhere."""
    generator = torch.Generator(device="cpu").manual_seed(wanted.seed)
    is_dropped = (
        torch.rand(part.form.shape, generator=generator, dtype=torch.float32, device="cpu")
        < wanted.probability
    )
    return (part.value / (1 - wanted.probability)).masked_fill_(is_dropped.to(part.value.device), 0)
