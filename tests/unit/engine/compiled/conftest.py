"""An engine without a server, which compiles at the first call whatever it gains."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.servers.building import builds_on
from tests.unit.engine.compiled.backends.nets import Words
from tests.unit.engine.compiled.variant_calls import SIDE, Chunks, Photos, Shifts, TokensFirst, Whole
from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.models import Catalogue, ModelSpec, PreprocessingSpec
from trocar_server.models.spec import Merge

SHAPES = {Chunks: (3,), Photos: (3, SIDE, SIDE), Shifts: (3,), TokensFirst: (4, 3), Whole: (3,), Words: (4,)}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """The engine; nothing is loaded."""
    catalogue = Catalogue()
    for kind, shape in SHAPES.items():
        factory = f"{kind.__module__}:{kind.__qualname__}"
        rules = PreprocessingSpec(resize=(SIDE,), crop=(SIDE,)) if kind is Photos else None
        given: dict[str, Any] = {"input_shape": shape, "preprocessing": rules, "merge": Merge.EVERYBODY}
        catalogue.add(ModelSpec(kind.__name__.lower(), factory, "random:0", **given))
    owner = DeviceThread(torch.device("cpu"))
    owner.start()
    config = EngineConfig(compile_after=1, min_gain=0.0, openvino=False)
    found = Engine(catalogue, owner, Limits(), tmp_path, config=config)
    found.compiled.builder.build_apart = builds_on(owner)
    yield found
    await asyncio.to_thread(owner.stop)
