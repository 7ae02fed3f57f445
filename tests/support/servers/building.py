"""Compiled variants built within the process of the test: another one needs seconds to start."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.servers.running_server import RunningServer
from trocar_server.engine.compiled.backends import build_worker
from trocar_server.engine.compiled.backends.build_worker import Built, Job
from trocar_server.engine.compiled.variant_building import Build, VariantBuilder
from trocar_server.engine.schedule.device import DeviceThread

_BUILDER = ThreadPoolExecutor(1, "builder")
"""One for all servers: torch 2.10 and 2.11 crash when a second thread of a process calls torch.export."""


def build_here(server: RunningServer) -> None:
    """Let a server build in this process, while its own thread waits: torch.export changes torch."""

    server.engine.compiled.builder.build_apart = builds_on(server.engine.owner)


def build_here_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do that for every server that starts from now on."""
    construct = VariantBuilder.__init__

    def patched(self: VariantBuilder, owner: DeviceThread, *given: Any) -> None:
        construct(self, owner, *given)
        self.build_apart = builds_on(owner)

    monkeypatch.setattr(VariantBuilder, "__init__", patched)


def builds_on(owner: DeviceThread) -> Build:
    """Return what builds in this process, while the thread that computes waits."""

    async def build(job: Job) -> Built:
        return await owner.run(lambda: _BUILDER.submit(build_worker.build, job).result())

    return build
