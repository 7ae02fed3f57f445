"""Changes of a module's output: the words of a request, and the same in torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import trocar
from tests.support.models.other_models import OtherModel
from tests.support.oracles.oracle import Array

TOLERANCE = 1e-5
"""Of the largest number of what is compared."""
INDICES = [1, 4]


@dataclass
class Tally:
    """What was compared, and how far apart the farthest was."""

    count: int = 0
    equal_count: int = 0
    farthest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, found: Array, expected: torch.Tensor) -> None:
        """Compare two results."""
        wanted = expected.detach().numpy()
        self.count += 1
        if found.shape != wanted.shape or not np.abs(wanted).max() > 0:
            self.wrong.append(f"{name}: shape {found.shape}, expected {wanted.shape}, or nothing but zeros")
            return
        distance = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        self.equal_count += bool(np.array_equal(found, wanted))
        self.farthest = max(self.farthest, distance)
        if not distance <= TOLERANCE:
            self.wrong.append(f"{name}: {distance:.1e}")

    def __str__(self) -> str:
        wrong = "".join(f"\n    {line}" for line in self.wrong)
        return f"{self.count:4} compared, {self.equal_count:4} bit-equal, farthest {self.farthest:.1e}{wrong}"


@dataclass(frozen=True)
class Place:
    """Where something is changed.

    Attributes:
        path: The module.
        channel_dim: Which dimension of its output holds the channels.
        shape: Of its output.
    """

    path: str
    channel_dim: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many channels."""
        return self.shape[self.channel_dim]

    def numbers(self, *shape: int) -> torch.Tensor:
        """Return numbers of a normal distribution, the same for the same shape."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    def along(self, vector: torch.Tensor) -> torch.Tensor:
        """Return one number for each channel so that it broadcasts."""
        return vector.reshape([-1 if dim == self.channel_dim else 1 for dim in range(len(self.shape))])

    def edit(self, operation: Any, *values: Any, **options: Any) -> trocar.Edit:
        """Return an edit of the module's output."""
        said = "channels" in options or operation in _OF_CHANNELS
        dim: dict[str, Any] = {"channel_dim": self.channel_dim} if said else {}
        return trocar.edit(self.path, operation, *values, **dim, **options)

    @classmethod
    def of(cls, model: torch.nn.Module, path: str, places: OtherModel, x: torch.Tensor) -> "Place":
        """Look at what a module returns."""
        shapes: list[tuple[int, ...]] = []
        module = model.get_submodule(path)
        handle = module.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape)))
        with torch.no_grad():
            model(x)
        handle.remove()
        return cls(path, places.channel_dim, shapes[0])


_OF_CHANNELS = ("mean_ablate", "steer", "project_out", "project_onto", "top_k", "normalise")
Edits = Callable[[Place], trocar.Edit]
InTorch = Callable[[Place, torch.Tensor], torch.Tensor]


