"""Real servers, for the tests that want one: a shared one with small models, more on request.

torch is imported by the fixtures only, so that the client's tests run without it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trocar
    from tests.support.gated_models import Gate
    from tests.support.running_server import RunningServer
    from tests.support.serving import Serve


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the page on reliability names."""
    from tests.support.reliability_page import ROOT, is_named, named_tests

    named = set(named_tests())
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(ROOT):
            file = item.path.relative_to(ROOT).as_posix()
            cls = item.cls.__name__ if item.cls else ""
            if is_named(file, item.originalname, cls, named):
                item.add_marker("reliability")


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    """Keep the servers' log lines out of the output; `structlog.testing.capture_logs` still sees them."""
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that stop with the test: `serve(models={...}, limits={...})`."""
    from tests.support.running_server import running_server

    with ExitStack() as running:
        yield lambda **settings: running.enter_context(running_server(**{"device": "cpu", **settings}))


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server with the models of `serving.TINY`, shared by all tests: leave it as it was."""
    from tests.support.running_server import running_server
    from tests.support.serving import tiny_models_config

    with running_server(models=tiny_models_config(), device="cpu") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    """A client of `server`."""
    import trocar

    with trocar.connect(server.address) as connected:
        yield connected


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The gate of the gated models, released in any case when the test ends."""
    from tests.support.gated_models import GATE

    GATE.reset()
    yield GATE
    GATE.release()
