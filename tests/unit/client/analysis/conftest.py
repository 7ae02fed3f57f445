"""Analyses over NumPy models, through the methods of both clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import trocar
from tests.unit.client.analysis.fake_client import AsyncFakeClient, FakeClient, FakeModels

Analyse = Callable[..., Any]


@pytest.fixture(params=["sync", "aio"])
def analyse(request: pytest.FixtureRequest) -> Analyse:
    """Calls a method of a client, by name, on NumPy models; every test that uses it runs for both clients."""

    def call(fake: FakeModels, name: str, *arguments: Any, **options: Any) -> Any:
        if request.param == "sync":
            return getattr(trocar.Client, name)(FakeClient(fake), *arguments, **options)
        method = getattr(trocar.AsyncClient, name)
        return asyncio.run(method(AsyncFakeClient(fake), *arguments, **options))

    return call