def some_channels(place: Place, x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Return a value with some of its channels changed."""
    result, part = x.clone(), x.movedim(place.channel_dim, 0)[INDICES]
    result.movedim(place.channel_dim, 0)[INDICES] = change(part)
    return result


def projected(place: Place, x: torch.Tensor) -> Any:
    """Return the projection of each vector of channels onto three vectors."""
    rows = place.numbers(3, place.width).double()
    onto = torch.linalg.pinv(rows) @ rows
    return (x.movedim(place.channel_dim, -1).double() @ onto).movedim(-1, place.channel_dim).to(x.dtype)


def steered(place: Place, x: torch.Tensor) -> Any:
    """Return a value with a multiple of a direction added, of the norms that it had."""
    moved = x + 2.5 * place.along(place.numbers(place.width))
    norms = [torch.linalg.vector_norm(y, dim=place.channel_dim, keepdim=True) for y in (x, moved)]
    return moved * (norms[0] / norms[1])


def largest(place: Place, x: torch.Tensor) -> torch.Tensor:
    """Return a value whose channels are zero but for the five largest."""
    kept = x.topk(5, dim=place.channel_dim).indices
    return torch.zeros_like(x).scatter(place.channel_dim, kept, x.gather(place.channel_dim, kept))


def of_norm(place: Place, x: torch.Tensor, limit: float) -> Any:
    """Return a value with each sample scaled down to a norm."""
    norms = x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
    return x * (limit / norms).clamp(max=1)


def masked(place: Place) -> torch.Tensor:
    """Return where a masked edit counts."""
    return place.numbers(*place.shape) > 0


def seeded(draw: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return numbers of a value's shape, of seed 5."""
    return draw(x.shape, generator=torch.Generator().manual_seed(5))


CHANGES: dict[str, tuple[Edits, InTorch]] = {
    "set": (
        lambda p: p.edit("set", 0.7, channels=INDICES),
        lambda p, x: some_channels(p, x, lambda part: torch.full_like(part, 0.7)),
    ),
    "set-tensor": (
        lambda p: p.edit("set", p.numbers(*p.shape).numpy()),
        lambda p, x: p.numbers(*p.shape),
    ),
    "zero": (lambda p: p.edit("zero"), lambda p, x: x * 0),
    "zero-channels": (
        lambda p: p.edit("zero", channels=INDICES),
        lambda p, x: some_channels(p, x, torch.zeros_like),
    ),
    "zero-sample": (
        lambda p: p.edit("zero", samples=[1]),
        lambda p, x: torch.cat([x[:1], x[1:] * 0]),
    ),
    "add": (
        lambda p: p.edit("add", p.along(p.numbers(p.width)).numpy()),
        lambda p, x: x + p.along(p.numbers(p.width)),
    ),
    "scale": (lambda p: p.edit("scale", -1.5), lambda p, x: x * -1.5),
    "scale-part": (
        lambda p: p.edit("scale", 3.0, index=np.s_[:, 1:, ..., ::2]),
        lambda p, x: torch.where(_part(x), x * 3, x),
    ),
    "scale-masked": (
        lambda p: p.edit("scale", 3.0, mask=masked(p).numpy()),
        lambda p, x: torch.where(masked(p), x * 3, x),
    ),
    "affine": (lambda p: p.edit("affine", 0.5, 0.25), lambda p, x: x * 0.5 + 0.25),
    "clamp": (lambda p: p.edit("clamp", -0.1, 0.3), lambda p, x: x.clamp(-0.1, 0.3)),
    "noise": (
        lambda p: p.edit("noise", 0.3, seed=5),
        lambda p, x: x + 0.3 * seeded(torch.randn, x),
    ),
    "uniform-noise": (
        lambda p: p.edit("noise", 0.3, "uniform", seed=5),
        lambda p, x: x + 0.3 * (2 * seeded(torch.rand, x) - 1),
    ),
    "mean-of-batch": (lambda p: p.edit("mean_ablate"), lambda p, x: x.mean(0, keepdim=True).expand_as(x)),
    "mean-given": (
        lambda p: p.edit("mean_ablate", p.numbers(p.width).numpy()),
        lambda p, x: p.along(p.numbers(p.width)).expand_as(x),
    ),
    "resample": (
        lambda p: p.edit("resample", seed=5),
        lambda p, x: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))],
    ),
    "steer": (
        lambda p: p.edit("steer", p.numbers(p.width).numpy(), 2.5),
        lambda p, x: x + 2.5 * p.along(p.numbers(p.width)),
    ),
    "steer-keeping-norms": (
        lambda p: p.edit("steer", p.numbers(p.width).numpy(), 2.5, keep_norm=True),
        steered,
    ),
    "project-onto": (lambda p: p.edit("project_onto", p.numbers(3, p.width).numpy()), projected),
    "project-out": (
        lambda p: p.edit("project_out", p.numbers(3, p.width).numpy()),
        lambda p, x: x - projected(p, x),
    ),
    "top-k": (lambda p: p.edit("top_k", 5), largest),
    "dropout": (
        lambda p: p.edit("dropout", 0.4, seed=5),
        lambda p, x: torch.where(seeded(torch.rand, x) < 0.4, 0, x / 0.6),
    ),
    "cast": (lambda p: p.edit("cast", "bfloat16"), lambda p, x: x.bfloat16().float()),
    "normalise": (lambda p: p.edit("normalise", 2.0), lambda p, x: of_norm(p, x, 2.0)),
}
"""By name: an edit of a module's output, and what it does."""


def _part(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x, dtype=torch.bool)
    result[:, 1:, ..., ::2] = True
    return result
