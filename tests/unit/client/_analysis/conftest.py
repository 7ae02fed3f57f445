"""Analyses over NumPy models, through the methods of both clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.client._analysis.fake_client import AsyncFakeClient, FakeClient, FakeModels
from trocar._async.analysis.analyses import AsyncAnalyses
from trocar._sync.analysis.analyses import Analyses

Analyse = Callable[..., Any]


@pytest.fixture(params=["sync", "aio"])
def analyse(request: pytest.FixtureRequest) -> Analyse:
    """Calls a method of a client, by name, on NumPy models; every test that uses it runs for both clients."""

    def call(fake: FakeModels, name: str, *arguments: Any, **options: Any) -> Any:
        client: Any = FakeClient(fake) if request.param == "sync" else AsyncFakeClient(fake)
        if request.param == "sync":
            return getattr(Analyses(client, client), name)(*arguments, **options)
        return asyncio.run(getattr(AsyncAnalyses(client, client), name)(*arguments, **options))

    return call
