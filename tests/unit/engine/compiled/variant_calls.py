"""Networks of an engine without a server, and calls of them that may become compiled."""

import asyncio
from typing import Any

import numpy as np
import torch
from torch import nn

from trocar_server.engine.compiled.variant import Variant
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import (
    Execution,
    Payloads,
    Plan,
    TapRequest,
    TensorInput,
)
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.extraction import Extraction
from trocar_server.surgery import parse_selector

SIDE = 8
FAST = Execution(Numerics.FAST)
ROWS = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


class Chunks(nn.Module):
    """Calls its block for four samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.block(part) for part in x.split(4)])


class Whole(Chunks):
    """Calls its block once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.block(x)
        return made


class Photos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(x)
        return found


class Shifts(Chunks):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x.sub_(1.0))
        return found


class TokensFirst(Chunks):
    """Its block sees four tokens before the samples, as `nn.TransformerEncoder` does by default."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x.transpose(0, 1))
        return found.transpose(0, 1)


def plan_of(inputs: np.ndarray[Any, Any], tap: str, execution: Execution, model_id: str) -> Plan:
    given = TensorInput("", torch.from_numpy(inputs).dtype, inputs.shape)
    taps = (TapRequest(parse_selector(tap), alias="" if "*" in tap else "value"),)
    return Plan(model_id, taps, (given,), 1 << 20, execution=execution)


async def ask(
    engine: Engine,
    inputs: np.ndarray[Any, Any],
    tap: str = "block@-1",
    execution: Execution = FAST,
    model_id: str = "chunks",
) -> Extraction:
    return await engine.extract(await prepared(engine, inputs, tap, execution, model_id))


async def prepared(
    engine: Engine,
    inputs: np.ndarray[Any, Any],
    tap: str = "block@-1",
    execution: Execution = FAST,
    model_id: str = "chunks",
) -> Prepared:
    checked = await engine.checks.check(plan_of(inputs, tap, execution, model_id))
    return await engine.preparation.prepare(checked, Payloads([inputs.copy().reshape(-1).view(np.uint8)]))


def values(found: Extraction) -> dict[str, np.ndarray[Any, Any]]:
    maps = ((entry.output, entry.values) for entry in found.feature_maps)
    return {
        output.name: data.view(np.float32).reshape(output.shape) for output, data in maps if data is not None
    }


async def ready(engine: Engine, inputs: np.ndarray[Any, Any], tap: str, model_id: str = "chunks") -> Variant:
    """Ask until the variant for these calls is in use."""
    if model_id not in engine.deployments:
        await engine.deployments.load(model_id)
    for _ in range(4):
        await ask(engine, inputs, tap, model_id=model_id)
        await engine.compiled.settled()
    (variant,) = engine.compiled.variants()
    assert variant.is_ready
    return variant


async def turns_of_the_loop() -> None:
    """Let every task go on as far as it can without the device."""
    for _ in range(100):
        await asyncio.sleep(0)


def out_of_memory(*_: object) -> None:
    """Fail as a device without memory does."""
    raise torch.OutOfMemoryError("CUDA out of memory")
