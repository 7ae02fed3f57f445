"""Real servers, for the tests that want one: a shared one with small models, more on request.

torch is imported by the fixtures only, so that the client's tests run without it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import trocar
    from tests.support.models.gated_models import Gate
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

if "PYTEST_XDIST_WORKER" in os.environ:
    # With more threads than cores, those of OpenMP spin while they wait for each other. Set before torch is
    # imported, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Or OpenVINO's converter would fork this process for each conversion, to report it to its maker.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the page on reliability names; skip those that need a GPU where there is none."""
    from tests.support import ROOT
    from tests.support.files.reliability_page import is_named, named_tests

    _skip_without_cuda([item for item in items if item.get_closest_marker("cuda")])
    named = set(named_tests())
    files = {ROOT / file: file for file, _ in named}
    for item in items:
        file = files.get(item.path)
        if file is not None and isinstance(item, pytest.Function):
            cls = item.cls.__name__ if item.cls else ""
            if is_named(file, item.originalname, cls, named):
                item.add_marker("reliability")


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and keep them and their modules out of it afterwards.

    With a million objects a garbage collection takes 0.5 s, and imports cause a dozen of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the defects of servers in the report of a test that failed."""
    report = yield
    defects = sys.modules.get("tests.support.servers.defects")
    if defects is not None and report.when == "call":
        if report.failed and defects.TRACEBACKS:
            report.sections.append(("defects of servers", "\n".join(defects.TRACEBACKS)))
        defects.TRACEBACKS.clear()
    return report


_RERUN_LIMIT = 3
"""So many tests of a run may pass at a second try only (`--reruns 1`)."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how tests failed that passed at their second try: each is a defect, of a test or of Trocar."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed at first: {report.nodeid}", sep="_")
        report.toterminal(terminalreporter._tw)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which more tests than a few needed a second try: that is no chance."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    count = len(reporter.stats.get("rerun", []))
    if count > _RERUN_LIMIT and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{count} tests passed at a second try only: more than {_RERUN_LIMIT}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="session")
def _warm_python() -> Iterator[None]:
    """End the process of which programs are forks, if a test asked for one."""
    yield
    if warm_python := sys.modules.get("tests.support.servers.warm_python"):
        warm_python.close()


@pytest.fixture(autouse=True, scope="session")
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep servers that are given no folder out of this user's own state and downloads."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_width() -> Iterator[None]:
    """Keep tables and help texts independent of the width of this terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        os.unsetenv("COLUMNS")  # readline sets it beside `os.environ`, for processes that are started here
        yield


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt, here and in processes started here; a shell's background jobs ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Save the time of `os.fsync`: no power will be cut. Tests of durable writes replace it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    """Keep the servers' log lines out of the output; `structlog.testing.capture_logs` still sees them."""
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that stop with the test: `serve(models={...}, limits={...})`."""
    from tests.support.servers.running_server import running_server

    with ExitStack() as running:
        yield lambda **settings: running.enter_context(running_server(**{"device": "cpu", **settings}))


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server with the models of `serving.TINY`, shared by all tests: leave it as it was."""
    from tests.support.servers.running_server import running_server
    from tests.support.servers.serving import tiny_models_config

    with running_server(models=tiny_models_config(), device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    """A client of `server`: the shared one, or that of a module which has its own."""
    import trocar

    with trocar.connect(server.address) as connected:
        yield connected


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The gate of the gated models, released in any case when the test ends."""
    from tests.support.models.gated_models import GATE

    GATE.reset()
    yield GATE
    GATE.release()
