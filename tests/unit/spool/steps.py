"""Training steps of a tiny model, plain and with a spool, and what a folder holds."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from trocar_server.spool import Spool, SpoolError
from trocar_server.spool.files.chunks import UNPUBLISHED


def small_model() -> nn.Sequential:
    """A model whose step saves half a megabyte, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 4),
    )


def batch() -> torch.Tensor:
    """Inputs for `small_model`."""
    return torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def small_step(folder: Path) -> torch.Tensor:
    """Return a graph over a spool that nobody else has."""
    x = torch.randn(64, requires_grad=True)
    with Spool(folder, 0, min_bytes=64):
        return (x * 2).pow(3).sum()


def gradients(model: nn.Module, spool: Spool | None = None) -> list[torch.Tensor]:
    """Return the gradients of one step."""
    model.zero_grad()
    with contextlib.nullcontext() if spool is None else spool:
        loss = model(batch()).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def failure(kind: type[SpoolError], model: nn.Module, spool: Spool) -> str:
    """Return what a step fails with; nothing holds the error, or its graph, behind it."""
    try:
        gradients(model, spool)
    except kind as error:
        return str(error)
    raise AssertionError("the step did not fail")


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether gradients are the same, bit for bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def files(parent: Path) -> list[Path]:
    """The files of all spools under a common folder, published or not."""
    found = (parent.glob(f"trocar-spool-*/*{ending}") for ending in (".safetensors", UNPUBLISHED))
    return sorted(path for paths in found for path in paths)


@contextlib.contextmanager
def open_spool(parent: Path, budget_bytes: int = 0, **options: object) -> Iterator[Spool]:
    """A spool that writes everything that is not tiny, closed in the end."""
    spool = Spool(parent, budget_bytes, **{"min_bytes": 1024, **options})  # type: ignore[arg-type]
    try:
        yield spool
    finally:
        spool.close()


def wait_for(spool: Spool, is_so: Callable[[], bool]) -> None:
    """Wait until something holds of the insides of a spool."""
    blocks = spool.store.blocks
    deadline = time.monotonic() + 60
    with blocks:
        while not is_so():
            assert time.monotonic() < deadline
            blocks.changed.wait(0.002)


def wait_until_written(spool: Spool) -> None:
    """Wait until nothing is to be written, and the files are valid."""
    wait_for(spool, lambda: not spool.store.ledger.pending_bytes)
    spool.store.disk.pool.rest(0.0)
