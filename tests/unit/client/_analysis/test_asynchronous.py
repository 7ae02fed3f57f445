"""What only the asyncio client does: asynchronous batches, and a loop that stays free."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.unit.client._analysis.fake_client import AsyncFakeClient, FakeModels
from trocar._async.analysis.analyses import AsyncAnalyses
from trocar._base.tensors import Array

MODELS = {"m": {"x": lambda batch: batch * 2, "y": lambda batch: batch + 1}}


async def batches(x: Array, size: int) -> AsyncIterator[Array]:
    for start in range(0, len(x), size):
        await asyncio.sleep(0)
        yield x[start : start + size]


async def call(name: str, fake: FakeModels, *arguments: Any, **options: Any) -> Any:
    client: Any = AsyncFakeClient(fake)
    return await getattr(AsyncAnalyses(client, client), name)(*arguments, **options)


def images() -> Array:
    return np.random.default_rng(0).standard_normal((9, 3, 4, 4))


async def test_batches_may_be_asynchronous() -> None:
    report = await call("dead_channels", FakeModels(MODELS), "m", batches(images(), 4), "x")
    assert report["x"].dead == ()


async def test_asynchronous_batches_reach_both_models_once() -> None:
    fake = FakeModels({**MODELS, "n": MODELS["m"]})
    diff = await call("diff", fake, "m", "n", batches(images(), 4))
    assert (diff.first_diverging, diff.batch_count) == (None, 3)
    assert [len(batch) for batch in fake.batches] == [4, 4, 4, 4, 1, 1]


async def test_an_error_of_asynchronous_batches_is_raised() -> None:
    async def broken() -> AsyncIterator[Array]:
        yield images()
        raise OSError("the disk is gone")

    fake = FakeModels({**MODELS, "n": MODELS["m"]})
    with pytest.raises(OSError, match="the disk is gone"):
        await call("diff", fake, "m", "n", broken())
