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
    from tests.support.selection.recording import Recording
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

if "PYTEST_XDIST_WORKER" in os.environ:
    # With more threads than cores, those of OpenMP spin while they wait for each other. Set before torch is
    # imported, and for the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Or OpenVINO's converter would fork this process for each conversion, to report it to its maker.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a sample, where a run has one; mark tests of a whole run, of the reliability page, of a GPU."""
    from tests.support import ROOT
    from tests.support.files.reliability_page import is_named, named_tests
    from tests.support.selection import sampling, whole_run

    sampling.select(config, items)
    whole_run.mark(items)
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests, and the one that records what they reach."""
    from tests.support.selection import recording, sampling

    sampling.add_options(parser)
    recording.add_options(parser)


_RECORDING: pytest.StashKey[Recording | None] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of a sample; begin to record."""
    from tests.support.selection import recording, sampling

    sampling.configure(config)
    config.stash[_RECORDING] = recording.begin(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell the seed of a sample."""
    from tests.support.selection import sampling

    return sampling.header(config)


@pytest.hookimpl(trylast=True)  # after the workers of an interrupted run have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what a run recorded."""
    if recording := session.config.stash[_RECORDING]:
        said = recording.finish()
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if said and reporter is not None:
            reporter.write_line(said)


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
