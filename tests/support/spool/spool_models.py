"""One training step of a torchvision model, plainly and with a spool: the gradients must be the same bits.

Inputs are as small as the model takes, so that every model can be tried. Dropout and the like draw the same
random numbers in both steps.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torchvision.models import get_model_builder

from tests.support.spool.spool_audit import AuditedLedger
from trocar_server.spool import Report, Spool
from trocar_server.spool.blocks import block_store

Gradients = list[torch.Tensor]

_MIB = 1 << 20
_SIZES = (64, 96, 128, 224, 299)
_BATCH = 2
_MOST_BYTES = 10 << 30


@dataclass(frozen=True)
class Outcome:
    """What came of a model.

    Attributes:
        error: What is wrong; None where nothing is.
        skipped: Why it was not tried; None where it was.
        text: The size of the inputs, the spool's budget, what it wrote.
    """

    error: str | None = None
    skipped: str | None = None
    text: str = ""


def outcome(name: str, directory: Path) -> Outcome:
    """Try a model with a spool whose budget is drawn by the model's name."""
    model = built(name)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if 4 * model_bytes > _MOST_BYTES:
        return Outcome(skipped=f"parameters of {model_bytes / _MIB:,.0f} MiB")
    size, plain = _smallest_step(name, model)
    draw = random.Random(name)
    budget = draw.choice([0, _MIB, 16 * _MIB, draw.randrange(64 * _MIB)])
    options = {"min_bytes": draw.choice([0, 32 << 10]), "keep": [model], "checksum": draw.random() < 0.5}
    error, report = _spooled(name, model, size, plain, directory, budget, options)
    if error is None and not report.written_bytes:
        budget = draw.randrange(report.unique_bytes)
        error, report = _spooled(name, model, size, plain, directory, budget, options)
    text = f"{size:>3} pixels, budget {budget / _MIB:5.1f} MiB, saved {report.unique_bytes / _MIB:7.1f}"
    return Outcome(error, text=f"{text}, written {report.written_bytes / _MIB:7.1f}")


def _spooled(
    name: str,
    model: nn.Module,
    size: int,
    plain: Gradients,
    directory: Path,
    budget_bytes: int,
    options: dict[str, Any],
) -> tuple[str | None, Report]:
    with patch.object(block_store, "Ledger", AuditedLedger):
        spool = Spool(directory, budget_bytes, **options)
    try:
        found = gradients(name, model, size, spool)
        return _error(plain, found, spool), spool.report()
    finally:
        spool.close()


def built(name: str) -> nn.Module:
    """Return a model to be trained, with random weights, also where heads begin as zeros."""
    torch.manual_seed(0)
    builder = get_model_builder(name)
    arguments: dict[str, Any] = {"weights": None}
    if "weights_backbone" in builder.__annotations__:
        arguments["weights_backbone"] = None
    if name.startswith("vit_"):
        arguments["image_size"] = 56 if name == "vit_h_14" else 64
    if "rcnn" in name or name.startswith(("retinanet", "fcos")):
        arguments.update(min_size=160, max_size=224)  # to which pictures are scaled; 800 by default
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False
    model: nn.Module = builder(**arguments).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)
    return model


def gradients(name: str, model: nn.Module, size: int, spool: Spool | None = None) -> Gradients:
    """Return the gradients of one step, and its loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    context: AbstractContextManager[Any] = nullcontext() if spool is None else spool
    arguments = _arguments(name, size)
    with context:
        # Means of squares: every output counts, none by so much that the others vanish.
        loss = torch.stack([output.float().square().mean() for output in _tensors(model(*arguments))]).sum()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*found, loss.detach()]


def _smallest_step(name: str, model: nn.Module) -> tuple[int, Gradients]:
    for size in _SIZES[:-1] if not name.startswith("vit_h") else (56,):
        try:
            return size, gradients(name, model, size)
        except (RuntimeError, ValueError, AssertionError, IndexError):
            continue
    return _SIZES[-1], gradients(name, model, _SIZES[-1])


def _arguments(name: str, size: int) -> tuple[Any, ...]:
    numbers = torch.Generator().manual_seed(2)
    if "rcnn" in name or name.startswith(("retinanet", "fcos", "ssd")):
        return _scenes(numbers)
    if name.startswith("raft"):
        frames = torch.rand(2, 1, 3, 128, 128, generator=numbers) * 2 - 1
        return frames[0], frames[1], 2
    if name.startswith(("mvit", "swin3d")) or name in ("r3d_18", "mc3_18", "r2plus1d_18", "s3d"):
        side = 224 if name.startswith("mvit") else size
        return (torch.randn(1 if side == 224 else _BATCH, 3, 16, side, side, generator=numbers),)
    return (torch.randn(_BATCH, 3, size, size, generator=numbers),)


def _scenes(numbers: torch.Generator) -> tuple[Any, ...]:
    """Two pictures with two boxes each, for detectors; these scale them to their own size."""
    images = [torch.rand(3, 96, 128, generator=numbers) for _ in range(2)]
    target = {
        "boxes": torch.tensor([[8.0, 8.0, 60.0, 70.0], [30.0, 20.0, 110.0, 90.0]]),
        "labels": torch.tensor([1, 1]),
        "masks": torch.ones(2, 96, 128, dtype=torch.uint8),
        "keypoints": torch.rand(2, 17, 3, generator=numbers) * 50 + 10,
    }
    target["keypoints"][..., 2] = 1
    return images, [target, dict(target)]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, Iterable):
        for each in output:
            yield from _tensors(each)


def _error(plain: Gradients, found: Gradients, spool: Spool) -> str | None:
    ledger = spool.store.ledger
    assert isinstance(ledger, AuditedLedger)
    if ledger.failures:
        return f"the ledger: {ledger.failures[0]}"
    if not ledger.is_empty:
        return "blocks are left"
    if not all(gradient.isfinite().all() for gradient in plain):
        return "the plain step has no finite gradients"
    if 2 * sum(bool(gradient.any()) for gradient in plain) < len(plain):
        return "most gradients of the plain step are zeros"
    different = sum(not torch.equal(*pair) for pair in zip(plain, found, strict=True))
    return f"{different} of {len(plain)} gradients differ" if different else None
